"""Groups of worker processes: start and call them, and name the worker of every death or delay.

`WorkerGroup` hosts one plain class instance per rank in a Ray actor. Methods are called by reference,
`group.call(PolicyWorker.load_model, path)`; only the method's name travels. Each worker logs to a file, whose last
lines are part of errors.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, TypeVarTuple, cast

from rlctl.cluster import hangs, progress
from rlctl.cluster.placement import Bundle, Placement, node_address, node_id
from rlctl.cluster.ray_health import RAYLET, dead_process, require_processes
from rlctl.cluster.usage import Usage
from rlctl.cluster.worker_host import EarlyHosts, new_host
from rlctl.errors import PeerFailedError, RlctlError, WaitTimeoutError, WorkerError

log = logging.getLogger(__name__)
W_co = TypeVar("W_co", covariant=True)
"""The class of a group's workers, or a Protocol that it satisfies."""
R = TypeVar("R")
S = TypeVar("S")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")

LOG_TAIL_LINES = 15
STOP_TIMEOUT_S = 20.0
USAGE_LIMIT_S = 2.0
HOST_LOOK_S = 10.0
"""Seconds between two checks of the hosts of starting processes."""
# After a rank's failure, how long to wait for another rank's death that may be its cause; longer if the failure is
# surely a consequence of another rank's. Only for calls of several ranks.
SAME_CAUSE_S = 2.0
PEER_CAUSE_S = 15.0
MEMORY_ADVICE = "Stop other programs, use a smaller model or batch, or give the run more memory."
LEAST_LIMIT_S = 300.0
TIMES_SLOWEST = 10.0
QUIET_S = 60.0
"""Seconds without an answer or progress between two messages that name the late ranks."""


