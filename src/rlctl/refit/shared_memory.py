"""The shared memory mover: policy ranks write into two staging buffers that engine workers of their node read."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from rlctl.backends.vllm.ring import Ring, ring_bytes
from rlctl.backends.vllm.segment import Segment
from rlctl.backends.vllm.sparse import region
from rlctl.errors import WorkerError
from rlctl.refit.packing import Packer
from rlctl.refit.records import Channel


def make(channel: Channel, rounds: int) -> Segment:
    """The staging memory of a channel of `rounds` rounds."""
    link = channel.connection
    parties = len(link.senders) + len(link.receivers)
    return Segment.create(ring_bytes(parties, min(2, rounds), link.capacity))


class SharedMemoryOutlet:
    """One rank's part of the rounds, written where the receivers read it."""

    memory: list[torch.Tensor] | None = None

    def __init__(self, channel: Channel, rank: int, packer: Packer, made: Segment | None) -> None:
        link = channel.connection
        if link.address is None:
            raise WorkerError("A shared memory channel without an address.")
        self.packer = packer
        self.capacity, self.senders, self.place = link.capacity, len(link.senders), channel.senders.index(rank)
        self.ring = Ring(
            made or Segment(link.address),
            link.senders,
            link.receivers,
            self.place,
            capacity=link.capacity,
            buffers=min(2, len(packer.rounds)),
            timeout_s=link.timeout_s,
            memory=self.memory,
        )

    def begin(self, version: int, epoch: int) -> AbstractContextManager[None]:
        return self.ring.refit(version, epoch)

    def wait(self, index: int) -> torch.Tensor:
        return self.ring.wait_free(index)

    def done(self, index: int) -> None:
        self.ring.filled(index)

    def wait_changes(self, index: int) -> torch.Tensor:
        return region(self.ring.wait_free(index), self.capacity, self.senders, self.place)

    def done_changes(self, index: int, length: int) -> None:
        self.done(index)

    def close(self) -> None:
        self.ring.close()
