"""Write rounds of weights into a running vLLM model, directly or through its loader (see `assign.py`). Plain matrices
are overwritten in place; repacked or reordered ones are packed again from staging memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch

from rlctl.backends.vllm.weights.locate import Storage, StoredMatrix, dtype_name, pack_expert
from rlctl.errors import VerificationError, WorkerError
from rlctl.transport.changed_elements import MOST_ELEMENTS, read_piece, region
from rlctl.transport.movers import Receiver, TimedReceiver, transport
from rlctl.transport.round_buffers import chunk_view, copy_all
from rlctl.transport.rounds import Chunk, Connection, Lengths, Rounds, cut_rounds, rows_of
from rlctl.weights.layout import Layout
from rlctl.weights.vllm import layout_of


@dataclass(frozen=True)
class Destination:
    """Where a parameter's rows go: into `memory`, if there is any, and then to `packs`."""

    memory: torch.Tensor | None
    rows: int
    packs: tuple[Callable[[torch.Tensor], None], ...] = ()

    def write(self, values: torch.Tensor) -> None:
        """Write all rows."""
        if self.memory is not None:
            self.memory.copy_(values)
        for pack in self.packs:
            pack(values if self.memory is None else self.memory)


class LiveParameters:
    """The places in one worker's model that are written directly."""

    def __init__(self, matrices: Sequence[StoredMatrix]) -> None:
        self.matrices = [_without_unused_copy(matrix) for matrix in matrices]
        self._padded: dict[tuple[int, ...], torch.Tensor] = {}

    def layout(self) -> Layout:
        """Return the layout of the contents, with each matrix's rows stacked. Matrices that share memory are filled
        once."""
        shared = self.shared()
        return layout_of(0, ((s, dtype_name(s)) for at, s in enumerate(self.matrices) if at not in shared))

    def targets(self) -> dict[str, Destination]:
        """Where each parameter of `layout` goes, as things are now."""
        destinations: dict[str, Destination] = {}
        shared = self.shared()
        for index, matrix in enumerate(self.matrices):
            name = self.matrices[shared.get(index, index)].param
            packs = (partial(self.pack, matrix),) if matrix.storage is not Storage.PLAIN else ()
            if index in shared:
                destinations[name] = replace(destinations[name], packs=destinations[name].packs + packs)
            else:
                destinations[name] = Destination(_memory(matrix), matrix.rows, packs)
        return destinations

    def shared(self) -> dict[int, int]:
        """Matrices that compute with, or pack from, the memory of an earlier one; both by their place in `matrices`."""
        first: dict[tuple, int] = {}
        counts: dict[int, int] = {}
        for index, matrix in enumerate(self.matrices):
            memory = _memory(matrix)
            if memory is not None:
                earlier = first.setdefault((memory.data_ptr(), memory.shape, memory.stride()), index)
                if earlier != index:
                    counts[index] = earlier
        return counts

    def pack(self, matrix: StoredMatrix, rows: torch.Tensor) -> None:
        """Renew the copy in another order from the whole matrix."""
        if matrix.storage is Storage.PERMUTED:
            self._permute(matrix, rows)
            return
        module = matrix.module
        if not getattr(module, matrix.parameter).numel():
            module.register_parameter(matrix.parameter, torch.nn.Parameter(rows, requires_grad=False))
        module.cpu_linear = None  # frees the copy before, whose memory the new one may take
        module.quant_method.process_weights_after_loading(module)

    def _permute(self, matrix: StoredMatrix, rows: torch.Tensor) -> None:
        """Write an expert in its kernel's order; the kernel's padding is zeros."""
        kept = matrix.kept()
        if not matrix.transposed and rows.shape == kept.shape and rows.dtype == kept.dtype:
            pack_expert(rows.contiguous(), kept, matrix.isa)
            return
        plain = self._padded.setdefault(tuple(kept.shape), torch.zeros_like(kept))
        stored, row = plain.t() if matrix.transposed else plain, 0
        for part in matrix.parts:
            stored[part.row : part.row + part.rows, : matrix.columns].copy_(rows[row : row + part.rows])
            row += part.rows
        pack_expert(plain, kept, matrix.isa)


