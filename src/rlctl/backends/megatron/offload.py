"""Weights and optimizer in host memory while the engines generate: a device's memory is free for their caches.

The storages themselves are emptied and refilled, so every view of them (parameters in buffers, the optimizer's parts of
them, the frozen reference) stays what it is. On a CPU the host memory is the same memory; there it only costs time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlctl.backends.megatron.optimizer import inner_optimizers


class Offloaded:
    """What a policy holds of its device in host memory, from construction until `restore`."""

    def __init__(
        self, chunks: list[Any], optimizer: Any, more: Iterable[Tensor] = (), *, keep_weights: bool = False
    ) -> None:
        """`more`: further tensors to move, such as those of a reference policy. `keep_weights`: those of the model stay
        where they are, to be read."""
        self.device_bytes = 0
        """What the device's allocator gave back; without one, the size of the storages."""
        cuda = torch.cuda.is_available()
        before = torch.cuda.memory_reserved() if cuda else 0
        gradients = _storages(buffer.grad_data for buffer in _buffers(chunks))
        weights = _storages(_weights(chunks))
        staying = gradients.keys() | (weights.keys() if keep_weights else set())
        kept = weights | _storages([*_optimizer_tensors(optimizer), *more])
        self._kept = [(storage, _to_host(storage)) for key, storage in kept.items() if key not in staying]
        self._gradients = [(storage, storage.nbytes()) for storage in gradients.values()]
        for storage in [*(storage for storage, _ in self._kept), *gradients.values()]:
            self.device_bytes += storage.nbytes()
            storage.resize_(0)
        if cuda:
            torch.cuda.empty_cache()
            self.device_bytes = before - torch.cuda.memory_reserved()

    def restore(self) -> None:
        """Everything back where it was; gradients are zero."""
        for storage, host in self._kept:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        for storage, size in self._gradients:
            storage.resize_(size)
            _bytes(storage).zero_()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._kept, self._gradients = [], []


def _buffers(chunks: list[Any]) -> Iterator[Any]:
    for chunk in chunks:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def _weights(chunks: list[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        for value in (*chunk.module.parameters(), *chunk.module.buffers()):
            yield value.data
    yield from (buffer.param_data for buffer in _buffers(chunks) if buffer.param_data is not None)


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """States and, in bfloat16, the float32 weights that they belong to."""
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            yield from (param.data for param in group["params"])
        for state in inner.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Each storage once, by its address; empty ones left out. On a machine with GPUs those on a GPU."""
    cuda = torch.cuda.is_available()
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.is_cuda == cuda)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> Tensor:
    cuda = torch.cuda.is_available()
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=cuda)
    return host.copy_(_bytes(storage))
