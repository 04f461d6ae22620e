"""The CUDA IPC mover: the shared memory mover with its two buffers on the device that policy rank and worker share.

Ranks on other devices hand their boxes to that rank over the policy's own process group (`exchange`). Everything but
the buffers is the shared memory mover's; this file has not been run on a GPU.
"""

from __future__ import annotations

import torch

from rlctl.backends.vllm.cuda_buffers import share_buffer
from rlctl.backends.vllm.ring import ring_bytes
from rlctl.backends.vllm.segment import Segment
from rlctl.refit.packing import Packer
from rlctl.refit.records import Channel
from rlctl.refit.shared_memory import SharedMemoryOutlet


def make(channel: Channel, rounds: int, device: torch.device) -> tuple[Segment, list[torch.Tensor]]:
    """Memory for the counters, and the buffers of a channel of `rounds` rounds."""
    link = channel.connection
    parties = len(link.senders) + len(link.receivers)
    buffers = [torch.empty(link.capacity, dtype=torch.uint8, device=device) for _ in range(min(2, rounds))]
    return Segment.create(ring_bytes(parties, 0, 0)), buffers


def handles(buffers: list[torch.Tensor]) -> tuple[tuple, ...]:
    """What the worker opens the buffers by."""
    return tuple(share_buffer(buffer) for buffer in buffers)


class CudaIpcOutlet(SharedMemoryOutlet):
    """The rounds of the rank on the worker's device."""

    def __init__(
        self, channel: Channel, rank: int, packer: Packer, made: Segment | None, buffers: list[torch.Tensor]
    ) -> None:
        self.memory = buffers
        super().__init__(channel, rank, packer, made)

    def done(self, index: int) -> None:
        torch.cuda.current_stream(self.memory[0].device).synchronize()  # the copies have been made
        self.ring.filled(index)
