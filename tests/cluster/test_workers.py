"""Worker groups on a real Ray session: results in rank order, and every failure names who failed."""

import os
import signal
import sys
import sysconfig
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, OutOfMemoryError

from rlctl.backends.clients import PolicyClient
from rlctl.cluster import workers
from rlctl.cluster.placement import Placement
from rlctl.cluster.ray_session import fetch
from rlctl.cluster.worker_host import EarlyHost, EarlyHosts
from rlctl.cluster.workers import (
    PendingCall,
    WorkerDiedError,
    WorkerGroup,
    WorkerPlaces,
    WorkerSpec,
    failing_with,
    telling_waits,
)
from rlctl.errors import InputError, MachineError, WaitTimeoutError, WorkerError
from support.forked_workers import started_anew

# Workers cannot import a test module: its classes travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Counter:
    """A worker with something to go wrong."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def rank_plus(self, value: int) -> int:
        return self.rank + value

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def import_path(self) -> tuple[list[str], bool]:
        return sys.path, sys.flags.safe_path

    def refuse(self) -> None:
        raise InputError("the file `x` is empty.", "Fill it.")

    def break_down(self, rank: int) -> None:
        print("about to divide", flush=True)
        if self.rank == rank:
            raise ZeroDivisionError("by zero")
        time.sleep(600)

    def die(self) -> None:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            self.die()

    def run_late(self, rank: int) -> None:
        if self.rank == rank:
            raise WaitTimeoutError("It took too long.")

    def hang(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(600)

    def doze(self, rank: int, seconds: float) -> None:
        if self.rank == rank:
            time.sleep(seconds)

    def device_used(self) -> None:
        """Answer, as a policy's rank."""

    def make(self, lengths: tuple[int, ...]) -> tuple[str, list[np.ndarray]]:
        return f"made by {self.rank}", [np.arange(length, dtype=np.int32) + self.rank for length in lengths]

    def total(self, handle: object) -> int:
        return int(fetch(handle).sum(dtype=np.int64))

    def imported(self, module: str) -> bool:
        return module in sys.modules

    def is_forked(self) -> bool:
        """Whether this process comes from the server of the tests' workers, which has imported that module."""
        return "support.forked" in sys.modules


class Head:
    """A worker that starts one of its own."""

    def __init__(self, places: WorkerPlaces) -> None:
        self.group = places.start(Counter, [WorkerSpec({"rank": 7}, places.bundles)])

    def ask(self) -> tuple[list[int], int]:
        return self.group.call(Counter.rank_plus, 1), self.group.pids[0]


@pytest.fixture(scope="module")
def gpus(placement):
    """Places with a GPU each, by Ray's account."""
    places = Placement(2, gpus=True, timeout_s=240)
    yield places
    places.release()


def start_group(gpus, logs):
    specs = [WorkerSpec({"rank": r}, (gpus.bundles[r],), {"FLAVOUR": f"f{r}"}) for r in range(2)]
    return WorkerGroup("counter", Counter, specs, gpus, logs, start_timeout_s=120, call_timeout_s=60)


@pytest.fixture
def group(gpus, tmp_path):
    group = start_group(gpus, tmp_path / "logs")
    yield group
    group.kill()


@pytest.fixture(scope="module")
def lasting(gpus, tmp_path_factory):
    """A group for the tests that leave it as it was: rank 0 has a GPU and rank 1 none. The PATH has no environment."""
    first, second = gpus.bundles
    specs = [WorkerSpec({"rank": rank}, (one,), {"FLAVOUR": f"f{rank}", "PATH": "/usr/bin:/bin", "STARTED_ANEW": "1"})
             for rank, one in enumerate((first, replace(second, gpu=None)))]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS")
        group = WorkerGroup(
            "counter", Counter, specs, gpus, tmp_path_factory.mktemp("logs"), start_timeout_s=120,
            call_timeout_s=60,
        )  # fmt: skip
    yield group
    group.kill()


