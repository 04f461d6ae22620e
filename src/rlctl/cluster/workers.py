"""Groups of worker processes: start them, call them, and turn every death or delay into an error that names one.

A worker is a plain class; `WorkerGroup` hosts one instance of it in a Ray actor per rank. Each worker's output goes to
a log file, whose last lines are part of the error when it dies.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import resource
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.cluster.placement import Bundle, Placement
from rlctl.errors import PeerFailedError, RlctlError, WaitTimeoutError, WorkerError

LOG_TAIL_LINES = 15
STOP_TIMEOUT_S = 20.0
# How long a failure waits for the death that may have caused it, and one that surely follows from another rank's for
# that. Only where several ranks were waited for.
SAME_CAUSE_S = 2.0
PEER_CAUSE_S = 15.0


@dataclass(frozen=True)
class WorkerSpec:
    """How to start one worker: constructor arguments, its bundles (the first is where it runs), its environment."""

    kwargs: Mapping[str, Any]
    bundles: tuple[Bundle, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """The variables of the process, with the GPUs of the worker's bundles made visible."""
        gpus = [bundle.gpu for bundle in self.bundles if bundle.gpu is not None]
        own = {
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            # Ray must not hide the devices of workers that ask it for none, also where it runs since before this run.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "PYTHONUNBUFFERED": "1",
        }
        return {**own, **self.env}


