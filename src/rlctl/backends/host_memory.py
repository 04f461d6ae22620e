"""Device memory released for a while: storages are emptied and their bytes kept in host memory, so all views stay
valid. On a CPU this only costs time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

SLAB_BYTES = 64 * 1024**2
"""A power of two: the allocator of pinned memory rounds up to one, for a large storage to nearly twice its size."""


class HostMemory:
    """Host memory in slabs, pinned with a GPU, filled in sequence."""

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


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return each storage once, by its address, without empty ones. On a machine with GPUs only storages on a GPU."""
    cuda = torch.cuda.is_available()
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.is_cuda == cuda)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def storage_bytes(storage: torch.UntypedStorage) -> Tensor:
    """uint8 [bytes], a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Offloaded:
    """Tensors that are off their device from construction until `restore`."""

    def __init__(self, kept: Iterable[Tensor], zeroed: Iterable[Tensor], memory: HostMemory) -> None:
        """Copy the bytes of `kept` into `memory`; `zeroed` come back as zeros."""
        self.device_bytes = 0
        """The bytes that the device's allocator gave back; without one, the size of the storages."""
        cuda = torch.cuda.is_available()
        before = torch.cuda.memory_reserved() if cuda else 0
        self._zeroed = [(storage, storage.nbytes()) for storage in storages_of(zeroed).values()]
        self._kept = [(storage, memory.take(storage.nbytes())) for storage in storages_of(kept).values()]
        for storage, host in self._kept:
            for piece, there in pairs(host, storage):
                piece.copy_(there, non_blocking=True)
        if cuda:
            torch.cuda.synchronize()
        for storage, _ in [*self._kept, *self._zeroed]:
            self.device_bytes += storage.nbytes()
            storage.resize_(0)
        if cuda:
            torch.cuda.empty_cache()
            self.device_bytes = before - torch.cuda.memory_reserved()

    def restore(self) -> None:
        """Bring everything back where it was."""
        for storage, host in self._kept:
            storage.resize_(sum(piece.numel() for piece in host))
            for piece, there in pairs(host, storage):
                there.copy_(piece, non_blocking=True)
        refill_with_zeros(self._zeroed)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._kept, self._zeroed = [], []


def refill_with_zeros(sizes: Iterable[tuple[torch.UntypedStorage, int]]) -> None:
    """Emptied storages, each to its bytes."""
    for storage, size in sizes:
        storage.resize_(size)
        storage_bytes(storage).zero_()
