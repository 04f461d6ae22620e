"""The sending side of one channel on one policy rank: which copies each round takes, worked out once, and making them.

A copy goes into an *image* (the staging buffer that the receiver reads, each chunk at its place) or into a *message*
(the rank's own boxes one behind the other, which the other end puts in place).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rlctl.backends.vllm.channel import ALIGNMENT, Part, Rounds
from rlctl.backends.vllm.receiver import chunk_view
from rlctl.checkpoints.tensors import dtype_of, strided, transformed
from rlctl.errors import WorkerError
from rlctl.weights.layout import ITEM_BYTES
from rlctl.weights.plan import Copy
from rlctl.weights.transforms import Cast


def by_round(copies: Sequence[Copy], rounds: Rounds) -> list[list[Copy]]:
    """The copies of a channel's plan, dealt to its rounds, in the order in which both ends pack them."""
    dealt: list[list[Copy]] = [[] for _ in rounds]
    for copy in copies:
        dealt[int(copy.destination_param.partition(".")[0])].append(copy)
    return dealt


def message_parts(copies: Sequence[Copy]) -> tuple[Part, ...]:
    """Where each copy lies in a message that holds all of them."""
    parts, offset = [], 0
    for copy in copies:
        chunk = int(copy.destination_param.partition(".")[2])
        size = copy.elements * ITEM_BYTES[copy.destination_dtype]
        parts.append(Part(chunk, copy.destination_view, offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(parts)


@dataclass
class _Bound:
    """Views for all copies of a round: plain ones for one call, those whose values change on the way, and targets of
    parameters that are no memory of their own."""

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    changed: list[tuple[Copy, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    computed: list[tuple[Copy, torch.Tensor]] = field(default_factory=list)

    def run(self, source_of: Callable[[Copy], torch.Tensor]) -> None:
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)
        for copy, source, target in self.changed:
            target.copy_(transformed(source, copy))
        for copy, target in self.computed:
            target.copy_(transformed(source_of(copy), copy))


class Packer:
    """Makes the copies of one rank for one channel, round by round. Views are kept while memory stays where it is."""

    def __init__(self, rounds: Rounds, copies: Sequence[Copy], *, message: bool, who: str) -> None:
        self.rounds, self.message, self.who = rounds, message, who
        self.copies = by_round(copies, rounds)
        self.parts = [message_parts(own) if message else () for own in self.copies]
        self.bytes = [sum(copy.elements * ITEM_BYTES[copy.destination_dtype] for copy in own) for own in self.copies]
        """What this rank writes in each round."""
        self._bound: dict[tuple[int, int], _Bound] = {}
        self._where: dict[str, int] = {}

    def look(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take the live parameters for the refit that begins.

        What a mapping names in `computed` (weights merged with their adapters) is asked for whenever it is packed: a
        view that is kept would hold the values of the refit before.
        """
        self._computed: frozenset[str] = getattr(parameters, "computed", frozenset())
        where = {name: parameters[name].data_ptr() for name in parameters if name not in self._computed}
        if where != self._where:
            self._where, self._bound = where, {}
        self.parameters = parameters

    def pack(self, index: int, buffer: torch.Tensor) -> None:
        """Make all copies of a round."""
        if not self.copies[index]:
            return
        key = (index, buffer.data_ptr())
        if key not in self._bound:
            self._bound[key] = self._bind(index, buffer)
        self._bound[key].run(self.source)

    def source(self, copy: Copy) -> torch.Tensor:
        """The memory that a copy reads, as it is now."""
        return source_view(copy, self.parameters, self.who)

    def _bind(self, index: int, buffer: torch.Tensor) -> _Bound:
        bound = _Bound()
        for copy, target in zip(self.copies[index], self._targets(index, buffer), strict=True):
            if copy.source_param in self._computed:
                bound.computed.append((copy, target))
                continue
            source = self.source(copy)
            if any(not isinstance(transform, Cast) for transform in copy.transforms):
                bound.changed.append((copy, source, target))
            else:
                bound.targets.append(target)
                bound.sources.append(source)
        return bound

    def _targets(self, index: int, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        if not self.message:
            chunks = self.rounds[index]
            for copy in self.copies[index]:
                chunk = chunks[int(copy.destination_param.partition(".")[2])]
                yield strided(chunk_view(buffer, chunk), copy.destination_view)
            return
        for copy, part in zip(self.copies[index], self.parts[index], strict=True):
            flat = buffer[part.offset : part.offset + part.bytes].view(dtype_of(copy.destination_dtype))
            yield flat.view(copy.destination_view.shape)


def source_view(copy: Copy, parameters: Mapping[str, torch.Tensor], who: str) -> torch.Tensor:
    """The live memory that a copy reads, with the dimensions of the tensor."""
    if copy.source_param not in parameters:
        raise WorkerError(f"{who} has no parameter {copy.source_param}.")
    memory = parameters[copy.source_param].detach()
    if not memory.is_contiguous():
        raise WorkerError(f"{copy.source_param} is not stored contiguously on {who}.")
    return strided(memory, copy.source_view)
