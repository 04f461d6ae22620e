"""Host memory for what a device does not hold for a while."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlctl.backends.megatron.storages import storage_bytes

SLAB_BYTES = 64 * 1024**2
"""A power of two: the allocator of pinned memory rounds up to one, for a large storage to nearly twice its size."""


class HostMemory:
    """Bytes of host memory, pinned where there is a GPU: slabs that are filled one after the other."""

    def __init__(self) -> None:
        self._slabs: list[Tensor] = []
        self._used = 0

    def take(self, size: int) -> list[Tensor]:
        """`size` bytes, in one or several pieces."""
        taken = []
        while size:
            slab, first = divmod(self._used, SLAB_BYTES)
            if slab == len(self._slabs):
                self._slabs.append(torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
            taken.append(self._slabs[slab][first : first + size])
            self._used += taken[-1].numel()
            size -= taken[-1].numel()
        return taken

    def rewind(self) -> None:
        """Nothing that was taken is used any more. Pinned slabs are kept: pinning takes long."""
        self._used = 0
        if not torch.cuda.is_available():
            self._slabs.clear()


def pairs(host: list[Tensor], storage: torch.UntypedStorage) -> Iterator[tuple[Tensor, Tensor]]:
    """Each piece of host memory with the bytes of the device's storage that belong to it."""
    there = storage_bytes(storage).split([piece.numel() for piece in host])
    return zip(host, there, strict=True)
