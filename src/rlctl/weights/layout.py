"""Layouts: which part of a model tensor each part of a rank's parameter holds. Plain data without torch.

A *tensor* is in the published checkpoint, a *param* is a rank's (or file's) memory block. Both sides of a piece are
boxes of spans, which covers column shards, interleaved gate/up and stacked experts; `axes` maps param axes to tensor
axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import Any, NamedTuple

from rlctl.errors import ConfigError
from rlctl.weights.transforms import Transform

Shape = tuple[int, ...]

ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
}


class Span(NamedTuple):
    """The indices start, start + step, ... (`count` of them) of one axis."""

    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - a tuple's own `count` is of no use here
    step: int = 1

    @property
    def last(self) -> int:
        """Largest index of the span (start - step where it is empty)."""
        return self.start + (self.count - 1) * self.step

    def part(self, first: int, count: int, every: int = 1) -> Span:
        """The span's elements first, first + every, ... (`count` of them)."""
        return Span(self.start + first * self.step, count, self.step * every)


Box = tuple[Span, ...]


class View(NamedTuple):
    """Strided view of a param's memory in elements: what `torch.as_strided` takes."""

    offset: int
    shape: Shape
    strides: Shape


def whole(shape: Sequence[int]) -> Box:
    return tuple(Span(0, n) for n in shape)


def volume(box: Box) -> int:
    return prod(span.count for span in box)


def meet(a: Span, b: Span) -> tuple[int, int, int, int, int] | None:
    """Return two spans' intersection: (first index in a, stride in a, first index in b, stride in b, count), or None.
    The step is the least common multiple (Chinese remainder)."""
    if a.step == 1 and b.step == 1:
        low, high = max(a.start, b.start), min(a.start + a.count, b.start + b.count)
        return (low - a.start, 1, low - b.start, 1, high - low) if high > low else None
    common = gcd(a.step, b.step)
    if (b.start - a.start) % common or not a.count or not b.count:
        return None
    step = a.step // common * b.step
    first = _first_common(a, b, common, step)
    high = min(a.last, b.last)
    if first > high:
        return None
    count = (high - first) // step + 1
    return (first - a.start) // a.step, step // a.step, (first - b.start) // b.step, step // b.step, count


