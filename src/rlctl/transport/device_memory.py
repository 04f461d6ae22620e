"""Memory of a GPU that processes share by CUDA IPC, through torch.multiprocessing's reductions
(torch/multiprocessing/reductions.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlctl.transport.rounds import Channel, cut_rounds
from rlctl.transport.staging import Segment, Staging, ring_bytes

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


def device_staging(channel: Channel, device: torch.device) -> Staging:
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
    if fixed != settings:  # torch resets missing options, so the text gives all
        torch.cuda.memory._set_allocator_settings(fixed)
    try:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool(), device):
            yield
    finally:
        if fixed != settings:
            torch.cuda.memory._set_allocator_settings(settings)


def finish_copies(device: torch.device) -> None:
    """Wait for the copies that this process has started on its stream of the device."""
    torch.cuda.current_stream(device).synchronize()


def _share(buffer: torch.Tensor) -> tuple:
    """The handle of `buffer` for one other process, which opens it once; `buffer` must be kept."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(buffer)[1]


def open_buffer(handle: tuple, device: torch.device) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    index = device.index if device.index is not None else torch.cuda.current_device()
    arguments: list[Any] = [*handle[:_DEVICE], index, *handle[_DEVICE + 1 :]]
    return rebuild_cuda_tensor(*arguments)
