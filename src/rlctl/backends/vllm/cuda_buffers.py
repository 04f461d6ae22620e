"""Device memory that two processes share by CUDA IPC, through torch.multiprocessing's reductions.

Written from PyTorch's source (torch/multiprocessing/reductions.py); it has not been run on a GPU.
"""

from __future__ import annotations

import torch

# Place of the device index among the arguments of `rebuild_cuda_tensor`: processes number their visible devices
# themselves.
_DEVICE = 6


def share_buffer(buffer: torch.Tensor) -> tuple:
    """The handle of `buffer` for one other process, which opens it once; `buffer` must be kept."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(buffer)[1]


def open_buffer(handle: tuple, device: torch.device) -> torch.Tensor:
    """The memory behind a handle, on this process's number of the same device."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    index = device.index if device.index is not None else torch.cuda.current_device()
    return rebuild_cuda_tensor(*handle[:_DEVICE], index, *handle[_DEVICE + 1 :])


def device_name(device: torch.device) -> str:
    """A name that is the same in every process that uses the device."""
    if device.type != "cuda":
        return device.type
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"