def _first_common(a: Span, b: Span, common: int, step: int) -> int:
    other = b.step // common
    k = (b.start - a.start) // common * pow(a.step // common, -1, other) % other if other > 1 else 0
    first = a.start + k * a.step
    low = max(a.start, b.start)
    return first if first >= low else first + -(-(low - first) // step) * step


def share(total: int, parts: int, index: int, quantity: str, flag: str) -> Span:
    """The `index`-th of `parts` equal shares; ConfigError names what does not divide."""
    if total % parts:
        raise ConfigError(f"{quantity} = {total} does not divide by {flag} = {parts}.", f"Choose another {flag}.")
    return Span(index * (total // parts), total // parts)


def overlap(a: Box, b: Box) -> bool:
    return all(meet(x, y) is not None for x, y in zip(a, b, strict=True))


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One param of a rank: the shape under which pieces address it, and its dtype."""

    shape: Shape
    dtype: str

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]

    def strides(self) -> Shape:
        strides, step = [], 1
        for count in reversed(self.shape):
            strides.append(step)
            step *= count
        return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Piece:
    """`param[param_box] = transforms(tensor[tensor_box])`; param axis i runs along tensor axis `axes[i]`. None in
    `axes`: a length-one param axis that the tensor lacks. Other tensor axes have one index. A piece that is not
    `primary` is a second copy (tied embeddings): written, never read."""

    tensor: str
    tensor_box: Box
    param: str
    param_box: Box
    axes: tuple[int | None, ...]
    transforms: tuple[Transform, ...] = ()
    primary: bool = True

    def renamed(self, tensor: str, param: str) -> Piece:
        return Piece(tensor, self.tensor_box, param, self.param_box, self.axes, self.transforms, self.primary)


def whole_piece(
    tensor: str, param: str, shape: Sequence[int], transforms: tuple[Transform, ...] = (), primary: bool = True
) -> Piece:
    """A tensor that a param of the same shape holds."""
    box = whole(shape)
    return Piece(tensor, box, param, box, tuple(range(len(box))), transforms, primary)


@dataclass(frozen=True, slots=True)
class Fill:
    """Part of a param that no tensor determines (padding rows), and the value it gets."""

    param: str
    box: Box
    value: float = 0.0


@dataclass(frozen=True)
class Layout:
    """Everything that one rank holds."""

    rank: int
    params: dict[str, ParamSpec]
    pieces: tuple[Piece, ...]
    fills: tuple[Fill, ...] = ()
    by_tensor: dict[str, tuple[Piece, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            index.setdefault(piece.tensor, []).append(piece)
        object.__setattr__(self, "by_tensor", {name: tuple(pieces) for name, pieces in index.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with each distinct box and spec once: of 45,000 pieces a few hundred differ in more than names."""
        seen: dict[Any, int] = {}
        specs = {name: seen.setdefault(spec, len(seen)) for name, spec in self.params.items()}
        rows = []
        for p in self.pieces:
            kind = p.tensor_box, p.param_box, p.axes, p.transforms, p.primary
            rows.append((p.tensor, p.param, seen.setdefault(kind, len(seen))))
        return _unpickled, (self.rank, specs, rows, tuple(seen), self.fills)

    @property
    def bytes(self) -> int:
        return sum(spec.bytes for spec in self.params.values())


def _unpickled(rank: int, specs: dict[str, int], rows: list[tuple], kinds: tuple, fills: tuple[Fill, ...]) -> Layout:
    pieces = []
    for tensor, param, kind in rows:
        tensor_box, param_box, *more = kinds[kind]
        pieces.append(Piece(tensor, tensor_box, param, param_box, *more))
    return Layout(rank, {name: kinds[spec] for name, spec in specs.items()}, tuple(pieces), fills)


def coverage(name: str, spec: ParamSpec | None, boxes: Sequence[Box]) -> Iterator[str]:
    """Return sentences about elements missed, outside, or written twice; none: each is covered once. Disjoint boxes
    with the param's volume cover it exactly."""
    if spec is None:
        yield f"{name}: extra, there is no such parameter"
        return
    for box in boxes:
        if len(box) != len(spec.shape) or any(s.start < 0 or s.last >= n for s, n in zip(box, spec.shape, strict=True)):
            yield f"{name}: extra, {show(box)} lies outside of {spec.shape}"
            return
    twice = next(overlaps(boxes), None)
    if twice:
        yield f"{name}: written twice, {show(twice[0])} and {show(twice[1])} overlap"
        return
    written = sum(volume(box) for box in boxes)
    if written != spec.size:
        yield f"{name}: {spec.size - written} of {spec.size} elements missing"


def overlaps(boxes: Iterable[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs of boxes that share elements, found by a sweep along the axis where the boxes differ most."""
    boxes = [box for box in boxes if volume(box)]
    if len(boxes) < 2:
        return
    if not boxes[0]:
        yield boxes[0], boxes[1]
        return
    axis = max(range(len(boxes[0])), key=lambda i: len({box[i].start for box in boxes}))
    live: list[Box] = []
    for box in sorted(boxes, key=lambda b: b[axis].start):
        live = [other for other in live if other[axis].last >= box[axis].start]
        yield from ((other, box) for other in live if overlap(other, box))
        live.append(box)


def show(box: Box) -> str:
    spans = (f"{s.start}:{s.last + 1}" + (f":{s.step}" if s.step > 1 and s.count > 1 else "") for s in box)
    return "[" + ", ".join(spans) + "]"


def view_of(spec: ParamSpec, box: Box) -> View:
    """Strided view of `box` in the param's memory, in the param's axis order; the offset counts from the param."""
    strides = spec.strides()
    offset = sum(span.start * stride for span, stride in zip(box, strides, strict=True))
    return View(
        offset,
        tuple(span.count for span in box),
        tuple(s.step * stride for s, stride in zip(box, strides, strict=True)),
    )


def cut(piece: Piece, name: str, box: Box) -> Piece | None:
    """The part of `piece` inside of `box` of its param, as a piece of the param `name` that is just that box."""
    tensor_box, param_box = list(piece.tensor_box), []
    for span, block, axis in zip(piece.param_box, box, piece.axes, strict=True):
        hit = meet(span, block)
        if hit is None:
            return None
        first, every, to, step, count = hit
        param_box.append(Span(to, count, step))
        if axis is not None:
            tensor_box[axis] = piece.tensor_box[axis].part(first, count, every)
    return replace(piece, param=name, param_box=tuple(param_box), tensor_box=tuple(tensor_box))
