"""The process of a worker: sends its output to a log and calls its methods. It may start before its group."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import resource
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.cluster import hangs, numa, progress
from rlctl.cluster.placement import node_address
from rlctl.cluster.usage import Usage, UsageSampler
from rlctl.errors import RlctlError, WorkerError
from rlctl.garbage import many_objects

CallPath = tuple[*tuple[tuple[str, tuple], ...], str]
"""Methods, with their arguments, that lead from a worker to an object that it holds, and the object's method."""


class WorkerHost:
    """Runs in the worker's process: sends its output to the log file and calls the worker's methods."""

    def __init__(self) -> None:
        listen_at_node_address()
        self.worker: Any = None
        self._usage: UsageSampler | None = None
        self._importing = threading.Lock()

    def prepare(self, modules: Sequence[str]) -> None:
        """Import the worker's modules early. A failing import fails again, with its error, when the worker needs it."""
        with self._importing, many_objects():
            for module in modules if self.worker is None else ():
                with contextlib.suppress(Exception):
                    importlib.import_module(module)

    def _open(self, log_path: str, sharers: int) -> None:
        Path(log_path).parent.mkdir(parents=True, exist_ok=True)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        # vLLM silently skips FlashInfer if `ninja` is not on the PATH, and the shell or service that started Ray has
        # seldom activated the environment.
        scripts, path = sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)
        if scripts not in path.split(os.pathsep):
            os.environ["PATH"] = scripts + os.pathsep + path
        if sharers:  # Ray otherwise sets one thread for a process
            os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // sharers))
        if bound := numa.bind():
            print(bound, flush=True)
        progress.host(Path(log_path).stem)
        hangs.answer_questions(Path(log_path))

    def start(
        self,
        log_path: str,
        sharers: int,
        worker_class: Callable[..., Any] | str,
        kwargs: Mapping[str, Any],
        then: str | None = None,
    ) -> int:
        """`sharers`: GPUs of the group on this node, which share its cores; 0: the number of threads is set."""
        self._logged(lambda: self._open(log_path, sharers))
        with self._importing, many_objects():
            loaded_class = imported(worker_class) if isinstance(worker_class, str) else worker_class
            self.worker = self._logged(lambda: loaded_class(**kwargs))
        if then is not None:
            self.call((then,), (), {})
        return os.getpid()

    def call(self, path: CallPath, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        *holders, method = path
        target = self.worker
        for name, holder_args in holders:
            target = getattr(target, name)(*holder_args)
        return self._logged(lambda: getattr(target, method)(*args, **kwargs))

    def call_by_handle(self, path: CallPath, args: tuple) -> Any:
        """Call a method that returns (result, values), and store each value as an object."""
        result, values = self.call(path, args, {})
        return (result, *values) if values else result

    def peak_memory(self) -> dict[str, int]:
        """Bytes of the process: `host` resident at its peak, `files` the pages of files (mostly libraries) that are
        resident now, `device` reserved by torch on its GPU at its peak (absent without one)."""
        peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "files": mapped_file_bytes()}
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            peak["device"] = torch.cuda.max_memory_reserved()
        return peak

    def usage(self) -> Usage:
        self._usage = self._usage or UsageSampler()
        return self._usage.sample()

    def stop(self) -> None:
        if self.worker is not None and hasattr(self.worker, "close"):
            self._logged(self.worker.close)

    @staticmethod
    def _logged(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except RlctlError:
            raise
        except Exception as error:  # noqa: BLE001 - between processes every error becomes a WorkerError
            traceback.print_exc()
            # Exceptions of C extensions may not unpickle in the driver; their text always does.
            raise WorkerError(f"{type(error).__name__}: {error}") from None


def new_host(environment: Mapping[str, str], concurrency: int, **options: Any) -> Any:
    """Start a process for a worker; return Ray's handle of it."""
    import ray

    actor: Any = ray.remote(WorkerHost).options(
        num_cpus=0, max_restarts=0, max_concurrency=concurrency, runtime_env={"env_vars": dict(environment)}, **options
    )
    return actor.remote()


def listen_at_node_address() -> None:
    """Make gloo, NCCL and vLLM use the network of Ray's node address (the loopback on one node), unless set."""
    import psutil

    if (address := node_address()) is None:
        return
    os.environ.setdefault("VLLM_HOST_IP", address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # "=": this name, not a prefix


def imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class EarlyHost:
    """A process to start early: for a worker of the group `name` with this environment (`WorkerSpec.environment`)."""

    name: str
    environment: Mapping[str, str]
    concurrency: int
    """The concurrency of the worker's group."""
    modules: tuple[str, ...]
    """Modules that it imports."""


class EarlyHosts:
    """Started processes, each for the first worker with the same name, environment and concurrency. Only for
    local sessions without GPUs: elsewhere the placement decides the node and the environment."""

    def __init__(self) -> None:
        self._free: list[tuple[EarlyHost, Any]] = []
        self._lock = threading.Lock()

    def start(self, hosts: Sequence[EarlyHost]) -> None:
        """Start processes in the running Ray session. Errors are ignored: the workers then start their own."""
        from ray.exceptions import RayError

        with contextlib.suppress(RayError, OSError, RuntimeError):
            for early in hosts:
                host = new_host(early.environment, early.concurrency)
                host.prepare.remote(early.modules)
                with self._lock:
                    self._free.append((early, host))

    def take(self, name: str, environment: Mapping[str, str], concurrency: int) -> Any:
        """Return a process for such a worker and forget it; None if there is none."""
        with self._lock:
            for place, (early, host) in enumerate(self._free):
                if (early.name, dict(early.environment), early.concurrency) == (name, dict(environment), concurrency):
                    del self._free[place]
                    return host
        return None

    def drop(self) -> None:
        """End the processes that no worker has taken."""
        import ray
        from ray.exceptions import RayError

        with self._lock:
            free, self._free = self._free, []
        for _, host in free:
            with contextlib.suppress(RayError):
                ray.kill(host, no_restart=True)


def mapped_file_bytes() -> int:
    """Resident bytes of this process that are pages of files; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    pages = re.search(r"^RssFile:\s+(\d+) kB", status.read_text() if status.exists() else "", re.MULTILINE)
    return int(pages[1]) * 1024 if pages else 0
