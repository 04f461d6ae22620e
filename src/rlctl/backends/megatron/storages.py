"""Storages of tensors that are emptied for a while and refilled: every view of them stays what it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def buffers_of(chunks: list[Any]) -> Iterator[Any]:
    """Megatron's buffers of gradients (and parameters) around model chunks, those of experts last."""
    for chunk in chunks:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Each storage once, by its address; empty ones left out. On a machine with GPUs those on a GPU."""
    cuda = torch.cuda.is_available()
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.is_cuda == cuda)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def storage_bytes(storage: torch.UntypedStorage) -> Tensor:
    """uint8 [bytes], a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def gradient_storages(chunks: list[Any]) -> dict[int, torch.UntypedStorage]:
    """Of the buffers that gradients are accumulated in."""
    return storages_of(buffer.grad_data for buffer in buffers_of(chunks))


def refill_with_zeros(sizes: Iterable[tuple[torch.UntypedStorage, int]]) -> None:
    """Emptied storages, each to its bytes."""
    for storage, size in sizes:
        storage.resize_(size)
        storage_bytes(storage).zero_()


@contextlib.contextmanager
def without_gradients(chunks: list[Any]) -> Iterator[None]:
    """Room where the gradients are, which have no meaning between steps; zero afterwards."""
    sizes = [(storage, storage.nbytes()) for storage in gradient_storages(chunks).values()]
    for storage, _ in sizes:
        storage.resize_(0)
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        refill_with_zeros(sizes)
