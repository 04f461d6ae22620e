"""Rounds of bounded size, and records shared by a channel's ends. Torch-free.

A receiver's `Layout` declares parameters and the source of their elements. Both ends cut its rows alike into rounds
that fit a staging buffer, so refits send no tensor lists.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlctl.weights.layout import ITEM_BYTES, Box, Layout, ParamSpec, Piece, View, cut, volume, whole, whole_piece

ALIGNMENT = 256  # bytes; whole cache lines, and what vectorised copies like
EMPTY_BYTES = 8  # bytes of an unchanged piece: its length only


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a receiver's parameter, contiguous at `offset` of the round's buffer."""

    param: str
    box: Box
    dtype: str
    offset: int
    """In bytes."""
    last: bool
    """The parameter is complete once this chunk has arrived."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(span.count for span in self.box)

    @property
    def bytes(self) -> int:
        return volume(self.box) * ITEM_BYTES[self.dtype]


Rounds = tuple[tuple[Chunk, ...], ...]
Lengths = tuple[tuple[int, ...], ...]
"""Bytes of changed elements, by round and sender."""


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A box of a chunk that one sender holds, where senders send messages: contiguous at `offset` of the message."""

    chunk: int
    """Number of the chunk in its round."""
    view: View
    """Where the box lies in the chunk."""
    offset: int
    bytes: int


@dataclass(frozen=True)
class Route:
    """Published tensors that come into a worker's model by one path, for one reason."""

    path: str
    """`direct` or `loader`."""
    reason: str
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Need:
    """The layout that one engine worker asks for, and where it runs."""

    name: str
    """The engine and its worker, for messages."""
    node: str
    device: str
    routes: tuple[Route, ...]
    layout: Layout
    whole_only: str = ""
    """Why it cannot use changed elements without the others; empty: it can."""


@dataclass(frozen=True)
class SegmentAddress:
    """How another process of the same node finds a shared memory segment."""

    path: str
    bytes: int
    node: str


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of a process group meet."""

    host: str
    port: int
    prefix: str
    """Tells one making of the group from the next."""
    names: tuple[str, ...]
    """All members, by rank."""


@dataclass(frozen=True)
class Connection:
    """Connection data of a receiver, sent once."""

    mover: str
    capacity: int
    """Bytes of one staging buffer."""
    senders: tuple[str, ...]
    """Names, for messages."""
    receivers: tuple[str, ...]
    """All readers of the channel, in relay order."""
    timeout_s: float
    address: SegmentAddress | None = None
    handles: tuple[tuple, ...] = ()
    """With CUDA IPC: handles of the staging buffers on the device."""
    group: Rendezvous | None = None
    """Where the members of a collective group meet."""
    directory: str | None = None
    """Where this session writes its versions."""
    channel: int = 0
    sparse: bool = False
    """Sparse refits are possible, so senders keep their last data."""


@dataclass(frozen=True)
class Channel:
    """One stream of rounds: engine workers that need the same bytes and can read them from the same place."""

    index: int
    layout: Layout
    node: str
    """Where its staging memory is; for movers that share none, where its first receiver is."""
    device: str
    senders: tuple[int, ...]
    """Policy ranks that write into it."""
    connection: Connection


@dataclass(frozen=True)
class ChangeSizes:
    """The changed elements that one rank would send over one channel."""

    channel: int
    elements: int
    """All elements that were compared."""
    changed: int
    sizes: tuple[int, ...]
    """Bytes of each round."""

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


def cut_rounds(layout: Layout, capacity: int) -> Rounds:
    """Return rounds of at most `capacity` bytes in parameter order; larger parameters are cut along rows."""
    rounds: list[tuple[Chunk, ...]] = []
    now: list[Chunk] = []
    offset = 0
    for name, spec in layout.params.items():
        boxes = [whole(spec.shape)] if spec.bytes <= capacity else list(_split(whole(spec.shape), spec.dtype, capacity))
        for index, box in enumerate(boxes):
            size = volume(box) * ITEM_BYTES[spec.dtype]
            if now and offset + size > capacity:
                rounds.append(tuple(now))
                now, offset = [], 0
            now.append(Chunk(name, box, spec.dtype, offset, index == len(boxes) - 1))
            offset += -(-size // ALIGNMENT) * ALIGNMENT
    return (*rounds, tuple(now)) if now else tuple(rounds)


def _split(box: Box, dtype: str, capacity: int) -> Iterator[Box]:
    axis = next((i for i, span in enumerate(box) if span.count > 1), None)
    size = volume(box) * ITEM_BYTES[dtype]
    if size <= capacity or axis is None:
        yield box
        return
    span = box[axis]
    rows = max(1, capacity // (size // span.count))
    for first in range(0, span.count, rows):
        part = (*box[:axis], span.part(first, min(rows, span.count - first)), *box[axis + 1 :])
        yield from _split(part, dtype, capacity)


def buffer_bytes(rounds: Rounds) -> int:
    return max((chunk.offset + chunk.bytes for chunks in rounds for chunk in chunks), default=0)


def chunk_layout(layout: Layout, rounds: Rounds) -> Layout:
    """The staging memory of all rounds: chunk c of round r is the parameter "r.c"."""
    pieces: dict[str, list[Piece]] = {}
    for piece in layout.pieces:
        pieces.setdefault(piece.param, []).append(piece)
    params: dict[str, ParamSpec] = {}
    kept: list[Piece] = []
    for index, chunks in enumerate(rounds):
        for number, chunk in enumerate(chunks):
            name = f"{index}.{number}"
            params[name] = ParamSpec(chunk.shape, chunk.dtype)
            cuts = (cut(piece, name, chunk.box) for piece in pieces.get(chunk.param, ()))
            kept += [piece for piece in cuts if piece is not None]
    return Layout(0, params, tuple(kept))


def whole_tensors(rows: Sequence[tuple[str, str, tuple[int, ...]]]) -> Layout:
    """The layout of a receiver that takes published tensors whole: rows of (name, dtype, shape)."""
    params = {name: ParamSpec(tuple(shape), dtype) for name, dtype, shape in rows}
    pieces = tuple(whole_piece(name, name, shape) for name, _, shape in rows)
    return Layout(0, params, pieces)


def rows_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(span.start, span.last + 1, span.step) for span in box)


def encode_parts(parts: Sequence[Sequence[MessagePart]]) -> bytes:
    """Return a sender's messages by round as JSON, sent to receivers once."""
    return json.dumps([[[p.chunk, *p.view, p.offset, p.bytes] for p in chunk_parts] for chunk_parts in parts]).encode()


def decode_parts(text: bytes) -> list[tuple[MessagePart, ...]]:
    return [
        tuple(
            MessagePart(chunk, View(first, tuple(shape), tuple(strides)), offset, size)
            for chunk, first, shape, strides, offset, size in chunk_parts
        )
        for chunk_parts in json.loads(text)
    ]


def message_bytes(parts: Sequence[MessagePart]) -> int:
    return parts[-1].offset + parts[-1].bytes if parts else 0
