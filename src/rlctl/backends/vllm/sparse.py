"""Refits that carry changed elements alone: pieces of (where, what), and writing them over live parameters.

A piece is a stretch of a staging buffer: its length in bytes, then entries. An entry is the parameter's number in the
receiver's layout, how many elements, their places in the parameter (int32, row by row) and their values, each part
padded to eight bytes. Values replace what is there, so that writing a piece twice does no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from rlctl.backends.vllm.direct import Target
from rlctl.backends.vllm.receiver import Timed
from rlctl.errors import VerificationError

HEADER = 2  # int64 words: the parameter, the number of elements
WORD = 8
MOST_ELEMENTS = 1 << 31  # of a parameter: places are int32


def padded(size: int) -> int:
    """`size` bytes, up to whole words."""
    return -(-size // WORD) * WORD


def entry_bytes(count: int, item: int) -> int:
    """Bytes of an entry of `count` elements of `item` bytes."""
    return HEADER * WORD + padded(4 * count) + padded(item * count)


def region(buffer: torch.Tensor, capacity: int, senders: int, sender: int) -> torch.Tensor:
    """The part of a staging buffer that one sender's pieces go into."""
    size = region_bytes(capacity, senders)
    return buffer[sender * size : (sender + 1) * size]


def region_bytes(capacity: int, senders: int) -> int:
    return capacity // senders // WORD * WORD


def write_piece(memory: torch.Tensor, entries: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
    """Entries of (parameter, places, values) into a region."""
    words, at = memory.view(torch.int64), WORD
    for param, places, values in entries:
        count = len(places)
        words[at // WORD], words[at // WORD + 1] = param, count
        at += HEADER * WORD
        memory[at : at + 4 * count].view(torch.int32).copy_(places)
        at += padded(4 * count)
        size = values.element_size() * count
        memory[at : at + size].view(values.dtype).copy_(values)
        at += padded(size)
    words[0] = at


def read_piece(memory: torch.Tensor, dtypes: Sequence[torch.dtype]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The entries of a region; `dtypes` of the receiver's parameters in order."""
    words, at = memory.view(torch.int64), WORD
    end = int(words[0])
    while at < end:
        param, count = int(words[at // WORD]), int(words[at // WORD + 1])
        at += HEADER * WORD
        places = memory[at : at + 4 * count].view(torch.int32)
        at += padded(4 * count)
        size = dtypes[param].itemsize * count
        values = memory[at : at + size].view(dtypes[param])
        at += padded(size)
        yield param, places, values


def why_not(targets: Mapping[str, Target]) -> str:
    """Why changed elements cannot be written into these parameters; empty: they can."""
    for name, target in targets.items():
        if target.memory is None or target.packs:
            return f"{name} is computed with from a repacked copy"
        if target.memory.numel() >= MOST_ELEMENTS:
            return f"{name} has more elements than places can count"
    return ""


def require_base(held: int | None, base: int) -> None:
    """Raise VerificationError unless changes since `base` come to parameters that hold it."""
    if held != base:
        found = "no whole version" if held is None else f"version {held}"
        raise VerificationError(f"Changes since version {base} of the weights came to an engine that holds {found}.")


class SparseReceiver:
    """Writes pieces over live parameters."""

    def __init__(self, targets: Mapping[str, Target], order: Sequence[str], senders: int, capacity: int) -> None:
        self.memory = [targets[name].memory for name in order]
        self.dtypes = [memory.dtype for memory in self.memory if memory is not None]
        self.senders, self.capacity = senders, capacity

    def receive(self, rounds: int, inlet: Timed) -> None:
        """So many rounds of pieces."""
        for index in range(rounds):
            self.write(inlet.wait(index))
            inlet.done(index)

    def write(self, buffer: torch.Tensor) -> None:
        """One round: the pieces of all senders."""
        for sender in range(self.senders):
            for param, places, values in read_piece(region(buffer, self.capacity, self.senders, sender), self.dtypes):
                _put(self.memory[param], places.long(), values)


def _put(memory: torch.Tensor | None, places: torch.Tensor, values: torch.Tensor) -> None:
    assert memory is not None
    places, values = places.to(memory.device), values.to(memory.device)
    if memory.is_contiguous():
        memory.view(-1).index_copy_(0, places, values)
    else:
        memory[places // memory.shape[1], places % memory.shape[1]] = values
