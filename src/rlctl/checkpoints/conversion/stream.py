"""Running a plan from files to files: a destination block at a time, fingerprinted, read back and compared."""

from __future__ import annotations

import mmap
import os
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Protocol

import torch
import xxhash

from rlctl.checkpoints.tensor_fingerprints import fingerprint
from rlctl.errors import InputError, VerificationError, listed
from rlctl.settings.training import Rounding
from rlctl.vector_math import warm_up
from rlctl.weights.layout import Fill, ParamSpec, Shape
from rlctl.weights.plan_execution import dtype_of, fill, strided, transformed
from rlctl.weights.readings import combine
from rlctl.weights.rounding import narrow_into
from rlctl.weights.transfer_plan import Copy, TransferPlan, World, receive_plan

Progress = Callable[[str, int, int], None]
"""Called with (activity, bytes done, total bytes)."""


MOST_THREADS = 8
"""The most threads that make and check blocks. Each holds one block: their number bounds the memory."""


class ParamReader(Protocol):
    """Where params are read from."""

    def read(self, param: str) -> torch.Tensor:
        """The param, contiguous; not to be written to."""
        ...

    def drop(self, param: str) -> None:
        """The param will not be read again soon."""
        ...


@dataclass(frozen=True)
class Beside:
    """A source, some of whose params are read from another."""

    own: ParamReader
    other: ParamReader
    of_other: Collection[str]

    def read(self, param: str) -> torch.Tensor:
        return self._of(param).read(param)

    def drop(self, param: str) -> None:
        self._of(param).drop(param)

    def _of(self, param: str) -> ParamReader:
        return self.other if param in self.of_other else self.own


@dataclass
class Streamed:
    """The findings of one pass over a plan."""

    bytes: int = 0
    fingerprints: dict[str, int] = field(default_factory=dict)
    """Tensor -> fingerprint in the dtype of the destination."""
    nans: list[str] = field(default_factory=list)
    """Tensors with values that are not numbers."""
    digests: dict[str, bytes] = field(default_factory=dict)
    """Param -> digest of its bytes."""


def stream(
    plan: TransferPlan,
    shapes: Mapping[str, Shape],
    source: ParamReader,
    order: Iterable[str],
    write: Callable[[str, torch.Tensor], None],
    progress: Progress,
    rounding: Rounding = "nearest",
) -> Streamed:
    """Produce destination params in `order` on several threads and pass them to `write`. `rounding` applies to trained
    weights; published ones round to nearest. Memory holds one param per thread, one being written, and their
    sources."""
    copies, fills = _by_destination(plan.copies), defaultdict[str, list[Fill]](list)
    for padding in plan.fills:
        fills[padding.param].append(padding)
    result, threads = Streamed(), thread_count()
    locked, specs = _Locked(source), plan.layout.params
    # Blocks are made in the same memory by turns: fresh pages cost more than copying does.
    largest = max((spec.bytes for spec in specs.values()), default=0)
    memory = deque(_memory(largest) for _ in range(threads + 2))
    seen_nan: set[str] = set()

    def make(name: str, values: torch.Tensor) -> tuple[dict[str, int], bytes]:
        fill(fills[name], {name: values}, specs)
        parts: dict[str, int] = {}
        for copy in copies[name]:
            target = strided(values, copy.destination_view)
            source_box = strided(locked.read(copy.source_param), copy.source_view)
            narrow_into(target, transformed(source_box, copy, locked.read, rounding), rounding)
            _refuse_overflow(copy.tensor, source_box, target)
            locked.drop(copy.source_param)
            if copy.primary:
                _add(parts, copy, target, shapes)
                # The largest value is not a number where any is none, and is found ten times as fast as a mask is made.
                if target.is_floating_point() and target.numel() and bool(torch.isnan(target.amax())):
                    seen_nan.add(copy.tensor)
        return parts, _digest(values)

    def put(name: str, values: torch.Tensor, made: Future[tuple[dict[str, int], bytes]]) -> None:
        parts, result.digests[name] = made.result()
        for tensor, part in parts.items():
            result.fingerprints[tensor] = combine([result.fingerprints.get(tensor, 0), part])
        write(name, values)
        result.bytes += specs[name].bytes
        progress("convert", result.bytes, plan.layout.bytes)

    with _one_thread_each(), ThreadPoolExecutor(threads) as makers:
        under_way: deque[tuple[str, torch.Tensor, Future[tuple[dict[str, int], bytes]]]] = deque()
        for name in order:
            if len(under_way) > threads:  # each worker has one, and the next is ready when one ends
                put(*under_way.popleft())
            memory.rotate(1)
            values = _tensor_in(memory[0], specs[name])
            under_way.append((name, values, makers.submit(make, name, values)))
        for each in under_way:
            put(*each)
    result.nans = sorted(seen_nan)
    return result


