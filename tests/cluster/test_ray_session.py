"""What a session of one's own opens to others, what it leaves behind, and how it tells that Ray itself died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray import cloudpickle

from rlctl.cluster import ray_session
from rlctl.cluster.ray_session import BesideSession, asks_for_token
from rlctl.cluster.session_files import lasting_folder
from rlctl.cluster.workers import WorkerGroup, WorkerSpec
from rlctl.config.files import abandoned
from rlctl.errors import MachineError
from support.processes import beyond_loopback, family_of, listening
from support.runs import wait_until_gone

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Rank:
    """A process that meets another one as the ranks of a policy do."""

    def __init__(self, rank: int) -> None:
        self.rank, self.store = rank, None

    def open_store(self) -> int:
        from rlctl.cluster.placement import node_address
        from rlctl.transport.process_group import ServedStore

        self.store = ServedStore(str(node_address()), 60)
        return self.store.port

    def join(self, port: int) -> int:
        import torch
        from torch.distributed import TCPStore

        from rlctl.cluster.placement import node_address

        store = self.store or TCPStore(str(node_address()), port, is_master=False)
        torch.distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        return int(value)


@pytest.fixture(scope="module")
def ranks(placement: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup[Rank]]:
    specs = [WorkerSpec({"rank": rank}, (placement.bundles[rank],)) for rank in range(2)]
    logs = tmp_path_factory.mktemp("logs")
    group = WorkerGroup("rank", Rank, specs, placement, logs, start_timeout_s=240, call_timeout_s=120)
    yield group
    group.kill()


def test_all_processes_of_one_machine_listen_on_the_loopback_alone(ranks: WorkerGroup[Rank]) -> None:
    [port] = ranks.part([0]).call(Rank.open_store)
    assert ranks.call(Rank.join, port) == [2, 2]
    family = family_of(psutil.Process())
    assert {"gcs_server", "raylet", "ray::WorkerHost"} <= {name for name, found in listening(family).items() if found}
    assert beyond_loopback(family) == []


def test_no_signal_to_this_process_group_reaches_the_processes_of_ray(ranks: WorkerGroup[Rank]) -> None:
    """Nor one from the terminal: they are in sessions of their own, and so are the workers."""
    raylet = next(one for one in psutil.Process().children(recursive=True) if one.name() == "raylet")
    for process in (raylet, *raylet.children(recursive=True)):
        assert os.getsid(process.pid) != os.getsid(0)
        assert os.getpgid(process.pid) != os.getpgid(0)


def test_files_of_a_session_are_their_users_alone(ranks: WorkerGroup[Rank]) -> None:
    from ray._private import worker

    assert worker._global_node is not None
    session = Path(worker._global_node.get_session_dir_path())
    assert session.parents[1].name.startswith("rlctl-")
    assert session.parents[1].stat().st_mode & 0o077 == 0


def test_a_session_turns_away_who_has_no_token(ranks: WorkerGroup[Rank]) -> None:
    import ray

    assert asks_for_token(ray.get_runtime_context().gcs_address)


def test_a_machine_that_is_no_node_of_the_cluster_is_told_so(ranks, monkeypatch) -> None:
    """Ray would abort the process."""
    import ray

    address = ray.get_runtime_context().gcs_address
    ray_session._require_membership(address)
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    with pytest.raises(
        MachineError, match=rf"not a node of the Ray cluster at {address} \(its nodes are 127\.0\.0\.1\)"
    ):
        ray_session._require_membership(address)


def test_the_files_of_ray_are_in_a_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", "here")
    assert ray_session.session_base() == tmp_path / "here"
    monkeypatch.setenv("RAY_TMPDIR", "")
    assert ray_session.session_base() == Path("/tmp")


def test_a_folder_whose_name_is_too_long_for_the_sockets_of_ray_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    said = r"x is too long: .* Name a directory, or a link to one, in at most \d\d bytes"
    with pytest.raises(MachineError, match=said), ray_session._started(0, lambda: None):
        pass
    assert not list(folder.iterdir())


def test_a_folder_is_removed_at_the_end_and_an_abandoned_one_by_the_next_session(tmp_path: Path) -> None:
    shared = Path(f"/dev/shm/test-{os.getpid()}")
    code = "import os, sys, time; from pathlib import Path; from rlctl.cluster.session_files import *\n"
    code += "with lasting_folder(Path(sys.argv[1])) as folder:\n    print(folder, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        other = Path(holder.stdout.readline().strip())
        assert other.stat().st_mode & 0o077 == 0
        with lasting_folder(tmp_path) as own:
            assert own.parent == other.parent == tmp_path
        assert not own.exists()
        assert abandoned("", tmp_path) == []
        holder.kill()
    shared.touch()
    (other / "shared-memory-1").write_text(f"{shared}\n")
    assert abandoned("", tmp_path) == [other]
    with lasting_folder(tmp_path):
        assert not other.exists()
        assert not shared.exists()


# A run of two workers. Each has shared memory, a temporary file and a child that outlives it.
RUN = """
import json, os, re, signal, subprocess, sys, tempfile, time
from pathlib import Path
from ray import cloudpickle
from rlctl.cluster import progress
from rlctl.cluster.placement import Placement
from rlctl.cluster.ray_health import dead_process
from rlctl.cluster.ray_session import ray_session
from rlctl.cluster.workers import WorkerGroup, WorkerSpec
from rlctl.errors import RlctlError