def _memory(matrix: StoredMatrix) -> torch.Tensor | None:
    """Return the live rows of a matrix; None if the engine has only a copy in another order."""
    if matrix.storage is Storage.PERMUTED or not matrix.kept().numel():
        return None
    stored = matrix.stored()[: matrix.rows]
    return stored[:, : matrix.columns] if matrix.columns else stored


def _without_unused_copy(matrix: StoredMatrix) -> StoredMatrix:
    """vLLM packs the input embedding for products too, which nobody computes with it."""
    if not (matrix.lookup and matrix.packed):
        return matrix
    matrix.module.cpu_linear = torch.nn.functional.linear
    return replace(matrix, storage=Storage.PLAIN)


@dataclass
class _Bound:
    """The work of one round: copies into live memory, then matrices to pack."""

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    packs: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]] = field(default_factory=list)


class DirectWriter:
    """Writes rounds into live parameters. The copies are worked out in the first refit and kept."""

    def __init__(self, targets: Callable[[], Mapping[str, Destination]]) -> None:
        """`targets` locates parameters, once per refit."""
        self.look = targets
        self._bound: dict[tuple[int, int], _Bound] = {}
        self._where: dict[str, int] = {}
        self._scratch: dict[str, torch.Tensor] = {}

    def write_rounds(self, rounds: Rounds, receiver: TimedReceiver) -> None:
        self.begin()
        for index, chunks in enumerate(rounds):
            self.write(index, chunks, receiver.wait(index))
            receiver.done(index)

    def begin(self) -> None:
        self._targets = self.look()
        where = {name: target.memory.data_ptr() for name, target in self._targets.items() if target.memory is not None}
        if where != self._where:  # parameters have moved: work everything out again
            self._where, self._bound = where, {}

    def holds(self, chunk: Chunk) -> bool:
        return chunk.param in self._targets

    def write(self, index: int, chunks: Sequence[Chunk], buffer: torch.Tensor) -> None:
        key = (index, buffer.data_ptr())
        if key not in self._bound:
            self._bound[key] = self._bind(chunks, buffer)
        bound = self._bound[key]
        copy_all(bound.targets, bound.sources)
        for pack, rows in bound.packs:
            pack(rows)

    def _bind(self, chunks: Sequence[Chunk], buffer: torch.Tensor) -> _Bound:
        bound = _Bound()
        for chunk in chunks:
            target, values = self._targets[chunk.param], chunk_view(buffer, chunk)
            whole = target.memory
            if whole is None and chunk.last and values.shape[0] == target.rows:
                bound.packs += [(pack, values) for pack in target.packs]  # packed from where it is
                continue
            if whole is None:
                if chunk.param not in self._scratch:  # it stays: the next refit needs it again
                    self._scratch[chunk.param] = values.new_empty(target.rows, *values.shape[1:])
                whole = self._scratch[chunk.param]
            bound.targets.append(whole[rows_of(chunk.box)])
            bound.sources.append(values)
            if chunk.last:
                bound.packs += [(pack, whole) for pack in target.packs]
        return bound


