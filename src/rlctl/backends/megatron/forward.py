"""The forward step that Megatron's schedules call, for packed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from rlctl.backends.megatron.attention import row_params, zigzag
from rlctl.backends.megatron.rows import PackedRow

LossOf = Callable[[PackedRow, Tensor], tuple[Tensor, dict[str, Any]]]


def forward_step(loss_of: LossOf) -> Callable[[Iterator[PackedRow], Any], tuple[Tensor, Callable]]:
    """A forward step for `get_forward_backward_func`: (row iterator, model) -> (output, its loss function).

    `loss_of` gets the row and the model's float32 [2, C] output; what it returns beside the loss is collected.
    """

    def step(rows: Iterator[PackedRow], model: Any) -> tuple[Tensor, Callable]:
        row = next(rows)
        size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        params = row_params(row, size, rank)
        tokens_T = row.tokens_T
        if size > 1:
            tokens_T = tokens_T[torch.from_numpy(zigzag(len(tokens_T), size, rank)).to(tokens_T.device)]
        output = model(tokens_T[None], None, None, packed_seq_params=params)

        def loss_function(out: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            loss, collected = loss_of(row, out)
            # Megatron wants a token count, by which `finalize_without_scaling` does not divide.
            return loss, torch.ones((), dtype=torch.int, device=out.device), collected

        return output, loss_function

    return step