class Worker:
    def begin(self):
        from rlctl.transport.staging import Segment
        self.segment = Segment.create(4096)
        self.child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        file = tempfile.mkstemp()[1]
        return {"files": [self.segment.address.path, file], "pids": [os.getpid(), self.child.pid],
                "niceness": os.nice(0)}

    def work(self, seconds):
        time.sleep(seconds)
        progress.report(1, 2)
        return "done"

logs, victim, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    with ray_session(logs=logs):
        from ray._private import worker
        node = worker._global_node
        own_answer = signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        place = Placement(2, gpus=False, timeout_s=240)
        specs = [WorkerSpec({}, (bundle,)) for bundle in place.bundles]
        group = WorkerGroup("w", Worker, specs, place, logs, start_timeout_s=120, call_timeout_s=120)
        told = {"begun": group.call(Worker.begin), "own_answer": own_answer,
                "ray": [p.pid for _, p in node.live_processes()], "session": node.get_session_dir_path()}
        asked = group.submit(Worker.work, seconds)
        os.kill(node.all_processes[victim][0].process.pid, 9)
        try:
            told["finished"] = asked.results()
            told["dead"] = dead_process()
            group.restart([0])
        finally:
            group.kill()
            place.release()
except RlctlError as error:
    told["error"] = error.message
caught = int(re.search("SigCgt:\\s*(.*)", Path("/proc/self/status").read_text())[1], 16)
told["catches"] = bool(caught >> (signal.SIGTERM - 1) & 1)  # what the kernel knows of it, not what Python believes
print(json.dumps(told))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "seconds", "finished", "said"),
    [
        pytest.param(
            "gcs_server", 75, ["done"] * 2, "Ray's control process (gcs_server) died.", marks=pytest.mark.slow
        ),
        pytest.param("raylet", 2, None, "The raylet of this node died."),
    ],
)  # fmt: skip
def test_a_dead_process_of_ray_is_named_and_nothing_is_left(
    tmp_path: Path, victim: str, seconds: int, finished: Any, said: str
) -> None:
    """Calls under way are finished where they can be, also those that take longer than the minute for which Ray's
    processes wait for a lost control process. Workers are as nice as the run, and start below `uv run` too."""
    script = tmp_path / "run"
    script.write_text('nice -n 3 "$@"\n')
    below_uv = ["bash", "-c", 'exec -a uv bash "$0" "$@"', "run"]
    arguments = [*below_uv, sys.executable, "-c", RUN, str(tmp_path / "logs"), victim, str(seconds)]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["error"] == said
    assert told["own_answer"], "Ray's handler of SIGTERM ends a command without a word"
    assert told["catches"], "SIGTERM would end this process before it has told how the run ended"
    assert [one["niceness"] for one in told["begun"]] == [os.nice(0) + 3] * 2
    assert told.get("finished") == finished
    assert told.get("dead") == (said.removesuffix(" died.") if finished else None)
    assert list((tmp_path / "logs" / "ray").glob("raylet.*"))
    assert not Path(told["session"]).parents[1].exists()
    assert not [file for one in told["begun"] for file in one["files"] if Path(file).exists()]
    assert not [pid for pid in (*told["ray"], *(p for one in told["begun"] for p in one["pids"])) if runs(pid)]


BESIDE = """
import json, sys, time
import psutil
from rlctl.cluster.ray_session import BesideSession
from rlctl.errors import InputError

when, told = sys.argv[1], {}
def family():
    return {process.pid: process.name() for process in psutil.Process().children(recursive=True)}
try:
    with BesideSession() as ray:
        ray.begin(gpus=0)
        if when == "starting":
            while not any("gcs_server" in name for name in family().values()):
                time.sleep(0.01)
        if when == "started":
            ray.wait()
            import ray as library
            told["value"] = library.get(library.put(7))
        told["family"] = family()
        raise InputError("the data is wrong.")
except InputError as error:
    told["error"] = error.message
told["left"] = family()
with BesideSession() as ray:  # a program goes on with another one
    ray.begin(gpus=0)
    ray.wait()
    told["again"] = sys.modules["ray"].is_initialized()
told["left_again"] = family()
print(json.dumps(told))
"""


