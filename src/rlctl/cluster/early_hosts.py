"""Processes that import their libraries before it is known what their workers are built from."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EarlyHost:
    """A process to start early: for a worker of the group `name` with this environment (`WorkerSpec.environment`)."""

    name: str
    environment: Mapping[str, str]
    concurrency: int
    """As for the group of the worker."""
    modules: tuple[str, ...]
    """What it imports."""


class EarlyHosts:
    """Started processes, each for the first worker with the same name, environment and concurrency. For sessions of one
    machine without GPUs: elsewhere a place decides on the node and the environment."""

    def __init__(self) -> None:
        self._free: list[tuple[EarlyHost, Any]] = []
        self._lock = threading.Lock()

    def start(self, wanted: Sequence[EarlyHost]) -> None:
        """Start processes in the running Ray session. Errors are ignored: the workers then start their own."""
        from ray.exceptions import RayError

        from rlctl.cluster.workers import new_host

        with contextlib.suppress(RayError, OSError, RuntimeError):
            for one in wanted:
                host = new_host(one.environment, one.concurrency)
                host.prepare.remote(one.modules)
                with self._lock:
                    self._free.append((one, host))

    def take(self, name: str, environment: Mapping[str, str], concurrency: int) -> Any:
        """Return a process for such a worker, for it alone; None: there is none."""
        wanted = (name, dict(environment), concurrency)
        with self._lock:
            for place, (one, host) in enumerate(self._free):
                if (one.name, dict(one.environment), one.concurrency) == wanted:
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
