"""Weights and optimizer in host memory while the engines generate: a device's memory is free for their caches.

The storages themselves are emptied and refilled, so every view of them (parameters in buffers, the optimizer's parts of
them, the frozen reference) stays what it is. On a CPU the host memory is the same memory; there it only costs time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlctl.backends.megatron.host_memory import HostMemory, pairs
from rlctl.backends.megatron.optimizer import inner_optimizers
from rlctl.backends.megatron.storages import (
    buffers_of,
    gradient_storages,
    refill_with_zeros,
    storages_of,
)


class Offloaded:
    """What a policy holds of its device in host memory, from construction until `restore`."""

    def __init__(
        self,
        chunks: list[Any],
        optimizer: Any,
        memory: HostMemory,
        more: Iterable[Tensor] = (),
        *,
        keep_weights: bool = False,
    ) -> None:
        """`memory` is where it goes. `more`: further tensors to move, such as those of a reference policy.
        `keep_weights`: those of the model stay where they are, to be read."""
        self.device_bytes = 0
        """What the device's allocator gave back; without one, the size of the storages."""
        cuda = torch.cuda.is_available()
        before = torch.cuda.memory_reserved() if cuda else 0
        forget_float8_copies(chunks)
        gradients = gradient_storages(chunks)
        weights = storages_of(_weights(chunks))
        staying = gradients.keys() | (weights.keys() if keep_weights else set())
        kept = weights | storages_of([*_optimizer_tensors(optimizer), *more])
        self._kept = [(one, memory.take(one.nbytes())) for key, one in kept.items() if key not in staying]
        for storage, host in self._kept:
            for piece, there in pairs(host, storage):
                piece.copy_(there, non_blocking=True)
        if cuda:
            torch.cuda.synchronize()
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
            storage.resize_(sum(piece.numel() for piece in host))
            for piece, there in pairs(host, storage):
                there.copy_(piece, non_blocking=True)
        refill_with_zeros(self._gradients)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._kept, self._gradients = [], []


def forget_float8_copies(chunks: list[Any]) -> None:
    """TransformerEngine's modules hold what they made of their weights for the micro-batches of a step, and make it
    anew where it is gone (`get_weight_workspace` of transformer_engine/pytorch/module/base.py)."""
    for chunk in chunks:
        for module in chunk.modules():
            getattr(module, "_fp8_workspaces", {}).clear()


def _weights(chunks: list[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        for value in (*chunk.module.parameters(), *chunk.module.buffers()):
            yield value.data
    yield from (buffer.param_data for buffer in buffers_of(chunks) if buffer.param_data is not None)


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """States and, in bfloat16, the float32 weights that they belong to; empty where `host_states` has them."""
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            yield from (param.data for param in group["params"])
        for state in inner.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