@pytest.mark.parametrize(
    "when", [pytest.param("begun", marks=pytest.mark.slow), "starting", pytest.param("started", marks=pytest.mark.slow)]
)
def test_a_session_that_starts_beside_an_error_is_ended_with_it(when: str) -> None:
    """The error of the block is the one that is told, and whatever Ray has started by then is gone before it is."""
    program = [sys.executable, "-c", BESIDE, when]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["error"] == "the data is wrong."
    assert told["family"] or when == "begun"
    assert told.get("value") == (7 if when == "started" else None)
    assert (told["left"], told["again"], told["left_again"]) == ({}, True, {})


IN_A_FINDER = """
import os, sys, threading
assert "logging" not in sys.modules
at_fork, in_finder, moved = threading.Event(), threading.Event(), threading.Event()
os.register_at_fork(before=moved.set)  # called when logging, which registers later, has taken its lock
import logging, subprocess
from rlctl.cluster.ray_session import BesideSession

plain = subprocess.Popen.__init__

def start(process, *arguments, **settings):
    of_ray = any("gcs_server" in word for word in arguments[0])
    if of_ray:
        at_fork.set()
        in_finder.wait()
    plain(process, *arguments, **settings)
    if of_ray:
        moved.set()

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "looked_for":
            in_finder.set()
            moved.wait()
            logging.getLogger("a logger of a module that the finder imports")

subprocess.Popen.__init__ = start
sys.meta_path.insert(0, Finder())
with BesideSession() as ray:
    ray.begin(gpus=0)
    at_fork.wait()
    try:
        import looked_for
    except ModuleNotFoundError:
        ray.wait()
        print("both went on")
"""


@pytest.mark.guard
@pytest.mark.slow
def test_ray_starts_beside_a_finder_that_takes_the_lock_of_logging() -> None:
    """Python holds the lock of all imports while a finder runs, and a fork with a `preexec_fn` takes logging's lock and
    then that of imports."""
    try:
        done = subprocess.run([sys.executable, "-c", IN_A_FINDER], capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        pytest.fail("the start stands still")
    assert done.stdout == "both went on\n", done.stderr


DEAD_BESIDE = """
import psutil
from rlctl.cluster.ray_session import BesideSession
from rlctl.cluster.worker_host import EarlyHost, EarlyHosts
from rlctl.errors import ClusterError

plain = EarlyHosts.start

def start(early, hosts):
    control = next(process for process in psutil.Process().children() if process.name() == "gcs_server")
    control.kill()
    psutil.wait_procs([control])
    plain(early, hosts)

EarlyHosts.start = start
try:
    with BesideSession() as ray:
        ray.begin(gpus=0, hosts=[EarlyHost("worker", {}, 1, ())])
        ray.wait()
except ClusterError as error:
    print(error.message, psutil.Process().children(recursive=True))
"""


@pytest.mark.slow
@pytest.mark.guard
def test_a_control_process_that_dies_while_workers_start_early_is_named() -> None:
    """Ray's own call would wait for it for `PATIENCE`."""
    done = subprocess.run([sys.executable, "-c", DEAD_BESIDE], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "Ray's control process (gcs_server) died. []\n", done.stderr


def test_a_session_that_cannot_start_says_so_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with BesideSession() as beside, monkeypatch.context() as patch:
        patch.setattr(ray_session, "ray_session", _refusing)
        beside.begin()
        with pytest.raises(MachineError, match="did not start"):
            beside.wait()


def _refusing(*_: object, **__: object) -> None:
    raise MachineError("Ray did not start.")


KILLED = """
import json, os, signal, sys
import psutil
from rlctl.cluster.ray_session import ray_session

with ray_session():
    family = psutil.Process().children(recursive=True)
    print(json.dumps([process.pid for process in family]), flush=True)
    for process in family:
        if process.name() not in ("gcs_server", "raylet") and process.parent().name() == "raylet":
            process.suspend()  # it does not notice that Ray is gone
    (os.killpg if sys.argv[1] == "group" else os.kill)(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("whom", ["driver", pytest.param("group", marks=pytest.mark.slow)])
def test_processes_of_a_killed_session_end_with_it(tmp_path: Path, whom: str) -> None:
    program = [sys.executable, "-c", KILLED, whom]
    killed = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False, start_new_session=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    pids = json.loads(killed.stdout)
    assert len(pids) > 3
    wait_until_gone([process for process in psutil.process_iter() if process.pid in pids])


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
