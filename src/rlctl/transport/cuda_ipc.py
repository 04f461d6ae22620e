"""The CUDA IPC mover: two buffers on a shared device. Policy ranks on other devices send boxes over the policy's
process group. Memory is shared through torch.multiprocessing's reductions (torch/multiprocessing/reductions.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlctl.transport.round_buffers import Packer
from rlctl.transport.rounds import Channel, Connection, Rounds, cut_rounds
from rlctl.transport.shared_memory import Segment, SharedMemoryReceiver, SharedMemorySender, Staging, ring_bytes

# Place of the device index among the arguments of `rebuild_cuda_tensor`: each process numbers its visible devices
# itself.
_DEVICE = 6


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def why_not_shared(device: torch.device) -> str:
    """Return the reason why this process's GPU memory cannot be shared, as on WSL2; empty: it can, or no GPU."""
    if device.type != "cuda":
        return ""
    try:
        with _segments_of_their_own(device):
            _share(torch.empty(512, dtype=torch.uint8, device=device))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def make_staging(channel: Channel, device: torch.device) -> Staging:
    link, rounds = channel.connection, cut_rounds(channel.layout, channel.connection.capacity)
    parties = len(link.senders) + len(link.receivers)
    with _segments_of_their_own(device):
        buffers = [torch.empty(link.capacity, dtype=torch.uint8, device=device) for _ in range(min(2, len(rounds)))]
    return Staging(Segment.create(ring_bytes(parties, 0, 0)), buffers, tuple(map(_share, buffers)))


@contextmanager
def _segments_of_their_own(device: torch.device) -> Iterator[None]:
    """Allocate plain new segments: CUDA IPC shares whole segments, which would keep cached ones alive, and expandable
    segments need file descriptors that containers forbid."""
    name = next((name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if name in os.environ), None)
    settings = os.environ[name] if name else ""
    fixed = settings.replace("expandable_segments:True", "expandable_segments:False")
    if fixed != settings:  # torch resets what the text leaves out, so all of it is given
        torch.cuda.memory._set_allocator_settings(fixed)
    try:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool(), device):
            yield
    finally:
        if fixed != settings:
            torch.cuda.memory._set_allocator_settings(settings)


class CudaIpcSender(SharedMemorySender):
    """Writes the rounds of the rank on the worker's device."""

    def __init__(self, channel: Channel, rank: int, packer: Packer, *, staging: Staging, **_: object) -> None:
        super().__init__(channel, rank, packer, staging=staging)
        self.device = staging.buffers[0].device if staging.buffers else torch.device("cuda")

    def done(self, index: int, length: int) -> None:
        torch.cuda.current_stream(self.device).synchronize()  # the copies have been made
        super().done(index, length)


class CudaIpcReceiver(SharedMemoryReceiver):
    """Reads the rounds that the policy rank on the same device fills."""

    def __init__(self, connection: Connection, rounds: Rounds, name: str, device: torch.device) -> None:
        super().__init__(connection, rounds, name, device, [_open(handle, device) for handle in connection.handles])
        self.device = device

    def done(self, index: int) -> None:
        torch.cuda.current_stream(self.device).synchronize()  # the copies out of the buffer have been made
        super().done(index)


def _share(buffer: torch.Tensor) -> tuple:
    """The handle of `buffer` for one other process, which opens it once; `buffer` must be kept."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(buffer)[1]


def _open(handle: tuple, device: torch.device) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    index = device.index if device.index is not None else torch.cuda.current_device()
    arguments: list[Any] = [*handle[:_DEVICE], index, *handle[_DEVICE + 1 :]]
    return rebuild_cuda_tensor(*arguments)
