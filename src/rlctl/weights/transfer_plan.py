"""Transfer plans: the intersection of a source's layouts with one destination rank's layout, and its proof.

`receive_plan` plans for a destination rank, `shares_of_rank` for a source rank. Both find the replica that sends by the
same function of (copy, destination rank, topology), so either side can plan its part alone. In a refit the policy's
ranks do all of it: each makes the `receive_plan` of every channel and sends what comes `from_rank` itself, and the
engines plan nothing. For the fingerprints of a verification each rank takes its `shares_of_rank`, which add up to
every tensor.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Protocol
from zlib import crc32

from rlctl.errors import InputError, VerificationError
from rlctl.weights.layout import Box, Fill, Layout, ParamSpec, Piece, View, coverage, meet, view_of
from rlctl.weights.transforms import Cast, Transform


@dataclass(frozen=True, slots=True)
class Shard:
    """Pieces of one tensor that every rank of `ranks` holds alike: each of them can send these."""

    ranks: Sequence[int]
    pieces: tuple[tuple[Piece, ParamSpec], ...]


class World(Protocol):
    """All ranks of one engine (or one file), asked about one rank or one tensor at a time."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def layout(self, rank: int) -> Layout:
        """Everything that `rank` holds."""
        ...

    def shards(self, tensor: str, every: bool = False) -> Sequence[Shard]:
        """Return the holders of each part of `tensor`, each part once; () where nobody holds it.

        `every` adds the pieces that are written but not read from (second copies of tied embeddings).
        """
        ...


@dataclass(frozen=True)
class SingleWorld:
    """A world of one rank: a file, a flat buffer, a plain Hugging Face module."""

    only: Layout
    size: int = 1

    def layout(self, rank: int) -> Layout:
        return self.only

    def shards(self, tensor: str, every: bool = False) -> Sequence[Shard]:
        pieces = [p for p in self.only.by_tensor.get(tensor, ()) if p.primary or every]
        return (Shard((self.only.rank,), tuple((p, self.only.params[p.param]) for p in pieces)),) if pieces else ()


class RememberingWorld:
    """A world that works out each rank and each tensor once, for plans into several destinations."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._layouts: dict[int, Layout] = {}
        self._shards: dict[tuple[str, bool], Sequence[Shard]] = {}

    @property
    def size(self) -> int:
        return self._world.size

    def layout(self, rank: int) -> Layout:
        if rank not in self._layouts:
            self._layouts[rank] = self._world.layout(rank)
        return self._layouts[rank]

    def shards(self, tensor: str, every: bool = False) -> Sequence[Shard]:
        key = tensor, every
        if key not in self._shards:
            self._shards[key] = self._world.shards(tensor, every)
        return self._shards[key]


@contextmanager
def many_objects() -> Iterator[None]:
    """Keep the garbage collector away while a plan is made: looking through its many lasting objects again and again
    takes longer than making them."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True, slots=True)
class Place:
    """The place that a rank runs at. Ranks with equal places share a process; None is unknown and equal to nothing."""

    node: str | None = None
    device: str | None = None
    process: str | None = None

    def distance(self, other: Place) -> int:
        """0 same process, 1 same device, 2 same node, 3 elsewhere."""
        if self.process is not None and self.process == other.process:
            return 0
        if self.node is None or self.node != other.node:
            return 3
        return 1 if self.device is not None and self.device == other.device else 2