class ModelLoader:
    """Pass whole tensors to the model's loader and directly written ones to `direct`. Tensors are copied out of the
    buffer, because the loader keeps them until a layer is complete."""

    def __init__(
        self, load: Callable[[Iterator[tuple[str, torch.Tensor]]], Any], device: torch.device, direct: DirectWriter
    ) -> None:
        self.load, self.device, self.direct = load, device, direct

    def write_rounds(self, rounds: Rounds, receiver: TimedReceiver) -> None:
        """Write all rounds; rounds before the first tensor for the loader are written before its call."""
        self.direct.begin()
        alone = next((at for at, chunks in enumerate(rounds) if not all(map(self.direct.holds, chunks))), len(rounds))
        for index, chunks in enumerate(rounds[:alone]):
            self.direct.write(index, chunks, receiver.wait(index))
            receiver.done(index)
        self.load(self._tensors(rounds, alone, receiver))

    def _tensors(self, rounds: Rounds, first: int, receiver: TimedReceiver) -> Iterator[tuple[str, torch.Tensor]]:
        shapes = {chunk.param: tuple(span.last + 1 for span in chunk.box) for chunks in rounds for chunk in chunks}
        open_: dict[str, torch.Tensor] = {}
        for index, chunks in enumerate(rounds[first:], first):
            buffer = receiver.wait(index)
            self.direct.write(index, [chunk for chunk in chunks if self.direct.holds(chunk)], buffer)
            ready: list[tuple[str, torch.Tensor]] = []
            for chunk in chunks:
                if self.direct.holds(chunk):
                    continue
                values = chunk_view(buffer, chunk)
                if chunk.param not in open_ and chunk.last:
                    ready.append((chunk.param, values.to(self.device, copy=True)))
                    continue
                if chunk.param not in open_:
                    shape, dtype = shapes[chunk.param], values.dtype
                    open_[chunk.param] = torch.empty(shape, dtype=dtype, device=self.device)
                open_[chunk.param][rows_of(chunk.box)].copy_(values)
                if chunk.last:
                    ready.append((chunk.param, open_.pop(chunk.param)))
            receiver.done(index)
            yield from ready


def write_changes(
    targets: Mapping[str, Destination], connection: Connection, layout: Layout, rounds: int, receiver: TimedReceiver
) -> None:
    """Write changed elements over the live parameters of `layout`."""
    memory = [cast(torch.Tensor, targets[name].memory) for name in layout.params]  # `why_whole` was asked before
    dtypes, senders = [target.dtype for target in memory], len(connection.senders)
    for index in range(rounds):
        buffer = receiver.wait(index)
        for sender in range(senders):
            for param, places, values in read_piece(region(buffer, connection.capacity, senders, sender), dtypes):
                target = memory[param]
                places, values = places.long().to(target.device), values.to(target.device)
                if target.is_contiguous():
                    target.view(-1).index_copy_(0, places, values)
                else:
                    target[places // target.shape[1], places % target.shape[1]] = values
        receiver.done(index)


def why_whole(targets: Mapping[str, Destination]) -> str:
    """Return why sparse refits cannot write these parameters; empty: they can."""
    for name, target in targets.items():
        if target.memory is None or target.packs:
            return f"{name} is computed with from a repacked copy"
        if target.memory.numel() >= MOST_ELEMENTS:
            return f"{name} has more elements than places can count"
    return ""


class ReceivingEnd(ABC):
    """One worker's end of its channel, and the parameters that weights are written into."""

    layout: Layout
    writer: DirectWriter | ModelLoader

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.receiver: Receiver | None = None
        self.applied: int | None = None
        """Version that the parameters hold whole; None: none that came through here."""

    @abstractmethod
    def targets(self) -> Mapping[str, Destination]:
        """Where each parameter is that is written directly."""

    def connect(self, connection: Connection, name: str) -> None:
        self.close()
        self.connection, self.rounds = connection, cut_rounds(self.layout, connection.capacity)
        self.receiver = transport(connection.mover).receiver(connection, self.rounds, name, self.device)

    def receive(self, version: int, attempt: int, base: int | None = None, lengths: tuple[Lengths, ...] = ()) -> float:
        """Receive `version`, in full or as changes since `base` (`lengths` bytes per sender and round). Return seconds
        spent waiting. Raises VerificationError if parameters do not hold `base`."""
        if self.receiver is None:
            raise WorkerError("A refit began before the engine's worker was connected.")
        held, self.applied = self.applied, None
        changes = None if base is None else lengths[self.connection.channel]
        with torch.no_grad(), self.receiver.begin(version, attempt, changes):
            timed = TimedReceiver(self.receiver)
            if changes is None:
                self.writer.write_rounds(self.rounds, timed)
            elif held != base:
                held_version = "no whole version" if held is None else f"version {held}"
                raise VerificationError(
                    f"Changes since version {base} of the weights came to an engine that holds {held_version}."
                )
            else:
                write_changes(self.targets(), self.connection, self.layout, len(changes), timed)
        self.applied = version
        return timed.waited_s

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None
