"""A Ray session: start Ray on this machine or join a cluster, and clean up. A local session is private: it listens only
on the loopback interface and keeps its files in folders of this user, which it removes at its end."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from rlctl.cluster.ray_health import CONTROL, RAYLET, dead_process, require_processes
from rlctl.cluster.session_files import lasting_folder
from rlctl.cluster.worker_host import EarlyHost, EarlyHosts
from rlctl.errors import MachineError, WorkerError
from rlctl.processes.supervision import adopt_orphans

# The object store holds rollouts and small tensors. Weights travel through separate shared memory.
OBJECT_STORE_BYTES = 512 << 20
CONNECT_TIMEOUT_S = 10.0
LOOK_S = 0.5
SOCKET_PATH_BYTES = 107
SOCKET = "/rlctl-12345678/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""Ray's longest socket name below its folder."""
MOST_BASE_BYTES = SOCKET_PATH_BYTES - len(SOCKET)
START_ATTEMPTS = 3
# Ray ends every process this long after the death of its control process. rlctl ends the run before, with a message. A
# variable, since processes connect to the control process before they read Ray's `_system_config`.
PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}
RAY_FAILURES = (ConnectionError, OSError, RuntimeError, ValueError, TimeoutError)
# Ray's logs that a failed run keeps.
TELLING_LOGS = ("gcs_server.*", "raylet.*", "worker-*.err", "python-core-*")
ASK = """import sys; from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_get(b"rlctl", None, timeout=10)"""
WATCHER = """
import os, sys, time
if sys.stdin.read(1):
    sys.exit()
temporary, session = map(os.fsencode, sys.argv[1:])
def belongs(process):
    with open(process + "/environ", "rb") as file:
        if b"TMPDIR=" + temporary in file.read().split(bytes(1)):
            return True
    links = (os.fsencode(f"{process}/fd/{number}") for number in os.listdir(process + "/fd"))
    return any(os.lstat(link).st_mode & 0o200 and os.readlink(link).startswith(session + b"/") for link in links)
quiet = 0
while quiet < 5:  # a process may be about to start another one
    quiet += 1
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if belongs("/proc/" + pid):
                os.kill(int(pid), 9)
                quiet = 0
        except OSError:
            pass
    time.sleep(0.2)
"""
"""A program that waits for a byte from the process that started it, or for the end of that process."""
LAUNCHER = """
import ctypes, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""A program that becomes a process of Ray, ended by the kernel with the thread that started it (PR_SET_PDEATHSIG)."""
TOKEN = secrets.token_hex(32)
"""The processes of a local session authenticate with it. Ray keeps the first token of a process."""
TOKEN_ADVICE = "Run `ray get-auth-token --generate` on the head node, and start Ray again with RAY_AUTH_MODE=token."