@dataclass(frozen=True)
class Topology:
    """Places of source and destination ranks; without them every source is equally far."""

    source: tuple[Place, ...] = ()
    destination: tuple[Place, ...] = ()

    def nearest(self, ranks: Sequence[int], destination: int) -> Sequence[int]:
        """Those of `ranks` at the least distance from the destination rank, in rising order."""
        if not self.source or not self.destination or len(ranks) == 1:
            return ranks
        here = self.destination[destination]
        far = [self.source[rank].distance(here) for rank in ranks]
        least = min(far)
        return [rank for rank, distance in zip(ranks, far, strict=True) if distance == least]


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy from a param of a source rank to a param of a destination rank.

    Both views have the axes of the tensor, so that source[i, j, ...] belongs to destination[i, j, ...];
    `tensor_box` says which elements of the tensor these are.
    """

    source_rank: int
    destination_rank: int
    tensor: str
    tensor_box: Box
    source_param: str
    source_view: View
    destination_param: str
    destination_box: Box
    destination_view: View
    transforms: tuple[Transform, ...]
    destination_dtype: str
    primary: bool = True
    """False where the destination piece is a second copy (see `Piece`)."""

    @property
    def elements(self) -> int:
        return prod(self.source_view.shape)


@dataclass(frozen=True)
class TransferPlan:
    """The copies that one destination rank receives: each element of each of its params exactly once."""

    layout: Layout
    copies: tuple[Copy, ...]
    missing_tensors: tuple[str, ...] = ()
    _by_source: dict[int, list[Copy]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        grouped: dict[int, list[Copy]] = {}
        for copy in self.copies:
            grouped.setdefault(copy.source_rank, []).append(copy)
        for copies in grouped.values():
            copies.sort(key=message_order)
        object.__setattr__(self, "_by_source", grouped)

    @property
    def rank(self) -> int:
        return self.layout.rank

    @property
    def fills(self) -> tuple[Fill, ...]:
        return self.layout.fills

    def from_rank(self, source: int) -> list[Copy]:
        """The copies that `source` sends, in the order in which both sides pack them."""
        return self._by_source.get(source, [])

    @property
    def sources(self) -> list[int]:
        """Ranks that send, rising."""
        return sorted(self._by_source)

    def problems(self) -> list[str]:
        """Return what keeps the plan from writing each element exactly once; empty is the proof."""
        boxes: dict[str, list[Box]] = {name: [] for name in self.layout.params}
        for copy in self.copies:
            boxes.setdefault(copy.destination_param, []).append(copy.destination_box)
        for fill in self.layout.fills:
            boxes.setdefault(fill.param, []).append(fill.box)
        lines = [f"{name}: no source holds it" for name in self.missing_tensors]
        params = self.layout.params
        return lines + [line for name, own in boxes.items() for line in coverage(name, params.get(name), own)]

    def prove(self) -> TransferPlan:
        """The plan itself, once each element is shown to be written exactly once; else VerificationError."""
        problems = self.problems()
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise VerificationError(f"The transfer plan of rank {self.rank} is wrong: {shown}.")
        return self


def receive_plan(source: World, destination: World, rank: int, topology: Topology | None = None) -> TransferPlan:
    """Return what destination `rank` receives, and from which source ranks."""
    topology = topology or Topology()
    layout = destination.layout(rank)
    copies: list[Copy] = []
    missing: list[str] = []
    for tensor, pieces in layout.by_tensor.items():
        shards = source.shards(tensor)
        if not shards:
            missing.append(tensor)
        for shard in shards:
            candidates = topology.nearest(shard.ranks, rank)
            for piece in pieces:
                copies.extend(_copies(shard, candidates, piece, layout.params[piece.param], rank))
    return TransferPlan(layout, tuple(copies), tuple(missing))


def shares_of_rank(source: World, destination: World, rank: int, topology: Topology | None = None) -> tuple[Copy, ...]:
    """Return the copies that come from source `rank`, by destination rank, in `message_order`."""
    topology = topology or Topology()
    by_destination: dict[int, list[Copy]] = {}
    for tensor in source.layout(rank).by_tensor:
        own = [shard for shard in source.shards(tensor) if rank in shard.ranks]
        for target in destination.shards(tensor, every=True) if own else ():
            for to in target.ranks:
                for shard in own:
                    candidates = topology.nearest(shard.ranks, to)
                    made = [c for p, spec in target.pieces for c in _copies(shard, candidates, p, spec, to)]
                    by_destination.setdefault(to, []).extend(c for c in made if c.source_rank == rank)
    return tuple(copy for to in sorted(by_destination) for copy in sorted(by_destination[to], key=message_order))


def message_order(copy: Copy) -> tuple[str, Box, str]:
    """The order of copies in a message, on both sides."""
    return copy.tensor, copy.tensor_box, copy.destination_param


def _copies(
    shard: Shard, candidates: Sequence[int], piece: Piece, spec: ParamSpec, destination_rank: int
) -> Iterator[Copy]:
    """Copies from one shard into one destination piece: the boxes that they share."""
    for held, held_spec in shard.pieces:
        shared = _intersect(held, piece)
        if shared is None:
            continue
        tensor_box, source_box, destination_box = shared
        key = f"{piece.tensor}{tensor_box}>{destination_rank}"
        sender = candidates[0] if len(candidates) == 1 else candidates[crc32(key.encode()) % len(candidates)]
        yield Copy(
            sender,
            destination_rank,
            piece.tensor,
            tensor_box,
            held.param,
            _tensor_view(held_spec, held, source_box),
            piece.param,
            destination_box,
            _tensor_view(spec, piece, destination_box),
            _chain(held, held_spec, piece, spec),
            spec.dtype,
            piece.primary,
        )


def _intersect(source: Piece, destination: Piece) -> tuple[Box, Box, Box] | None:
    """Shared elements of two pieces of a tensor: (box in the tensor, in the source param, in the destination param)."""
    shared, from_source, from_destination = [], [], []
    for a, b in zip(source.tensor_box, destination.tensor_box, strict=True):
        hit = meet(a, b)
        if hit is None:
            return None
        first_a, every_a, first_b, every_b, count = hit
        shared.append(a.part(first_a, count, every_a))
        from_source.append((first_a, count, every_a))
        from_destination.append((first_b, count, every_b))
    return tuple(shared), _param_box(source, from_source), _param_box(destination, from_destination)


def _param_box(piece: Piece, parts: list[tuple[int, int, int]]) -> Box:
    own = zip(piece.param_box, piece.axes, strict=True)
    return tuple(span if axis is None else span.part(*parts[axis]) for span, axis in own)


def _tensor_view(spec: ParamSpec, piece: Piece, box: Box) -> View:
    """The view of `box` with the axes of the tensor: absent ones have length one and stride 0."""
    own = view_of(spec, box)
    shape, strides = [1] * len(piece.tensor_box), [0] * len(piece.tensor_box)
    for i, axis in enumerate(piece.axes):
        if axis is not None:
            shape[axis], strides[axis] = own.shape[i], own.strides[i]
    return View(own.offset, tuple(shape), tuple(strides))


def _chain(source: Piece, source_spec: ParamSpec, piece: Piece, spec: ParamSpec) -> tuple[Transform, ...]:
    """Source param -> tensor -> destination param; a change of dtype is the last step unless a step makes it itself."""
    steps: list[Transform] = []
    for transform in reversed(source.transforms):
        back = transform.inverse()
        if back is None:
            what = f"{source.param}: `{transform.name}` cannot be undone"
            raise InputError(f"{what}, so {source.tensor} cannot be read from it.")
        steps.append(back)
    steps += piece.transforms
    while len(steps) > 1 and (pair := _cancelling(steps)) is not None:
        del steps[pair : pair + 2]
    if source_spec.dtype != spec.dtype:
        steps.append(Cast(source_spec.dtype, spec.dtype))
    return tuple(steps)


def _cancelling(steps: list[Transform]) -> int | None:
    """Index of a step that the next one undoes exactly."""
    return next((i for i in range(len(steps) - 1) if steps[i].inverse() == steps[i + 1]), None)