class _Host:
    """Runs inside the worker process: sends its output to the log file and calls the worker's methods."""

    def __init__(self, log_path: str) -> None:
        Path(log_path).parent.mkdir(parents=True, exist_ok=True)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        self.worker: Any = None

    def start(self, worker_class: type | str, kwargs: Mapping[str, Any]) -> int:
        self.worker = self._logged(_construct, worker_class, kwargs)
        return os.getpid()

    def call(self, method: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        return self._logged(lambda: getattr(self.worker, method)(*args, **kwargs))

    def call_apart(self, method: str, args: tuple) -> Any:
        """As `call` of a method that returns (result, values): each of them becomes an object of its own."""
        result, values = self.call(method, args, {})
        return (result, *values) if values else result

    def peak_memory(self) -> dict[str, int]:
        """Most bytes that the process has held so far: `host` resident, `device` reserved on its GPU by torch (absent
        without one)."""
        peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            peak["device"] = torch.cuda.max_memory_reserved()
        return peak

    def stop(self) -> None:
        if self.worker is not None and hasattr(self.worker, "close"):
            self._logged(self.worker.close)

    @staticmethod
    def _logged(function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RlctlError:
            raise
        except Exception as error:  # noqa: BLE001 - the seam between processes: every error goes on as a WorkerError
            traceback.print_exc()
            # The original may not unpickle in the driver (exceptions of C extensions); its text always does.
            raise WorkerError(f"{type(error).__name__}: {error}") from None


def _construct(worker_class: type | str, kwargs: Mapping[str, Any]) -> Any:
    if isinstance(worker_class, str):
        module, _, name = worker_class.partition(":")
        worker_class = getattr(importlib.import_module(module), name)
    return worker_class(**kwargs)


class WorkerGroup:
    """One worker a rank, all of the same class."""

    def __init__(
        self,
        name: str,
        worker_class: type | str,
        specs: Sequence[WorkerSpec],
        placement: Placement,
        log_dir: Path,
        *,
        start_timeout_s: float,
        call_timeout_s: float,
        wait: bool = True,
        concurrency: int = 1,
    ) -> None:
        """Start the processes and construct the workers, all at once; returns when each is constructed.

        With `wait` off it returns at once; call `ready` before anything else. `worker_class` as `module:Class` is
        imported in the workers only, and spares the driver what it imports. Each worker takes `concurrency` calls at a
        time, in threads of its own where that is more than one. Raises what `ready` raises.
        """
        self.name, self.log_dir, self.call_timeout_s = name, log_dir.absolute(), call_timeout_s
        self.start_timeout_s = start_timeout_s
        self.specs = tuple(specs)
        self._worker_class, self._placement, self._concurrency = worker_class, placement, concurrency
        self._logs = [self.log_dir / f"{name}-{rank}.log" for rank in range(len(self.specs))]
        self.hosts = [self._host(rank) for rank in range(len(self.specs))]
        self.pids: list[int] = []
        self._started = [self._begin(rank) for rank in range(len(self.specs))]
        if wait:
            self.ready()

    def _host(self, rank: int) -> Any:
        """The process of a rank."""
        import ray

        spec = self.specs[rank]
        return (
            ray.remote(_Host)
            .options(
                num_cpus=0,
                max_restarts=0,
                max_concurrency=self._concurrency,
                scheduling_strategy=self._placement.strategy(spec.bundles[0].index),
                runtime_env={"env_vars": spec.environment()},
            )
            .remote(str(self.log_path(rank)))
        )

    def _begin(self, rank: int) -> Any:
        return self.hosts[rank].start.remote(self._worker_class, self.specs[rank].kwargs)

    def ready(self) -> None:
        """Wait until every worker is constructed.

        Raises WorkerError when one dies or raises, WaitTimeoutError when one is not ready in `start_timeout_s`; the
        processes are ended then.
        """
        try:
            self.pids = self._wait("start", self._started, self.start_timeout_s)
        except BaseException:
            self.kill()
            raise

    def restart(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks` and construct their workers again, in new ones that write to the same logs.

        Raises what `ready` raises; the new processes are ended then.
        """
        import ray

        for rank in ranks:
            ray.kill(self.hosts[rank], no_restart=True)
            self.hosts[rank] = self._host(rank)
        again = self.part(ranks)
        again._started = [self._begin(rank) for rank in ranks]
        again.ready()
        for rank, pid in zip(ranks, again.pids, strict=True):
            self.pids[rank] = pid

    def drop(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks` and go on as the group of the others."""
        self.part(ranks).kill()
        rest = self.part([rank for rank in range(len(self)) if rank not in ranks])
        self.hosts, self.pids, self._logs, self.specs = rest.hosts, rest.pids, rest._logs, rest.specs

    def __len__(self) -> int:
        return len(self.hosts)

    def part(self, ranks: Sequence[int], name: str | None = None) -> WorkerGroup:
        """The workers `ranks` of a group that is ready, as a group of their own, numbered from 0 in that order."""
        group = copy.copy(self)
        group.name = name or self.name
        for field_ in ("hosts", "pids", "_logs"):
            setattr(group, field_, [getattr(self, field_)[rank] for rank in ranks])
        group.specs = tuple(self.specs[rank] for rank in ranks)
        return group

    def log_path(self, rank: int) -> Path:
        """The file that holds the output of `rank`."""
        return self._logs[rank]

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call `method` with the same arguments on every rank; the results in rank order."""
        return self.wait(method, self.submit(method, *args, **kwargs), timeout_s)

    def call_each(self, method: str, args_by_rank: Sequence[tuple], timeout_s: float | None = None) -> list[Any]:
        """Call `method` with one tuple of arguments a rank; the results in rank order."""
        return self.wait(method, self.submit_each(method, args_by_rank), timeout_s)

    def peak_memory(self) -> list[dict[str, int]]:
        """The most memory that each rank's process has held, in bytes; see `_Host.peak_memory`."""
        return self.wait("peak_memory", [host.peak_memory.remote() for host in self.hosts])

    def submit(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Begin `method` on every rank; hand the result to `wait`."""
        return [host.call.remote(method, args, kwargs) for host in self.hosts]

    def submit_each(self, method: str, args_by_rank: Sequence[tuple]) -> list[Any]:
        """Begin `method` with one tuple of arguments a rank; hand the result to `wait`."""
        pairs = zip(self.hosts, args_by_rank, strict=True)
        return [host.call.remote(method, args, {}) for host, args in pairs]

    def submit_apart(
        self, method: str, args_by_rank: Sequence[tuple], values: Sequence[int]
    ) -> tuple[list[Any], list[list[Any]]]:
        """Begin `method`, which returns (result, a list of `values[rank]` values), with one tuple of arguments a rank.

        Returns what to hand to `wait` for the results, and the handles of each rank's values. Large values stay in the
        object store of the worker's node, but they are this process's: they outlive the worker.
        """
        submitted: list[Any] = []
        handles: list[list[Any]] = []
        for host, args, count in zip(self.hosts, args_by_rank, values, strict=True):
            refs = host.call_apart.options(num_returns=1 + count).remote(method, args)
            result, *rest = refs if count else [refs]
            submitted.append(result)
            handles.append(rest)
        return submitted, handles

    def outcomes(self, method: str, submitted: list[Any], timeout_s: float | None = None) -> list[Any]:
        """As `wait`, but what became of a rank whose process or work failed (a WorkerError), or that did not answer in
        time (a WaitTimeoutError), stands where its result would be. Raises what a worker raised on purpose at once."""
        import ray

        limit = timeout_s or self.call_timeout_s
        rank_of, pending, deadline = {ref: i for i, ref in enumerate(submitted)}, submitted, time.monotonic() + limit
        results: list[Any] = [None] * len(submitted)
        while pending:
            done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                for rank in map(rank_of.__getitem__, pending):
                    results[rank] = _late([(self, method, submitted)], [(0, rank)], limit)
                break
            for ref in done:
                try:
                    results[rank_of[ref]] = self._result(ref, rank_of[ref], method)
                except WorkerError as error:
                    results[rank_of[ref]] = error
        return results

    def wait(self, method: str, submitted: list[Any], timeout_s: float | None = None) -> list[Any]:
        """Results of `submit`, in rank order; the first rank that fails ends the wait.

        Raises WorkerError (dead or raised), WaitTimeoutError (names the ranks that did not answer), or the
        RlctlError that the worker raised itself.
        """
        return self._wait(method, submitted, timeout_s or self.call_timeout_s)

    def _wait(self, method: str, submitted: list[Any], timeout_s: float) -> list[Any]:
        return wait_together([(self, method, submitted)], timeout_s)[0]

    def _result(self, ref: Any, rank: int, method: str) -> Any:
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        try:
            return ray.get(ref)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, RlctlError) else None
            if cause is not None and not isinstance(cause, WorkerError):
                raise cause from None
            text = (cause.message if cause is not None else str(error)).rstrip(".")
            kind = PeerFailedError if isinstance(cause, PeerFailedError) else WorkerError
            raise kind(f"{self.name} rank {rank} failed in `{method}`: {text}.{self._log_tail(rank)}") from None
        except RayActorError:
            pid = f" (process {self.pids[rank]})" if self.pids else ""
            raise WorkerDiedError(
                f"{self.name} rank {rank}{pid} died during `{method}`.{self._log_tail(rank)}"
            ) from None
        except RayError as error:
            raise WorkerError(f"{self.name} rank {rank}, `{method}`: {error}.{self._log_tail(rank)}") from None

    def _log_tail(self, rank: int) -> str:
        path = self.log_path(rank)
        if not path.exists():
            return f" Its log is on its own node: {path}."
        lines = path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        if not lines:
            return f" It wrote nothing to {path}."
        return f" Its last lines ({path}):\n" + "\n".join(f"  | {line}" for line in lines) + "\n"

    def stop(self) -> None:
        """Let the workers close what they hold, then end their processes."""
        import ray
        from ray.exceptions import RayError

        stops = [host.stop.remote() for host in self.hosts]
        ray.wait(stops, num_returns=len(stops), timeout=STOP_TIMEOUT_S)
        for rank, ref in enumerate(stops):
            try:
                ray.get(ref, timeout=0)
            except (RayError, RlctlError) as error:
                # The processes are ended below in any case; a close that failed is for the log, not for the user.
                with contextlib.suppress(OSError), self.log_path(rank).open("a") as log:
                    log.write(f"close: {error}\n")
        self.kill()

    def kill(self) -> None:
        """End the processes at once."""
        import ray

        for host in self.hosts:
            ray.kill(host, no_restart=True)


class WorkerDiedError(WorkerError):
    """A worker process is gone."""


def wait_together(waits: Sequence[tuple[WorkerGroup, str, list[Any]]], timeout_s: float) -> list[list[Any]]:
    """Results of calls submitted to several groups, (group, method, what `submit` returned) each; in the same order.

    The first failure of any of them ends the wait. Ranks that wait for one another fail together: the failure that
    the others follow from, above all a death, is what is raised, if it shows within a moment.
    """
    import ray

    place = {ref: (index, rank) for index, (_, _, refs) in enumerate(waits) for rank, ref in enumerate(refs)}
    results: list[list[Any]] = [[None] * len(refs) for _, _, refs in waits]
    pending, deadline = list(place), time.monotonic() + timeout_s
    first: RlctlError | None = None
    while pending:
        done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            break
        for ref in done:
            index, rank = place[ref]
            group, method, _ = waits[index]
            try:
                results[index][rank] = group._result(ref, rank, method)
            except WorkerDiedError:
                raise
            except RlctlError as error:
                if first is None:
                    follows = isinstance(error, PeerFailedError)
                    deadline = min(deadline, time.monotonic() + (PEER_CAUSE_S if follows else SAME_CAUSE_S))
                if first is None or isinstance(first, PeerFailedError):
                    first = error
    if first is not None:
        raise first
    if pending:
        raise _late(waits, [place[ref] for ref in pending], timeout_s)
    return results


def _late(
    waits: Sequence[tuple[WorkerGroup, str, list[Any]]], places: list[tuple[int, int]], timeout_s: float
) -> WaitTimeoutError:
    index = places[0][0]
    group, method, _ = waits[index]
    late = [rank for one, rank in places if one == index]
    return WaitTimeoutError(
        f"{group.name} rank {', '.join(map(str, late))} did not finish `{method}` in {timeout_s:.0f} s."
        + group._log_tail(late[0]),
        "If the work is just slow, raise cluster.step_timeout_s (or cluster.start_timeout_s at the start).",
    )