@dataclass(frozen=True)
class WorkerSpec:
    """How to start one worker: constructor arguments, its bundles (the first is where it runs), its environment."""

    kwargs: Mapping[str, Any]
    bundles: tuple[Bundle, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    others: tuple[Bundle, ...] = ()
    """Bundles of workers that this worker starts; its constructor gets them as `places`."""

    @property
    def all_bundles(self) -> tuple[Bundle, ...]:
        return self.bundles + self.others

    def environment(self) -> dict[str, str]:
        """Return the variables of the process. They make the GPUs of its bundles visible."""
        gpus = [bundle.gpu for bundle in self.bundles if bundle.gpu is not None]
        variables = {
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            # Keeps Ray from hiding all devices, since workers ask Ray for none. A joined cluster needs it here too.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "PYTHONUNBUFFERED": "1",
            # Modules of the working directory must not replace Python's, also in processes that the worker starts.
            "PYTHONSAFEPATH": "1",
            # The engines' libraries need UTF-8 for their own files in any locale, and warn a lot.
            "PYTHONUTF8": "1",
            "PYTHONWARNINGS": "",
        }
        return {**variables, **self.env}


@dataclass(frozen=True)
class WorkerPlaces:
    """Places and names of the workers that a worker starts. They end with it."""

    name: str
    bundles: tuple[Bundle, ...]
    placement: Placement
    log_dir: Path
    start_timeout_s: float
    call_timeout_s: float

    def start(self, worker_class: Callable[..., S], specs: Sequence[WorkerSpec]) -> WorkerGroup[S]:
        return WorkerGroup(
            self.name, worker_class, specs, self.placement, self.log_dir, start_timeout_s=self.start_timeout_s,
            call_timeout_s=self.call_timeout_s,
        )  # fmt: skip


@dataclass(frozen=True)
class PendingCall(Generic[R]):
    """A pending call of a method on every rank."""

    group: WorkerGroup[Any]
    method: str
    refs: list[Any]
    """Ray's handles of the results, in rank order."""
    begun: float = field(default_factory=time.monotonic)

    def results(self, look: Callable[[], None] | None = None) -> list[R]:
        """Return the results in rank order; the first failing rank, or an error of `look`, ends the wait. Raises
        WorkerError (died or raised), WaitTimeoutError (names ranks), or a worker's RlctlError."""
        results = _wait_for_all([self], self.group.limit_s(self.method), look)[0]
        self.group.took(self.method, time.monotonic() - self.begun)
        return results

    def outcomes(self) -> list[R | WorkerError | WaitTimeoutError]:
        """Wait for every rank; a WorkerError or WaitTimeoutError stands for a missing result. Raises a worker's
        RlctlError at once."""
        limit = self.group.call_timeout_s
        outcomes: list[Any] = [None] * len(self.refs)
        pending, deadline = self.refs, time.monotonic() + limit
        while pending:
            done, pending = _next_done([self], pending, deadline)
            if not done:
                for rank in map(self.refs.index, pending):
                    outcomes[rank] = _late([self], [(0, rank)], limit)
                break
            for rank in map(self.refs.index, done):
                try:
                    outcomes[rank] = self.group.result(self.refs[rank], rank, self.method)
                except (WorkerError, WaitTimeoutError) as error:
                    outcomes[rank] = error
        return outcomes

    def within(self, timeout_s: float) -> PendingCall[R]:
        return replace(self, group=self.group.within(timeout_s))

    def late(self) -> WaitTimeoutError:
        return _late([self], [(0, rank) for rank in range(len(self.refs))], self.group.call_timeout_s)


class WorkerGroup(Generic[W_co]):
    """One worker of a class per rank. Calls go to every rank, with the time limit `limit_s`, or `within`'s."""

    def __init__(
        self,
        name: str,
        worker_class: type[W_co] | Callable[..., W_co] | str,
        specs: Sequence[WorkerSpec],
        placement: Placement,
        log_dir: Path,
        *,
        start_timeout_s: float,
        call_timeout_s: float,
        wait: bool = True,
        concurrency: int = 1,
        then: Callable[[W_co], None] | None = None,
        early: EarlyHosts | None = None,
        measured: bool = False,
    ) -> None:
        """Start the processes and construct the workers in parallel. Raises like `ready`. `wait` False returns at once;
        then call `ready` first. `worker_class` can be `module:name`, imported only in workers. Each worker takes
        `concurrency` calls at a time, each in a thread. `then`: a method that each worker calls as soon as it is
        constructed; `ready` waits for it too. `early` may have started processes already. `measured`: once a
        method has been called, the limit of its calls follows from the slowest (`limit_s`)."""
        self.name, self.log_dir, self.call_timeout_s = name, log_dir.absolute(), call_timeout_s
        self.start_timeout_s = start_timeout_s
        self._slowest: dict[str, float] | None = {} if measured else None
        self.specs = list(specs)
        self._path: tuple[tuple[str, tuple], ...] = ()
        self._worker_class, self._placement, self._concurrency = worker_class, placement, concurrency
        self._logs = [self.log_dir / f"{name}-{rank}.log" for rank in range(len(self.specs))]
        taken = [early.take(name, spec.environment(), concurrency) if early else None for spec in self.specs]
        self.hosts = [host or self._host(rank) for rank, host in enumerate(taken)]
        self.pids: list[int] = []
        self._oom_kills = oom_kills()
        # Calls of two threads must reach all ranks in one order, since a call may be collective.
        self._turn = threading.Lock()
        first = None if then is None else then.__name__
        self._started = [self._begin(rank, first) for rank in range(len(self.specs))]
        if wait:
            self.ready()

    def _host(self, rank: int) -> Any:
        spec = self.specs[rank]
        place = self._placement.strategy(spec.bundles[0].index)
        return new_host(spec.environment(), self._concurrency, scheduling_strategy=place)

    def _sharers(self, rank: int) -> int:
        """Return the number of the group's GPUs that share the node's cores; 0: no GPU, or threads are set."""
        environment, node = self.specs[rank].environment(), self.specs[rank].bundles[0].node
        if not environment["CUDA_VISIBLE_DEVICES"] or "OMP_NUM_THREADS" in {**os.environ, **environment}:
            return 0
        bundles = [bundle for spec in self.specs for bundle in spec.all_bundles]
        return sum(bundle.gpu is not None and bundle.node == node for bundle in bundles)

    def _begin(self, rank: int, then: str | None = None) -> Any:
        spec, kwargs = self.specs[rank], dict(self.specs[rank].kwargs)
        if spec.others:
            name = f"{self._logs[rank].stem}-other"
            limits = self.start_timeout_s, self.call_timeout_s
            kwargs["places"] = WorkerPlaces(name, spec.others, self._placement, self.log_dir, *limits)
        return self.hosts[rank].start.remote(
            str(self.log_path(rank)), self._sharers(rank), self._worker_class, kwargs, then
        )

    @property
    def starting(self) -> PendingCall[int]:
        """The call that `ready` waits for."""
        return PendingCall(self.within(self.start_timeout_s), "start", self._started)

    def ready(self) -> None:
        """Wait until every worker is constructed; on failure, end the processes and raise WorkerError or
        WaitTimeoutError."""
        try:
            self.pids = self.starting.results(self._require_hosts)
            for rank, pid in enumerate(self.pids):
                log.info("%s rank %d is process %d; its output is in %s", self.name, rank, pid, self.log_path(rank))
        except BaseException:
            self.kill()
            raise

    def _require_hosts(self) -> None:
        """Raise WorkerError if the host of a rank is lost; Ray would wait for another host."""
        try:
            placed = self.placed(range(len(self)))
        except WaitTimeoutError:  # Ray may answer next time, and the start has its own limit
            return
        if lost := [spec.bundles[0].node for rank, spec in enumerate(self.specs) if rank not in placed]:
            raise WorkerError(f"The host {lost[0]} was lost while a process of {self.name} started on it.")

    def restart(self, ranks: Sequence[int]) -> None:
        """Restart the processes of `ranks` with the same logs. Raises like `ready`, and ClusterError if Ray is
        broken."""
        import ray

        require_processes()
        for rank in ranks:
            ray.kill(self.hosts[rank], no_restart=True)
            self._renew_place(rank)
            self.hosts[rank] = self._host(rank)
        again = self.part(ranks)
        again.pids = []  # an error names the new processes, once they are known
        again._started = [self._begin(rank) for rank in ranks]
        again.ready()
        self._oom_kills = oom_kills()
        for rank, pid in zip(ranks, again.pids, strict=True):
            self.pids[rank] = pid

    def _renew_place(self, rank: int) -> None:
        """Look up the rank's bundles again. Raises WaitTimeoutError if Ray has no place for them."""
        spec, limit = self.specs[rank], self.start_timeout_s
        try:
            bundles = self._placement.renewed(spec.all_bundles, limit)
        except TimeoutError:  # also Ray's GetTimeoutError
            raise WaitTimeoutError(
                f"Ray found no place for {self.name} rank {rank} in {limit:.0f} s.",
                "Bring its host back, or raise cluster.start_timeout_s.",
            ) from None
        count = len(spec.bundles)
        self.specs[rank] = replace(spec, bundles=bundles[:count], others=bundles[count:])

    def placed(self, ranks: Sequence[int]) -> list[int]:
        """Return the `ranks` whose hosts are not lost."""
        return [rank for rank in ranks if self._placement.stands(self.specs[rank].all_bundles)]

    def moved(self) -> bool:
        """Whether the devices of every rank moved to another host."""
        return all(self._placement.moved(spec.all_bundles) for spec in self.specs)

    def drop(self, ranks: Sequence[int]) -> WorkerGroup[W_co]:
        """End the processes of `ranks`, and keep the other ranks. Return the ended part, for `join`."""
        dropped = self.part(ranks)
        dropped.kill()
        rest = self.part([rank for rank in range(len(self)) if rank not in ranks])
        self.hosts, self.pids, self._logs, self.specs = rest.hosts, rest.pids, rest._logs, rest.specs
        return dropped

    def join(self, other: WorkerGroup[Any]) -> None:
        """Add the workers of `other` as the last ranks."""
        self.specs = [*self.specs, *other.specs]
        self.pids, self._logs = [*self.pids, *other.pids], [*self._logs, *other._logs]
        self.hosts = [*self.hosts, *other.hosts]

    def become(self, other: WorkerGroup[W_co]) -> None:
        """Replace the workers with the workers of `other`, also in groups that `held` and `within` returned."""
        self.specs[:], self._logs[:] = other.specs, other._logs
        self.hosts[:], self.pids[:] = other.hosts, other.pids

    def __len__(self) -> int:
        return len(self.hosts)

    def within(self, timeout_s: float) -> WorkerGroup[W_co]:
        group = copy.copy(self)
        group.call_timeout_s, group._slowest = timeout_s, None
        return group

    def limit_s(self, method: str) -> float:
        """Return the time limit of a call. For a measured group, it is ten times the method's slowest call, at least
        five minutes; before the method's first result, and for other groups, it is `call_timeout_s`."""
        slowest = self._slowest.get(method) if self._slowest is not None else None
        return self.call_timeout_s if slowest is None else max(LEAST_LIMIT_S, TIMES_SLOWEST * slowest)

    def took(self, method: str, seconds: float) -> None:
        if self._slowest is not None:
            self._slowest[method] = max(seconds, self._slowest.get(method, 0.0))

    def looks(self) -> dict[int, hangs.Look]:
        """Make the ranks' processes write their stacks to their logs; return the known activities by rank."""
        if not self.pids:
            return {}
        places = [spec.bundles[0].node_id for spec in self.specs]
        processes = [hangs.Process(pid, str(log)) for pid, log in zip(self.pids, self._logs, strict=True)]
        return hangs.look_at(dict(enumerate(zip(places, processes, strict=True))), node_id())

    def held(self, holder: Callable[[W_co, *Ts], S], *args: *Ts) -> WorkerGroup[S]:
        """Return a group of the objects that the workers hold: calls go to the result of their method `holder`."""
        group = cast(WorkerGroup[Any], copy.copy(self))
        group._path = (*self._path, (holder.__name__, args))
        return group

    def part(self, ranks: Sequence[int], name: str | None = None) -> WorkerGroup[W_co]:
        """Return workers `ranks` of a ready group as a group, renumbered from 0."""
        group = copy.copy(self)
        group.name = name or self.name
        for field_ in ("hosts", "pids", "_logs", "specs"):
            setattr(group, field_, [getattr(self, field_)[rank] for rank in ranks])
        return group

    def log_path(self, rank: int) -> Path:
        return self._logs[rank]

    def call(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `method` with the same arguments on every rank; return results in rank order. Raises like
        `PendingCall.results`."""
        return self.submit(method, *args, **kwargs).results()

    def call_each(self, method: Callable[[W_co, *Ts], R], args_by_rank: Sequence[tuple[*Ts]]) -> list[R]:
        """Call `method` with one tuple of arguments per rank; return the results in rank order."""
        return self.submit_each(method, args_by_rank).results()

    def submit(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> PendingCall[R]:
        """Begin `method` with the same arguments on every rank."""
        return self._submit(method.__name__, [args] * len(self.hosts), kwargs)

    def submit_each(self, method: Callable[[W_co, *Ts], R], args_by_rank: Sequence[tuple[*Ts]]) -> PendingCall[R]:
        return self._submit(method.__name__, args_by_rank, {})

    def _submit(self, name: str, args_by_rank: Sequence[tuple], kwargs: Mapping[str, Any]) -> PendingCall[Any]:
        with self._turn:
            pairs = zip(self.hosts, args_by_rank, strict=True)
            path = (*self._path, name)
            return PendingCall(self, name, [host.call.remote(path, args, kwargs) for host, args in pairs])

    def submit_by_handle(
        self,
        method: Callable[[W_co, *Ts], tuple[R, list[Any]]],
        args_by_rank: Sequence[tuple[*Ts]],
        values: Sequence[int],
    ) -> tuple[PendingCall[R], list[list[Any]]]:
        """Call `method`, which returns (result, list of `values[rank]` values), with a tuple of arguments per rank.
        Return the pending call and handles of values. These stay in the worker's node's store but outlive the
        worker."""
        name = method.__name__
        submitted: list[Any] = []
        handles: list[list[Any]] = []
        for host, args, count in zip(self.hosts, args_by_rank, values, strict=True):
            refs = host.call_by_handle.options(num_returns=1 + count).remote((*self._path, name), args)
            result, *rest = refs if count else [refs]
            submitted.append(result)
            handles.append(rest)
        return PendingCall(self, name, submitted), handles

    def progress(self) -> dict[int, tuple[int, int]]:
        """Return each rank's progress as (done, total), if reported (`progress.report`)."""
        by_log = progress.look(log.stem for log in self._logs)
        return {rank: by_log[log.stem] for rank, log in enumerate(self._logs) if log.stem in by_log}

    def peak_memory(self) -> list[dict[str, int]]:
        """Return the peak memory of each rank's process in bytes; see `WorkerHost.peak_memory`."""
        return PendingCall(self, "peak_memory", [host.peak_memory.remote() for host in self.hosts]).results()

    def gone(self) -> bool:
        """Whether a process is known to have ended."""
        calls = PendingCall(self.within(USAGE_LIMIT_S), "usage", [host.usage.remote() for host in self.hosts])
        return any(isinstance(outcome, WorkerDiedError) for outcome in calls.outcomes())

    def usage(self) -> list[Usage]:
        """Return the usage of the processes and their nodes, without ranks that do not answer in time."""
        calls = PendingCall(self.within(USAGE_LIMIT_S), "usage", [host.usage.remote() for host in self.hosts])
        return [usage for usage in calls.outcomes() if isinstance(usage, Usage)]

    def result(self, ref: Any, rank: int, method: str) -> Any:
        """Return the result of a Ray handle, translating errors."""
        import ray
        from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

        try:
            return ray.get(ref)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, RlctlError) else None
            if cause is not None and not isinstance(cause, WorkerError):
                raise cause from None
            text = (cause.message if cause is not None else str(error)).rstrip(".")
            kind = PeerFailedError if isinstance(cause, PeerFailedError) else WorkerError
            raise kind(f"{self.name} rank {rank} failed in `{method}`: {text}.{self.log_tail(rank)}") from None
        except RayActorError as error:
            pid = f" (process {self.pids[rank]})" if self.pids else ""
            node = self.specs[rank].bundles[0].node
            here = node == node_address()
            where = "" if here else f" on {node}"
            details = f" Ray says: {error}" if method == "start" and not self.log_path(rank).exists() else ""
            killed = here and oom_kills() > self._oom_kills
            details += " The kernel killed a process of this host for lack of memory in the meantime." if killed else ""
            message = f"{self.name} rank {rank}{pid}{where} died during `{method}`.{details}{self.log_tail(rank)}"
            died = WorkerDiedError(message, MEMORY_ADVICE if killed else None)
            died.node = node
            raise died from None
        except OutOfMemoryError as error:
            used = re.search(r"was (\S+) used / (\S+) limit", str(error))
            amount = f": {used[1]} of {used[2]} were in use" if used else ""
            message = f"{self.name} rank {rank} was ended by Ray during `{method}`, because the host ran out of memory"
            advice = f"{MEMORY_ADVICE} Ray ends processes when memory use exceeds RAY_memory_usage_threshold."
            raise WorkerDiedError(f"{message}{amount}.{self.log_tail(rank)}", advice) from None
        except RayError as error:
            raise WorkerError(f"{self.name} rank {rank}, `{method}`: {error}.{self.log_tail(rank)}") from None

    def log_tail(self, rank: int) -> str:
        """Return the last lines of a rank's log, for the end of a message."""
        path = self.log_path(rank)
        if not path.exists():
            return f" Its log is on its own node: {path}."
        lines = path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        if not lines:
            return f" It wrote nothing to {path}."
        return f" Its last lines ({path}):\n" + "\n".join(f"  | {line}" for line in lines) + "\n"

    def stop(self) -> None:
        """Let workers close, then end their processes."""
        stop_together([self])

    def kill(self) -> None:
        """End the processes at once. If Ray is broken, they end with the session."""
        import ray

        for host in self.hosts if dead_process() is None else ():
            ray.kill(host, no_restart=True)


def stop_together(groups: Sequence[WorkerGroup[Any]]) -> None:
    """Close the workers of all groups at the same time, then end their processes."""
    import ray
    from ray.exceptions import RayError

    stops = {host.stop.remote(): group.log_path(rank) for group in groups for rank, host in enumerate(group.hosts)}
    if stops:
        ray.wait(list(stops), num_returns=len(stops), timeout=STOP_TIMEOUT_S)
    for ref, path in stops.items():
        try:
            ray.get(ref, timeout=0)
        except (RayError, RlctlError) as error:
            # The processes end below in any case. A failed close goes to the log, not to the user.
            with contextlib.suppress(OSError), path.open("a") as log:
                log.write(f"close: {error}\n")
    for group in groups:
        group.kill()


def oom_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """Return the number of processes of this host that the kernel killed for lack of memory."""
    with contextlib.suppress(OSError):
        lines = counters.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0


class WorkerDiedError(WorkerError):
    """A worker process is gone."""


def cause_of(error: RlctlError) -> str:
    """Return an error of a worker without the last lines of its log."""
    return error.message.splitlines()[0].partition(" Its last lines")[0].partition(" It wrote nothing")[0]


def first_done(calls: Sequence[PendingCall[Any]], timeout_s: float) -> list[PendingCall[Any]]:
    """Return ended calls, each of one rank, waiting up to `timeout_s` for the first. Raises ClusterError if Ray is
    broken."""
    import ray

    by_ref = {call.refs[0]: call for call in calls}
    done, _ = ray.wait(list(by_ref), timeout=timeout_s)
    require_processes(RAYLET)
    return [by_ref[ref] for ref in done]


def wait_together(first: PendingCall[R], second: PendingCall[S], timeout_s: float) -> tuple[list[R], list[S]]:
    """Return the results of two calls whose ranks may wait for one another. The first failure ends the wait; deaths are
    preferred as the cause."""
    of_first, of_second = _wait_for_all([first, second], timeout_s)
    return of_first, of_second


_told_of_waits: list[Callable[[str], None]] = []


@contextlib.contextmanager
def telling_waits(tell: Callable[[str], None]) -> Iterator[None]:
    """In the block, have `tell` name the late ranks after each minute without an answer or progress."""
    _told_of_waits.append(tell)
    try:
        yield
    finally:
        _told_of_waits.remove(tell)


_watched: list[PendingCall[Any]] = []


@contextlib.contextmanager
def failing_with(*calls: PendingCall[Any]) -> Iterator[None]:
    """In the block, have the failure of one of `calls` end every wait for all ranks of a group."""
    _watched.extend(calls)
    try:
        yield
    finally:
        for call in calls:
            _watched.remove(call)


def _next_done(
    calls: Sequence[PendingCall[Any]], pending: list[Any], deadline: float, look: Callable[[], None] | None = None
) -> tuple[list[Any], list[Any]]:
    """Wait for the first of `pending` handles until `deadline`; return finished and pending ones."""
    import ray

    reported = list[dict[int, tuple[int, int]]]()
    begun = last_report = time.monotonic()
    pause_s = QUIET_S if look is None else HOST_LOOK_S
    while True:
        left = deadline - time.monotonic()
        done, rest = ray.wait(pending, timeout=max(0.0, min(left, pause_s)))
        require_processes(RAYLET)  # its death is the cause of the workers' deaths
        if done or left <= pause_s:
            return done, rest
        if look is not None:
            look()
        if time.monotonic() - last_report < QUIET_S:
            continue
        last_report = time.monotonic()
        before, reported = reported, [call.group.progress() for call in calls]
        if reported == before or not any(reported):
            waited_for = []
            for call in calls:
                if ranks := [str(rank) for rank, ref in enumerate(call.refs) if ref in rest]:
                    waited_for.append(f"{call.group.name} rank {', '.join(ranks)} (`{call.method}`)")
            for tell in _told_of_waits[-1:]:
                tell(f"the run has waited {time.monotonic() - begun:.0f} s for {' and '.join(waited_for)}")


def _wait_for_all(
    calls: Sequence[PendingCall[Any]], timeout_s: float, look: Callable[[], None] | None = None
) -> list[list[Any]]:
    awaited = {ref for call in calls for ref in call.refs}
    every = [*calls, *(call for call in _watched if awaited.isdisjoint(call.refs))]
    place = {ref: (index, rank) for index, call in enumerate(every) for rank, ref in enumerate(call.refs)}
    results: list[list[Any]] = [[None] * len(call.refs) for call in every]
    pending, deadline = list(place), time.monotonic() + timeout_s
    first: RlctlError | None = None
    while awaited.intersection(pending):
        done, pending = _next_done(every, pending, deadline, look)
        if not done:
            break
        for ref in done:
            index, rank = place[ref]
            try:
                results[index][rank] = every[index].group.result(ref, rank, every[index].method)
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
    if late := [place[ref] for ref in pending if ref in awaited]:
        raise _late(calls, late, timeout_s)
    return results[: len(calls)]


def _late(calls: Sequence[PendingCall[Any]], places: list[tuple[int, int]], timeout_s: float) -> WaitTimeoutError:
    """Return the error that names ranks without an answer, from (call, rank). Raises ClusterError if Ray is broken."""
    require_processes()
    index = places[0][0]
    late = [rank for place, rank in places if place == index]
    group, method = calls[index].group, calls[index].method
    tail, looks = group.log_tail(late[0]), dict[int, hangs.Look]()
    if timeout_s > USAGE_LIMIT_S:
        with contextlib.suppress(Exception):  # a failed diagnosis must not hide the timeout
            looks = {rank: look for rank, look in group.looks().items() if rank in late}
    cause = f"{hangs.diagnosis(looks)} The stacks of all ranks are in {group.log_dir}." if looks else ""
    measured = f", {TIMES_SLOWEST:.0f} times the slowest so far" if timeout_s != group.call_timeout_s else ""
    names = ", ".join(map(str, late))
    error = WaitTimeoutError(
        f"{group.name} rank {names} did not finish `{method}` in {timeout_s:.0f} s{measured}. {cause}".rstrip() + tail,
        "If the work is just slow, raise cluster.step_timeout_s (or cluster.start_timeout_s at the start).",
    )
    if len(behind := hangs.behind(looks)) == 1:
        error.node = group.specs[behind.pop()].bundles[0].node
    return error
