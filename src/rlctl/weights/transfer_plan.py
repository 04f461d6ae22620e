"""Transfer plans: intersections of source layouts with a destination's, with proof.

Source ranks are chosen deterministically, so all ranks make the same plan. In a refit each policy rank plans every
channel's `receive_plan` and sends its part; engines plan nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Protocol
from zlib import crc32

from rlctl.errors import VerificationError
from rlctl.weights.layout import Box, Fill, Layout, ParamSpec, Piece, View, coverage, meet, view_of
from rlctl.weights.transforms import Cast, Transform


@dataclass(frozen=True, slots=True)
class Shard:
    """Pieces of one tensor that every rank of `ranks` holds alike; any of them can send."""

    ranks: Sequence[int]
    pieces: tuple[tuple[Piece, ParamSpec], ...]


class World(Protocol):
    """All ranks of one engine (or one file), asked about one rank or one tensor at a time."""

    @property
    def size(self) -> int: ...

    def layout(self, rank: int) -> Layout: ...

    def shards(self, tensor: str) -> Sequence[Shard]:
        """Return the holders of each part of `tensor`, each part once; () where nobody holds it."""
        ...


@dataclass(frozen=True)
class SingleWorld:
    """A world of one rank: a file, a flat buffer, a plain Hugging Face module."""

    only: Layout
    size: int = 1

    def layout(self, rank: int) -> Layout:
        return self.only

    def shards(self, tensor: str) -> Sequence[Shard]:
        pieces = [p for p in self.only.by_tensor.get(tensor, ()) if p.primary]
        return (Shard((self.only.rank,), tuple((p, self.only.params[p.param]) for p in pieces)),) if pieces else ()


class RememberingWorld:
    """A world that works out each rank and each tensor once, for plans into several destinations."""

    def __init__(self, world: World) -> None:
        self.size = world.size
        self.layout, self.shards = cache(world.layout), cache(world.shards)


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy between params of two ranks. Both views have the tensor's axes: source[i, j, ...] goes to
    destination[i, j, ...]; `tensor_box` locates these elements."""

    source_rank: int
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
        object.__setattr__(self, "_by_source", grouped)

    @property
    def fills(self) -> tuple[Fill, ...]:
        return self.layout.fills

    def from_rank(self, source: int) -> list[Copy]:
        """The copies that `source` sends, in an order that every rank finds."""
        return self._by_source.get(source, [])

    @property
    def sources(self) -> list[int]:
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
        return lines + [
            line for name, tensor_boxes in boxes.items() for line in coverage(name, params.get(name), tensor_boxes)
        ]

    def prove(self) -> TransferPlan:
        """The plan itself, once each element is shown to be written exactly once; else VerificationError."""
        problems = self.problems()
        if problems:
            listing = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise VerificationError(f"The transfer plan of rank {self.layout.rank} is wrong: {listing}.")
        return self


def receive_plan(
    source: World,
    layout: Layout,
    distances: Sequence[int] = (),
    *,
    only: int | None = None,
    among: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda ranks: ranks,
) -> TransferPlan:
    """Return the copies into `layout` from the nearest source ranks (`distances` per rank; none: equal). `only`: copies
    from that rank. `among` selects among equally near ranks."""
    copies: list[Copy] = []
    missing: list[str] = []
    for tensor, pieces in layout.by_tensor.items():
        shards = source.shards(tensor)
        if not shards:
            missing.append(tensor)
        for shard in shards:
            candidates = shard.ranks
            if distances and len(candidates) > 1:
                least = min(distances[rank] for rank in candidates)
                candidates = among(tuple(rank for rank in candidates if distances[rank] == least))
            if only is None or only in candidates:
                for piece in pieces:
                    copies += _copies(shard, candidates, piece, layout.params[piece.param], layout.rank, only)
    return TransferPlan(layout, tuple(copies), tuple(missing))


def _copies(
    shard: Shard, candidates: Sequence[int], piece: Piece, spec: ParamSpec, destination: int, only: int | None
) -> Iterator[Copy]:
    """Copies from one shard into one destination piece: the boxes that they share."""
    for source, held_spec in shard.pieces:
        shared = _intersect(source, piece)
        if shared is None:
            continue
        tensor_box, source_box, destination_box = shared
        key = f"{piece.tensor}{tensor_box}>{destination}"
        sender = candidates[0] if len(candidates) == 1 else candidates[crc32(key.encode()) % len(candidates)]
        if only not in (None, sender):
            continue
        yield Copy(
            sender,
            piece.tensor,
            tensor_box,
            source.param,
            _tensor_view(held_spec, source, source_box),
            piece.param,
            destination_box,
            _tensor_view(spec, piece, destination_box),
            _chain(source, held_spec, piece, spec),
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
    spans = zip(piece.param_box, piece.axes, strict=True)
    return tuple(span if axis is None else span.part(*parts[axis]) for span, axis in spans)


def _tensor_view(spec: ParamSpec, piece: Piece, box: Box) -> View:
    view = view_of(spec, box)
    shape, strides = [1] * len(piece.tensor_box), [0] * len(piece.tensor_box)
    for i, axis in enumerate(piece.axes):
        if axis is not None:
            shape[axis], strides[axis] = view.shape[i], view.strides[i]
    return View(view.offset, tuple(shape), tuple(strides))


def _chain(source: Piece, source_spec: ParamSpec, piece: Piece, spec: ParamSpec) -> tuple[Transform, ...]:
    """Source param -> tensor -> destination param; a change of dtype is the last step unless a step makes it itself."""
    steps: list[Transform] = []
    for transform in reversed(source.transforms):
        back = transform.inverse()
        assert back is not None, (source.param, transform)
        steps.append(back)
    steps += piece.transforms
    at = 0
    while at + 1 < len(steps):  # take out steps that the next one undoes exactly
        if steps[at].inverse() == steps[at + 1]:
            del steps[at : at + 2]
            at = 0
        else:
            at += 1
    if source_spec.dtype != spec.dtype:
        steps.append(Cast(source_spec.dtype, spec.dtype))
    return tuple(steps)