@contextlib.contextmanager
def ray_session(
    address: str | None = None,
    *,
    gpus: int | None = None,
    logs: Path | Callable[[], Path | None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Connect to Ray for the block.

    `address` None starts Ray on this machine and stops it with its workers; else the cluster is joined and left
    running. `gpus` limits a local session's GPUs. After a failure, a local session's logs are copied to `logs`, which
    may be a function that returns the folder later. `tell` warns of a cluster without a token. Raises MachineError
    if Ray does not start or answer.
    """
    _have_patience(address)
    import ray
    from ray._private import ray_constants

    if ray.is_initialized():
        # A caller (a test, a notebook) brought its own session: use it and leave it alone.
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # the awaited result holds the failure
    # rlctl chooses devices: policy and engine share each GPU, which Ray's masking cannot express.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # At its end Ray would reset SIGTERM to its default, which kills this process without cleanup and messages.
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    # Under `uv run`, Ray would start each worker by another `uv run`, in a new environment without rlctl.
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    logging.getLogger("ray").setLevel(logging.ERROR)  # users cannot act on its notices at start-up
    place: Callable[[], Path | None] = logs if callable(logs) else lambda: logs
    with _started(gpus, place) if address is None else _joined(address, tell):
        yield


def _have_patience(address: str | None) -> None:
    """Set `PATIENCE`. Call it before Ray is imported."""
    for name, value in PATIENCE.items() if address is None else ():
        os.environ.setdefault(name, value)


class _Abandoned(BaseException):
    """Raised in the thread of a session that nobody awaits any more."""


class BesideSession:
    """A Ray session that starts in its own thread while the caller goes on. Use it in a `with` block, which ends it.

    Ray's processes end with the thread that started them, so the thread waits until the session is to end.
    """

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        """`tell`: see `ray_session`."""
        self.early = EarlyHosts()
        self.when_there: Callable[[], None] = lambda: None
        """Called when `wait` ends."""
        self._tell = tell
        self._logs: Path | None = None
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()
        self._answered, self._ending = threading.Event(), threading.Event()
        self._is_starting = self._given_up = False
        self._error: BaseException | None = None
        self._failure: BaseException | None = None
        """The exception that ends the block."""

    def begin(self, address: str | None = None, *, gpus: int | None = None, hosts: Sequence[EarlyHost] = ()) -> None:
        """Begin to start or join Ray like `ray_session`; then start `hosts`, for `early` to hand out."""
        _have_patience(address)
        import ray  # noqa: F401 - here and not beside the imports of the caller

        self._thread = threading.Thread(target=self._hold, args=(address, gpus, hosts), name="ray", daemon=True)
        self._thread.start()

    def wait(self, logs: Path | None = None) -> BesideSession:
        """Wait for Ray. If the block fails, its logs go to `logs`. Raises like `ray_session`."""
        self._logs = logs
        self._answered.wait()
        self.when_there()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self

    def _hold(self, address: str | None, gpus: int | None, hosts: Sequence[EarlyHost]) -> None:
        try:
            with self._turn:
                if self._given_up:
                    return
                self._is_starting = True
            with ray_session(address, gpus=gpus, logs=lambda: self._logs, tell=self._tell):
                self._start_early(hosts)
                with self._turn:
                    self._is_starting = False
                    self._answered.set()
                self._ending.wait()
                if self._failure is not None:
                    raise self._failure
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised where the session is waited for
            self._error = error
        finally:
            self._answered.set()

    def _start_early(self, hosts: Sequence[EarlyHost]) -> None:
        """Start `hosts` in a second thread, since a call of Ray waits `PATIENCE` for a control process that has died.
        While the control process lives, the thread is waited for: Ray ends a process that calls it after its shutdown.
        Raises ClusterError if the control process has died."""
        starting = threading.Thread(target=self.early.start, args=(hosts,), name="early hosts", daemon=True)

        def ended() -> None:
            while starting.is_alive() and dead_process(CONTROL) is None:
                starting.join(LOOK_S)

        starting.start()
        try:
            ended()
        finally:
            ended()
        require_processes(CONTROL)

    def __enter__(self) -> BesideSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._failure = error
        with self._turn:
            self._given_up = True
            has_begun = self._is_starting or self._answered.is_set()  # else it starts nothing any more
            if self._is_starting and thread.ident is not None:  # end the processes that Ray has started so far
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Abandoned))
        self._ending.set()
        if has_begun:
            thread.join()
        if error is None and self._error is not None:
            raise self._error


@contextlib.contextmanager
def _joined(address: str, tell: Callable[[str], None] | None) -> Iterator[None]:
    import ray
    from ray._private import utils
    from ray.exceptions import RayError

    host, colon, port = address.removeprefix("ray://").rpartition(":")
    with contextlib.suppress(OSError):  # Ray leaves this user's token readable for others
        os.chmod(os.path.expanduser("~/.ray/auth_token"), 0o600)
    try:
        if colon:  # else `auto`, which Ray resolves. Ray itself tries a wrong address for minutes
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        _require_membership(address)
        with _replaced(utils, set_sigterm_handler=_ignore):
            ray.init(address=address, job_config=_job(), log_to_driver=False, logging_level=logging.ERROR)
    except MachineError:
        raise
    except (*RAY_FAILURES, RayError) as error:
        # Ray sends its token to a named address only when told to.
        has_mode = "RAY_AUTH_MODE" in os.environ
        token = (
            "the token must be the one of its head node"
            if has_mode
            else "if it asks for a token, set RAY_AUTH_MODE=token"
        )
        hint = f"`ray status --address` shows whether it runs; {token}."
        raise MachineError(f"--ray-address {address} did not answer: {error}.", hint) from error
    _keep_stdout_clean()
    try:
        if tell is not None and not asks_for_token(cluster := ray.get_runtime_context().gcs_address):
            reach = f"the Ray cluster at {cluster} asks for no token, so whoever reaches its ports runs programs on it"
            tell(f"warning: {reach}. {TOKEN_ADVICE}")
        yield
    finally:
        ray.shutdown()


def asks_for_token(address: str) -> bool:
    """Whether the Ray cluster at `address` (HOST:PORT) refuses connections without a token."""
    without = os.environ | {"RAY_AUTH_MODE": "disabled"}
    answer = subprocess.run([sys.executable, "-P", "-c", ASK, address], env=without, capture_output=True, check=False)
    return b"AuthenticationError" in answer.stderr


@contextlib.contextmanager
def _started(gpus: int | None, logs: Callable[[], Path | None]) -> Iterator[None]:
    import ray

    base = session_base()
    if len(os.fsencode(base)) > MOST_BASE_BYTES:
        raise MachineError(
            f"RAY_TMPDIR={base} is too long: the names of Ray's sockets below it may have {SOCKET_PATH_BYTES} bytes.",
            f"Name a directory, or a link to one, in at most {MOST_BASE_BYTES} bytes.",
        )
    with contextlib.ExitStack() as stack:
        try:
            session = stack.enter_context(lasting_folder(base))
            temporary = stack.enter_context(lasting_folder(Path(tempfile.gettempdir())))
            stack.enter_context(_ending_descendants())  # the watcher too, if the start is abandoned meanwhile
            stack.enter_context(_ending_with_this_process(temporary, session))
            stack.enter_context(_ending_descendants())
            _start(gpus, session / "r", temporary)  # Ray opens the directory itself to everybody
        except RAY_FAILURES as error:
            raise MachineError(
                f"Ray on {socket.gethostname()} did not start: {error}.", "Run `rlctl doctor` to see why."
            ) from error
        _keep_stdout_clean()
        stack.push(lambda kind, *_: _copy_logs(session, logs()) if kind and issubclass(kind, Exception) else None)
        stack.callback(ray.shutdown)
        yield


def session_base() -> Path:
    """Return the base folder of local sessions: an absolute RAY_TMPDIR, else /tmp."""
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp").absolute()


def _copy_logs(session: Path, logs: Path | None) -> None:
    if logs is None:
        return
    target = logs / "ray"
    with contextlib.suppress(OSError):  # the failure itself is what matters
        logs.mkdir(exist_ok=True)  # and no run directory that was removed meanwhile
        for path in (path for pattern in TELLING_LOGS for path in session.glob(f"r/session_2*/logs/{pattern}")):
            if path.stat().st_size:
                target.mkdir(exist_ok=True)
                shutil.copyfile(path, target / path.name)


@contextlib.contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Temporarily replace attributes of a Ray module that has no option for them."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _ignore(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a function of Ray's."""


@contextlib.contextmanager
def _as_a_run_needs_it() -> Iterator[None]:
    """Change details of Ray's start that `ray.init` has no arguments for."""
    from ray._private import node, parameter, ray_constants, services, utils

    chosen: dict[str, Any] = {
        "no_monitor": True,
        "include_log_monitor": False,
        "setup_worker_path": str(Path(__file__).with_name("worker_start.py")),
    }
    lean: Any = functools.partial(parameter.RayParams, **chosen)
    with (
        # Ray's handler of SIGTERM would end this process silently, with code 1 or 15.
        _replaced(utils, set_sigterm_handler=_ignore),
        # All processes of a local session listen on the loopback interface.
        _replaced(ray_constants, ENABLE_RAY_CLUSTER=False),
        _replaced(services, ConsolePopen=_launch),
        # A session of one machine needs no autoscaler, no copies of its workers' logs, and no dashboard, which Ray
        # starts and waits for even without `include_dashboard`.
        _replaced(parameter, RayParams=lean),
        _replaced(node.Node, start_api_server=_ignore),
    ):
        yield


def _launch(command: Sequence[str], *, preexec_fn: object, creationflags: int, **settings: Any) -> Any:
    """Start a process of Ray in a new session: signals to this process's group or from the terminal do not reach
    it, since a run finishes its step with it.

    The work of Ray's `preexec_fn` is left to LAUNCHER. With such a function Python (3.11) forks this process after it
    took the locks of its at-fork handlers (logging's is one) and then the lock of imports, while another thread may
    hold the lock of imports and wait for logging's: both wait for ever.
    """
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", LAUNCHER, *command], start_new_session=True, **settings)


def _job() -> Any:
    """Return a job whose workers do not import from this process's working directory, as with jobs of Ray's client."""
    from ray.job_config import JobConfig

    return JobConfig(_client_job=True)


def _keep_stdout_clean() -> None:
    """Stop Ray from printing dead workers to stdout, which is for results; the awaited result reports the death."""
    from ray._private import worker

    worker._worker_logs_enabled = False


def _start(gpus: int | None, directory: Path, temporary: Path) -> None:
    """Start Ray on this machine; again where a busy machine was too slow for the half minute that Ray waits."""
    import ray

    for attempt in range(START_ATTEMPTS):
        try:
            # Later sessions reuse compiled kernels, so they stay in torch's default folder.
            kernels = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
            defaults = {"TORCHINDUCTOR_CACHE_DIR": kernels, "RAY_AUTH_TOKEN": TOKEN}
            chosen = {name: os.environ.get(name, value) for name, value in defaults.items()}
            with environment(TMPDIR=str(temporary), **chosen), _as_a_run_needs_it():
                ray.init(
                    address="local",
                    job_config=_job(),
                    num_gpus=gpus,
                    # A bundle takes a CPU slot, and a small machine holds more workers than it has cores.
                    num_cpus=max(16, 4 * (os.cpu_count() or 1)),
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    logging_level=logging.ERROR,
                    object_store_memory=_object_store_bytes(),
                    _temp_dir=str(directory),
                    _system_config={
                        # Ray would start an idle process for each CPU slot and take the cores from the run.
                        "prestart_worker_first_driver": False,
                        "worker_niceness": 0,  # Ray's default gives workers a lower priority than this process
                    },
                )
            return
        except BaseException as error:
            ray.shutdown()
            if "timed out during startup" not in str(error):  # only the text names the timeout
                raise
            if attempt + 1 == START_ATTEMPTS:
                raise TimeoutError(f"{error} (tried {START_ATTEMPTS} times)") from error


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _require_membership(address: str) -> None:
    """Raise MachineError if this machine is no node of the cluster (Ray would abort), RayError if the cluster refuses
    us."""
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue] - compiled

    if address.startswith("ray://") or ":" not in address:  # connects by a proxy, or names this machine's cluster
        return
    cluster, deadline = GcsClient(address=address), time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        nodes = cluster.get_all_node_info(timeout=CONNECT_TIMEOUT_S).values()
        alive = {node.node_manager_address for node in nodes if node.state == 0}
        if alive or time.monotonic() > deadline:  # a head that has just started answers before its node registers
            break
        time.sleep(0.2)
    if not alive & {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}:
        addresses = ", ".join(sorted(alive)) or "none"
        raise MachineError(
            f"This machine is not a node of the Ray cluster at {address} (its nodes are {addresses}).",
            f"Run rlctl on one of them, or add this machine: `ray start --address {address}`.",
        )


def _object_store_bytes() -> int:
    free = psutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else OBJECT_STORE_BYTES
    return max(78_643_200, min(OBJECT_STORE_BYTES, free // 3))  # Ray refuses less than 75 MiB


@contextlib.contextmanager
def _ending_with_this_process(temporary: Path, session: Path) -> Iterator[None]:
    """If this process is killed, end all processes with TMPDIR `temporary` or output files below `session`. Processes
    that set a title, like Ray's, may overwrite their environment; starting ones would retry for `PATIENCE`."""
    command = [sys.executable, "-S", "-E", "-c", WATCHER, str(temporary), str(session.resolve())]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert watcher.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it was killed
            watcher.stdin.write(b"x")
            watcher.stdin.close()
        watcher.wait()


@contextlib.contextmanager
def _ending_descendants() -> Iterator[None]:
    """End everything started in the block; orphans become this process's children, so none is missed."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    adopt_orphans()
    try:
        yield
    finally:
        left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        _, alive = psutil.wait_procs(left, timeout=5)
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(alive, timeout=5)
        adopt_orphans(False)


def fetch(handle: Any) -> Any:
    """Return the value of a handle, or of a list. Arrays are mapped read-only, not copied, on their node."""
    import ray

    require_processes(RAYLET)
    return ray.get(handle)


def keep_here(handles: Sequence[Any]) -> None:
    """Copy values to this node, so that they outlive the node that made them. Raises WorkerError for lost values."""
    import ray
    from ray.exceptions import ObjectLostError

    require_processes(RAYLET)
    try:
        ray.get(list(handles))
    except ObjectLostError as error:
        raise WorkerError(f"Rollouts were lost with the node that held them: {type(error).__name__}.") from None


def put(value: Any) -> object:
    import ray

    return ray.put(value)