def verify(plan: TransferPlan, digests: Mapping[str, bytes], written: ParamReader, progress: Progress) -> None:
    """Read every param back from the destination's files. Raises VerificationError with the tensors whose bytes
    differ."""
    params, done, lock = plan.layout.params, 0, Lock()

    def look(name: str, values: torch.Tensor) -> bool:
        nonlocal done
        same = _digest(values) == digests[name]
        with lock:
            written.drop(name)
            done += params[name].bytes
            progress("verify", done, plan.layout.bytes)
        return same

    looks: dict[str, Future[bool]] = {}
    with _one_thread_each(), ThreadPoolExecutor(thread_count()) as readers:
        under_way: deque[Future[bool]] = deque()
        for name in digests:
            if len(under_way) == thread_count():
                under_way.popleft().result()
            with lock:
                values = written.read(name)
            looks[name] = readers.submit(look, name, values)
            under_way.append(looks[name])
    different = {name for name, same in looks.items() if not same.result()}
    if wrong := list(dict.fromkeys(copy.tensor for copy in plan.copies if copy.destination_param in different)):
        tensors = len({copy.tensor for copy in plan.copies})
        raise VerificationError(
            f"{len(wrong)} of {tensors} tensors differ between source and destination: {listed(wrong, 8)}.",
            "The destination was removed. Check the disk, and run the conversion again.",
        )


def _digest(values: torch.Tensor) -> bytes:
    digest = xxhash.xxh3_128()
    digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _by_destination(copies: Iterable[Copy]) -> defaultdict[str, list[Copy]]:
    grouped = defaultdict[str, list[Copy]](list)
    for copy in copies:
        grouped[copy.destination_param].append(copy)
    return grouped


def _memory(size: int) -> mmap.mmap:
    """Memory in large pages, where the kernel has them: it hands them out in a fifth of the time."""
    memory = mmap.mmap(-1, max(1, size))
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _tensor_in(memory: mmap.mmap, spec: ParamSpec) -> torch.Tensor:
    """A tensor at the start of `memory`. Storages are written whole: this one is just as long as the tensor."""
    dtype = dtype_of(spec.dtype)
    flat = torch.frombuffer(memoryview(memory)[: spec.bytes], dtype=dtype) if spec.size else torch.empty(0, dtype=dtype)
    return flat.reshape(spec.shape)


def _add(into: dict[str, int], copy: Copy, values: torch.Tensor, shapes: Mapping[str, Shape]) -> None:
    starts, steps = [s.start for s in copy.tensor_box], [s.step for s in copy.tensor_box]
    into[copy.tensor] = combine([into.get(copy.tensor, 0), fingerprint(values, shapes[copy.tensor], starts, steps)])


def _refuse_overflow(tensor: str, values: torch.Tensor, target: torch.Tensor) -> None:
    if target.dtype != torch.float16 or values.dtype == torch.float16 or not target.isinf().any():
        return
    if bool((target.isinf() & ~values.isinf()).any()):
        largest = float(values[values.isfinite()].abs().amax())
        reason = f"tensor {tensor} holds {largest:.3g}, which float16 cannot represent."
        raise InputError(reason, "Choose --dtype bfloat16 or float32.")


def thread_count() -> int:
    """Threads that make and check blocks: memory and disks are busy with a few."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """torch computes with one thread in each of ours, which share the same cores."""
    warm_up()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Locked:
    """A source for several threads. Tensors are mapped, so that their data are read outside of the lock."""

    def __init__(self, source: ParamReader) -> None:
        self._source, self._lock = source, Lock()

    def read(self, param: str) -> torch.Tensor:
        with self._lock:
            return self._source.read(param)

    def drop(self, param: str) -> None:
        with self._lock:
            self._source.drop(param)


def plan_between(source: World, destination: World) -> TransferPlan:
    """The proven plan of a conversion: every element of the destination is written exactly once."""
    return receive_plan(source, destination.layout(0)).prove()


@contextmanager
def progress_bar(visible: bool = True) -> Iterator[Progress]:
    """Yield a function that shows progress on a terminal, and does nothing in a log or if disabled."""
    if not (visible and sys.stderr.isatty()):
        yield lambda step, done, total: None
        return
    from rich import progress
    from rich.console import Console

    columns = (progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
    bar_columns = (progress.TextColumn("{task.description}"), progress.BarColumn())
    with progress.Progress(*bar_columns, *columns, console=Console(stderr=True)) as bar:
        task_of = cache(lambda step: bar.add_task(step))
        yield lambda step, done, total: bar.update(task_of(step), completed=done, total=total)