@pytest.mark.slow
def test_workers_of_tests_marked_gpu_are_started_anew(request, gpus, tmp_path):
    """CUDA cannot be used in a process that was forked from one in which it was asked for."""
    forked = start_group(gpus, tmp_path / "forked")
    assert forked.call(Counter.is_forked) == [True, True]
    forked.kill()
    request.node.add_marker("gpu")
    with started_anew(request.node):
        anew = start_group(gpus, tmp_path / "anew")
    assert anew.call(Counter.is_forked) == [False, False]
    anew.kill()


def is_ended(host, within_s=60.0):
    """Whether Ray ends a process in its own time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            ray.get(host.usage.remote(), timeout=within_s)
        except ActorDiedError:
            return True
    return False


@pytest.mark.guard
@pytest.mark.slow
def test_a_worker_takes_the_process_that_was_started_early_for_it(gpus, tmp_path):
    """One for another environment stays as it is, and ends with the others that nobody takes."""
    place = replace(gpus.bundles[0], gpu=None)
    specs = [WorkerSpec({"rank": rank}, (place,), {"FLAVOUR": flavour}) for rank, flavour in enumerate("ab")]
    early = EarlyHosts()
    early.start([EarlyHost("counter", specs[0].environment(), 1, ("no_such_module", "wave")),
                 EarlyHost("other", specs[1].environment(), 1, ()),
                 EarlyHost("counter", {**specs[1].environment(), "FLAVOUR": "c"}, 1, ())])  # fmt: skip
    hosts = [host for _, host in early._free]
    group = WorkerGroup("counter", Counter, specs, gpus, tmp_path, start_timeout_s=120, call_timeout_s=60, early=early)
    try:
        assert [host in hosts for host in group.hosts] == [True, False]
        assert group.call(Counter.imported, "wave") == [True, False]
        assert group.call(Counter.environment, "FLAVOUR") == ["a", "b"]
        early.drop()
        assert group.call(Counter.rank_plus, 1) == [1, 2]
        assert all(is_ended(host) for host in hosts[1:])
    finally:
        early.drop()
        group.kill()


def test_a_wait_ends_with_the_failure_of_what_runs_beside_it(gpus, group, tmp_path):
    """What starts beside something slower is not noticed after it alone."""
    other = WorkerGroup(
        "other", Counter, [WorkerSpec({"rank": 0}, (gpus.bundles[0],))], gpus, tmp_path / "logs", start_timeout_s=120,
        call_timeout_s=60,
    )  # fmt: skip
    try:
        beside = other.submit(Counter.rank_plus, 1)
        with failing_with(beside):  # which succeeds
            assert group.call(Counter.rank_plus, 5) == [5, 6]
        assert beside.results() == [1]
        late = other.within(0.1).submit(Counter.doze, 0, 5.0)
        with failing_with(late):  # the time that a wait may take is its own
            assert group.call(Counter.rank_plus, 5) == [5, 6]
        begun = time.monotonic()
        with failing_with(other.submit(Counter.refuse)), pytest.raises(InputError, match="the file `x` is empty"):
            group.call(Counter.doze, 1, 50.0)  # the last call: the next would wait for it
        assert time.monotonic() - begun < 40
    finally:
        other.kill()


def test_workers_import_nothing_from_the_working_directory(lasting):
    for path, safe in lasting.call(Counter.import_path):
        assert os.getcwd() not in path
        assert "" not in path
        assert safe  # and so is what they start: Python passes it on


def test_results_come_in_rank_order_and_environment_is_per_rank(lasting):
    group = lasting
    assert group.call(Counter.rank_plus, 10) == [10, 11]
    assert group.call_each(Counter.rank_plus, [(1,), (5,)]) == [1, 6]
    assert group.call(Counter.environment, "FLAVOUR") == ["f0", "f1"]
    assert len(set(group.pids)) == 2


def test_ranks_see_their_gpu_and_divide_the_cores_of_their_node_by_its_gpus(lasting):
    """Ray gives a process one thread. Those without a GPU keep it, as do those whose threads the user has set."""
    assert lasting.call(Counter.environment, "CUDA_VISIBLE_DEVICES") == ["0", ""]
    cores = len(os.sched_getaffinity(0))
    assert lasting.call(Counter.environment, "OMP_NUM_THREADS") == [str(cores), "1"]
    assert lasting._sharers(0) == 0  # the tests have set OMP_NUM_THREADS


def test_workers_find_the_programs_of_their_environment(lasting):
    """FlashInfer looks for `ninja` on the PATH."""
    own = sysconfig.get_path("scripts")
    assert lasting.call(Counter.environment, "PATH") == [f"{own}:/usr/bin:/bin"] * 2


def test_workers_read_their_own_files_whatever_the_locale_and_whatever_is_warned_of(lasting):
    """The libraries of engines open their files without an encoding, and warn of much."""
    assert WorkerSpec({}, ()).environment().items() >= {("PYTHONUTF8", "1"), ("PYTHONWARNINGS", "")}
    assert lasting.call(Counter.environment, "PYTHONUTF8") == ["1", "1"]


def test_the_memory_of_each_process_is_told(lasting):
    group = lasting
    peaks = group.peak_memory()
    assert len(peaks) == 2
    assert all(10e6 < peak["host"] < 10e9 for peak in peaks)


def test_the_usage_of_each_process_is_told(lasting, monkeypatch):
    monkeypatch.setattr("rlctl.cluster.workers.USAGE_LIMIT_S", 60.0)
    first, second = lasting.usage()
    assert first.node == second.node
    assert all(10e6 < usage.process_bytes < usage.node_total_bytes for usage in (first, second))


def test_what_a_worker_made_passes_to_others_by_handle_and_outlives_it(group):
    lengths = [(5, 10**6), ()]  # small ones travel with the answer, large ones stay in the store
    asked, (handles, none) = group.submit_by_handle(
        Counter.make, [(part,) for part in lengths], [len(part) for part in lengths]
    )
    assert asked.results() == ["made by 0", "made by 1"]
    assert none == []
    os.kill(group.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError):
        group.call(Counter.rank_plus, 0)
    survivor = group.part([1])
    for length, handle in zip(lengths[0], handles, strict=True):
        assert survivor.call(Counter.total, handle) == [length * (length - 1) // 2]
        assert fetch(handle).shape == (length,)


def test_what_a_dead_worker_was_to_make_is_an_error_like_its_result(group):
    asked, _ = group.submit_by_handle(Counter.die, [()] * 2, [3, 3])
    assert [type(found).__name__ for found in asked.outcomes()] == ["WorkerDiedError"] * 2


def test_a_worker_that_does_not_answer_takes_no_result_of_the_others_along(group):
    answered, late = group.within(5).submit(Counter.hang, 1).outcomes()
    assert answered is None
    assert isinstance(late, WaitTimeoutError)
    assert "counter rank 1 did not finish `hang` in 5 s" in late.message
    with pytest.raises(WaitTimeoutError, match=r"counter rank 1 did not finish `rank_plus` in 2 s"):
        group.within(2).call(Counter.rank_plus, 1)  # it still hangs


def test_a_worker_that_says_itself_that_it_is_late_takes_no_result_of_the_others_along(lasting):
    answered, late = lasting.submit(Counter.run_late, 1).outcomes()
    assert answered is None
    assert isinstance(late, WaitTimeoutError)


def test_who_is_waited_for_is_said_after_a_quiet_minute_unless_there_is_progress(lasting, monkeypatch):
    monkeypatch.setattr(workers, "QUIET_S", 0.1)
    told = []
    with telling_waits(told.append):
        assert lasting.call(Counter.rank_plus, 1) == [1, 2]
        for wait in (PendingCall.results, PendingCall.outcomes):
            told.clear()
            wait(lasting.submit(Counter.doze, 1, 0.5))
            assert len(told) >= 2
            assert told[-1].endswith(" s for counter rank 1 (`doze`)")
        told.clear()
        monkeypatch.setattr(WorkerGroup, "progress", lambda self: {0: (time.monotonic_ns(), 0)})
        lasting.call(Counter.doze, 1, 0.3)
        assert told == []


def test_an_error_meant_for_the_user_arrives_as_it_was_raised(lasting):
    with pytest.raises(InputError, match="the file `x` is empty") as caught:
        lasting.call(Counter.refuse)
    assert caught.value.hint == "Fill it."
    assert caught.value.exit_code == 2


def test_a_worker_that_raises_is_named_at_once_though_others_still_work(group):
    with pytest.raises(WorkerError, match=r"counter rank 1 failed in `break_down`: ZeroDivisionError: by zero"):
        group.call(Counter.break_down, 1)


def test_a_worker_that_dies_is_named_with_its_last_lines(group, monkeypatch):
    with pytest.raises(WorkerError, match=r"counter rank 0 .*died during `die`\. Its last lines[\s\S]*last words"):
        group.part([0]).call(Counter.die)
    before = workers.oom_kills()
    monkeypatch.setattr("rlctl.cluster.workers.oom_kills", lambda: before + 1)
    with pytest.raises(WorkerDiedError, match="kernel killed a process of this host for lack of memory") as raised:
        group.part([1]).call(Counter.die)
    assert "use a smaller model" in str(raised.value)


def test_a_process_that_ray_ends_for_want_of_memory_is_told_in_a_sentence(lasting, monkeypatch):
    """Ray itself says it in forty lines."""
    ended = OutOfMemoryError("1 worker(s) were killed. Memory on the node was 2.57GB used / 3.5GB limit (0.7)")
    monkeypatch.setattr("ray.get", lambda ref: (_ for _ in ()).throw(ended))
    said = r"^counter rank 0 was ended by Ray during `train`, because the host ran out of memory: 2\.57GB of 3\.5GB"
    with pytest.raises(WorkerDiedError, match=said):
        lasting.result(None, 0, "train")


def test_processes_that_the_kernel_ended_are_counted(tmp_path):
    (tmp_path / "vmstat").write_text("oom_killer_other 9\noom_kill 3\n")
    assert (workers.oom_kills(tmp_path / "vmstat"), workers.oom_kills(tmp_path / "absent")) == (3, 0)


def test_a_worker_that_died_is_replaced_or_left_out_and_the_others_are_waited_for(group, monkeypatch):
    pids = list(group.pids)
    asked = [group.submit(Counter.rank_plus, 10).refs[0], group.submit(Counter.die_on, 1).refs[1]]
    found = PendingCall(group, "die_on", asked).outcomes()
    assert found[0] == 10
    assert isinstance(found[1], WorkerError)
    assert "counter rank 1" in found[1].message
    monkeypatch.setattr("rlctl.cluster.workers.USAGE_LIMIT_S", 60.0)
    assert len(group.usage()) == 1
    group.restart([1])
    assert group.call(Counter.rank_plus, 10) == [10, 11]
    assert group.call(Counter.environment, "FLAVOUR") == ["f0", "f1"]
    assert group.pids[0] == pids[0] != group.pids[1] != pids[1]
    group.drop([0])
    assert group.call(Counter.rank_plus, 10) == [11]


def test_each_lost_rank_of_a_policy_counts_once_and_ranks_that_wait_for_it_do_not(group, monkeypatch):
    """The first rank is killed while the second one is busy; then both are alive and busy."""
    policy, late = PolicyClient.__new__(PolicyClient), []
    policy.group = group
    assert policy.lost() == []
    late.append(group.submit(Counter.doze, 1, 6.0))
    os.kill(group.pids[0], signal.SIGKILL)
    found = policy.lost()
    assert [type(fault) for fault in found] == [WorkerDiedError]
    assert "counter rank 0" in found[0].message
    late[0].outcomes()
    group.restart([0])
    monkeypatch.setattr("rlctl.backends.clients.ANSWER_TIMEOUT_S", 0.5)
    late += [group.part([rank]).submit(Counter.doze, rank, 6.0) for rank in range(2)]
    assert [type(fault) for fault in policy.lost()] == [WaitTimeoutError] * 2


@pytest.mark.slow
def test_workers_of_a_worker_end_with_it_and_are_started_again_with_it(gpus, tmp_path):
    first, second = gpus.bundles
    spec = WorkerSpec({}, (first,), others=(second,))
    group = WorkerGroup("head", Head, [spec], gpus, tmp_path, start_timeout_s=120, call_timeout_s=60)
    values, before = group.call(Head.ask)[0]
    assert values == [8]
    assert (tmp_path / "head-0-other-0.log").exists()
    group.restart([0])
    values, after = group.call(Head.ask)[0]
    assert values == [8]
    psutil.wait_procs([psutil.Process(before)] if psutil.pid_exists(before) else [], timeout=60)
    assert not psutil.pid_exists(before)
    group.kill()
    psutil.wait_procs([psutil.Process(after)] if psutil.pid_exists(after) else [], timeout=60)
    assert not psutil.pid_exists(after)


def test_a_rank_is_done_without_and_comes_back_as_the_last(group):
    group.call(Counter.rank_plus, 0)
    away = group.drop([0])
    assert group.call(Counter.rank_plus, 10) == [11]
    assert away.placed([0]) == [0]
    away.restart([0])
    group.join(away)
    assert group.call(Counter.rank_plus, 10) == [11, 10]
    assert len(set(group.pids)) == len(group) == 2


def test_a_process_whose_host_is_lost_while_it_starts_is_not_waited_for(group, monkeypatch):
    monkeypatch.setattr("rlctl.cluster.workers.HOST_LOOK_S", 0.01)
    monkeypatch.setattr(Placement, "stands", lambda self, bundles: bundles != group.specs[1].bundles)
    with pytest.raises(WorkerError, match="was lost while a process of counter started on it"):
        group.restart([1])
    assert group.part([0]).call(Counter.rank_plus, 1) == [1]


def test_a_control_process_that_does_not_answer_holds_nobody_up(lasting, monkeypatch):
    """Ray's own questions to it would wait without end, and not even Ctrl-C would end them."""
    monkeypatch.setattr("rlctl.cluster.ray_health.control_answers", lambda: False)
    with pytest.raises(WaitTimeoutError, match="gcs_server"):
        lasting.placed([0])
    with pytest.raises(WaitTimeoutError, match="gcs_server"):
        lasting.moved()
    lasting._require_hosts()  # a process that starts has a limit of its own


def test_a_process_that_ray_has_no_place_for_is_named(lasting, monkeypatch):
    def no_place(*_):
        raise TimeoutError

    monkeypatch.setattr(lasting._placement, "renewed", no_place)
    with pytest.raises(WaitTimeoutError, match="Ray found no place for counter rank 0 in 120 s"):
        lasting._renew_place(0)


def test_a_worker_that_cannot_write_its_log_says_so(gpus, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WorkerError, match=r"counter rank \d failed in `start`: NotADirectoryError: .*/file/logs'"):
        start_group(gpus, tmp_path / "file" / "logs")


def test_bundles_stay_away_from_the_nodes_of_others(gpus):
    with pytest.raises(MachineError, match=r"1 CPU slots on other nodes than [\d.]+, and Ray could not reserve them"):
        Placement(1, gpus=False, timeout_s=0.5, away_from=gpus.bundles)
    assert gpus.stands(gpus.bundles)
    assert gpus.renewed(gpus.bundles, 1.0) == gpus.bundles
