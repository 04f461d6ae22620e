"""Copies of a round into a buffer (`Packer`), and messages assembled into rounds (`Images`). Targets are *images* (the
receiver's staging buffer) or *messages* (a rank's boxes in sequence, placed by the other end)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from rlctl.settings.training import Rounding
from rlctl.transport.rounds import ALIGNMENT, Chunk, MessagePart, Rounds, message_bytes
from rlctl.weights.layout import ITEM_BYTES
from rlctl.weights.plan_execution import dtype_of, strided, transformed
from rlctl.weights.transfer_plan import Copy
from rlctl.weights.transforms import Cast


def chunk_view(buffer: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    return buffer[chunk.offset : chunk.offset + chunk.bytes].view(dtype_of(chunk.dtype)).view(chunk.shape)


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the storage of a tensor and its offset there. Views stay valid where both stay, also if the storage is
    emptied and filled again at another address (`backends/host_memory.py`)."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target, in one call of torch."""
    if targets:
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage] - torch has no public name


def by_round(copies: Sequence[Copy], rounds: Rounds) -> list[list[Copy]]:
    """The copies of a channel's plan by round, in an order that both ends find."""
    copies_of: list[list[Copy]] = [[] for _ in rounds]
    for copy in copies:
        copies_of[int(copy.destination_param.partition(".")[0])].append(copy)
    return copies_of


def chunk_number(copy: Copy) -> int:
    """The chunk, in its round, that a copy of a channel's plan goes into."""
    return int(copy.destination_param.partition(".")[2])


def bytes_of(copy: Copy) -> int:
    return copy.elements * ITEM_BYTES[copy.destination_dtype]


def message_parts(copies: Sequence[Copy]) -> tuple[MessagePart, ...]:
    """Return the place of each copy in a message of all."""
    parts, offset = [], 0
    for copy in copies:
        parts.append(MessagePart(chunk_number(copy), copy.destination_view, offset, bytes_of(copy)))
        offset += -(-bytes_of(copy) // ALIGNMENT) * ALIGNMENT
    return tuple(parts)


@dataclass
class _Bound:
    """Views for all copies of a round: plain copies for one call, and copies whose values change."""

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    changed: list[tuple[Copy, torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Packer:
    """Makes the copies of one rank for one channel, round by round. Views are kept while storages stay the same."""

    def __init__(
        self, rounds: Rounds, copies: Sequence[Copy], *, message: bool, rounding: Rounding = "unbiased"
    ) -> None:
        """`rounding`: how the weights are made narrower, where the engine's are."""
        self.rounds, self.message = rounds, message
        self.rounding: Rounding = rounding
        self.copies = by_round(copies, rounds)
        self.parts = [message_parts(copies) if message else () for copies in self.copies]
        self.lengths = [message_bytes(parts_of_copy) for parts_of_copy in self.parts]
        """Bytes of the message of each round."""
        self.bytes = [sum(map(bytes_of, copies)) for copies in self.copies]
        """Bytes that this rank writes in each round."""
        self._bound: dict[tuple[int, int, int], _Bound] = {}
        self._where: dict[str, tuple[int, int]] = {}

    def look(self, parameters: Mapping[str, torch.Tensor]) -> None:
        where = {name: place_of(parameter) for name, parameter in parameters.items()}
        if where != self._where:
            self._where, self._bound = where, {}
        self.parameters = parameters

    def pack(self, index: int, buffer: torch.Tensor) -> None:
        if not self.copies[index]:
            return
        key = (index, *place_of(buffer))
        if key not in self._bound:
            self._bound[key] = self._bind(index, buffer)
        bound = self._bound[key]
        copy_all(bound.targets, bound.sources)
        for copy, source, target in bound.changed:
            target.copy_(transformed(source, copy, rounding=self.rounding))

    def source(self, copy: Copy) -> torch.Tensor:
        return source_view(copy, self.parameters)

    def _bind(self, index: int, buffer: torch.Tensor) -> _Bound:
        bound = _Bound()
        for number, copy in enumerate(self.copies[index]):
            if self.message:
                part = self.parts[index][number]
                flat = buffer[part.offset : part.offset + part.bytes].view(dtype_of(copy.destination_dtype))
                target = flat.view(copy.destination_view.shape)
            else:
                target = strided(chunk_view(buffer, self.rounds[index][chunk_number(copy)]), copy.destination_view)
            if not all(isinstance(step, Cast) and step.exact for step in copy.transforms):
                bound.changed.append((copy, self.source(copy), target))
            else:
                bound.targets.append(target)
                bound.sources.append(self.source(copy))
        return bound


def source_view(copy: Copy, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return strided(parameters[copy.source_param].detach(), copy.source_view)


def empty(buffers: Sequence[torch.Tensor]) -> None:
    """Give the memory of whole buffers back until `refill`. Their views stay, and so does nothing in them."""
    for buffer in buffers:
        buffer.untyped_storage().resize_(0)


def refill(buffers: Sequence[torch.Tensor]) -> None:
    """Give buffers memory again, with undefined contents."""
    for buffer in buffers:
        buffer.untyped_storage().resize_(buffer.nbytes)


class Images:
    """Two images, and two buffers for all senders' messages of a round, together about a round long."""

    def __init__(
        self, rounds: Rounds, parts: list[list[tuple[MessagePart, ...]]], device: torch.device, capacity: int
    ) -> None:
        """`parts[sender][round]`: the boxes of a message; `capacity`: bytes of an image (0: `unpack` is given it)."""
        self.rounds, self.parts = rounds, parts
        self.images = [torch.empty(capacity, dtype=torch.uint8, device=device) for _ in range(2)]
        lengths = [
            [-(-message_bytes(parts_of_copy[index]) // ALIGNMENT) * ALIGNMENT for parts_of_copy in parts]
            for index in range(len(rounds))
        ]
        self._starts = [list(accumulate(sizes, initial=0)) for sizes in lengths]
        """By round: where each sender's message begins, and the end of the last one."""
        size = max((starts[-1] for starts in self._starts), default=0)
        self._arrived = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._views: dict[tuple[int, int, int, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def hold(self) -> None:
        """Have the memory in which messages arrive."""
        refill(self._arrived)

    def let_go(self) -> None:
        """Give that memory back until `hold`."""
        empty(self._arrived)

    def message(self, sender: int, index: int) -> torch.Tensor:
        start = self._starts[index][sender]
        return self._arrived[index % 2][start : start + message_bytes(self.parts[sender][index])]

    def image(self, index: int) -> torch.Tensor:
        return self.images[index % 2]

    def unpack(self, sender: int, index: int, image: torch.Tensor | None = None) -> None:
        """Put a received message in place, in the round's image or in `image`."""
        image = self.image(index) if image is None else image
        key = (sender, index, *place_of(image))
        if key not in self._views:
            self._views[key] = self._bind(sender, index, image)
        targets, sources = self._views[key]
        copy_all(targets, sources)

    def _bind(self, sender: int, index: int, image: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        chunks, message = self.rounds[index], self.message(sender, index)
        targets, sources = [], []
        for part in self.parts[sender][index]:
            target = strided(chunk_view(image, chunks[part.chunk]), part.view)
            targets.append(target)
            sources.append(message[part.offset : part.offset + part.bytes].view(target.dtype).view(target.shape))
        return targets, sources
