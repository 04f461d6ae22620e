"""What a worker does with the rounds that come: into live parameters, or through the model's own loader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rlctl.backends.vllm.channel import Chunk, Lengths, Rounds, rows_of
from rlctl.backends.vllm.direct import Target


class Inlet(Protocol):
    """The receiving end of a mover: rounds in order, each in a buffer that stays valid until it is given back."""

    def begin(self, version: int, epoch: int, changes: Lengths | None = None) -> Any:
        """A context in which `version` is received; what is raised inside is told to the other ends.

        `changes`: changed elements come, so many bytes; None: everything.
        """
        ...

    def wait(self, index: int) -> torch.Tensor:
        """The bytes of round `index`."""
        ...

    def done(self, index: int) -> None:
        """The bytes of round `index` are needed no more."""
        ...

    def close(self) -> None: ...


class Timed:
    """An inlet that also counts the seconds in which nothing had come that could be loaded."""

    def __init__(self, inlet: Inlet) -> None:
        self.inlet, self.waited_s = inlet, 0.0

    def wait(self, index: int) -> torch.Tensor:
        begun = time.perf_counter()
        buffer = self.inlet.wait(index)
        self.waited_s += time.perf_counter() - begun
        return buffer

    def done(self, index: int) -> None:
        self.inlet.done(index)


def chunk_view(buffer: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """A chunk's values in its round's buffer."""
    return buffer[chunk.offset : chunk.offset + chunk.bytes].view(getattr(torch, chunk.dtype)).view(chunk.shape)


@dataclass
class _Bound:
    """What to do with one round: copies into live memory, and what is packed once those are made."""

    buffer: int
    """Address of the buffer for which this was worked out."""
    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    packs: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]] = field(default_factory=list)


class DirectReceiver:
    """Writes rounds into live parameters. What goes where is worked out in the first refit and kept."""

    def __init__(self, targets: Callable[[], Mapping[str, Target]]) -> None:
        """`targets` says where parameters are now; it is asked once a refit."""
        self.look = targets
        self._bound: dict[tuple[int, int], _Bound] = {}
        self._where: dict[str, int] = {}
        self._scratch: dict[str, torch.Tensor] = {}

    def receive(self, rounds: Rounds, inlet: Timed) -> None:
        self.begin()
        for index, chunks in enumerate(rounds):
            self.write(index, chunks, inlet.wait(index))
            inlet.done(index)

    def begin(self) -> None:
        """A refit begins: see where parameters are."""
        self._targets = self.look()
        where = {name: one.memory.data_ptr() for name, one in self._targets.items() if one.memory is not None}
        if where != self._where:  # parameters have moved: work everything out again
            self._where, self._bound = where, {}

    def holds(self, chunk: Chunk) -> bool:
        """Whether a chunk is of a parameter that is written here."""
        return chunk.param in self._targets

    def write(self, index: int, chunks: Sequence[Chunk], buffer: torch.Tensor) -> None:
        """The chunks of round `index` that are written here."""
        key = (index, buffer.data_ptr())
        if key not in self._bound:
            self._bound[key] = self._bind(chunks, buffer)
        bound = self._bound[key]
        if bound.targets:
            torch._foreach_copy_(bound.targets, bound.sources)
        for pack, fused in bound.packs:
            pack(fused)

    def _bind(self, chunks: Sequence[Chunk], buffer: torch.Tensor) -> _Bound:
        bound = _Bound(buffer.data_ptr())
        for chunk in chunks:
            target, values = self._targets[chunk.param], chunk_view(buffer, chunk)
            whole = target.memory
            if whole is None and chunk.last and values.shape[0] == target.rows:
                bound.packs += [(pack, values) for pack in target.packs]  # packed from where it is
                continue
            if whole is None:
                whole = self._assembled(chunk.param, target.rows, values)
            bound.targets.append(whole[rows_of(chunk.box)])
            bound.sources.append(values)
            if chunk.last:
                bound.packs += [(pack, whole) for pack in target.packs]
        return bound

    def _assembled(self, name: str, rows: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for a packed matrix that does not fit a buffer; it stays, as the next refit needs it again."""
        if name not in self._scratch:
            self._scratch[name] = like.new_empty(rows, *like.shape[1:])
        return self._scratch[name]


class LoaderReceiver:
    """Hands whole published tensors to the model's loader, and what is written directly to `direct`.

    The loader keeps what it is given until a layer is complete, so each tensor is copied out of its buffer: one more
    copy of these tensors in time, and in memory one layer (and a whole tensor where it is larger than a buffer).
    """

    def __init__(
        self,
        load: Callable[[Iterator[tuple[str, torch.Tensor]]], Any],
        device: torch.device,
        direct: DirectReceiver,
    ) -> None:
        self.load, self.device, self.direct = load, device, direct

    def receive(self, rounds: Rounds, inlet: Timed) -> None:
        """All rounds; those before the first tensor for the loader are written before it is called."""
        self.direct.begin()
        alone = next((at for at, own in enumerate(rounds) if not all(map(self.direct.holds, own))), len(rounds))
        for index, chunks in enumerate(rounds[:alone]):
            self.direct.write(index, chunks, inlet.wait(index))
            inlet.done(index)
        self.load(self._tensors(rounds, alone, inlet))

    def _tensors(self, rounds: Rounds, first: int, inlet: Timed) -> Iterator[tuple[str, torch.Tensor]]:
        shapes = {chunk.param: tuple(span.last + 1 for span in chunk.box) for own in rounds for chunk in own}
        open_: dict[str, torch.Tensor] = {}
        for index, chunks in enumerate(rounds[first:], first):
            buffer = inlet.wait(index)
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
            inlet.done(index)
            yield from ready
