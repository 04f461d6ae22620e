"""The forward step that Megatron's schedules call, for packed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from rlctl.backends.megatron.attention import row_params, zigzag
from rlctl.backends.megatron.routing import Replay, hand_out
from rlctl.backends.megatron.rows import PackedRow

LossOf = Callable[[PackedRow, Tensor], tuple[Tensor, dict[str, Any]]]


def forward_step(
    loss_of: LossOf, replays: Mapping[int, list[Replay]]
) -> Callable[[Iterator[PackedRow], Any], tuple[Tensor, Callable]]:
    """A forward step for `get_forward_backward_func`: (row iterator, model) -> (output, its loss function).

    `loss_of` gets the row and the model's float32 [2, C] output; what it returns beside the loss is collected.
    `replays`: with router replay, what the routers of each model chunk are told, by the chunk's `id`.
    """

    def step(rows: Iterator[PackedRow], model: Any) -> tuple[Tensor, Callable]:
        row = next(rows)
        size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        params = row_params(row, size, rank)
        tokens_T, routing_TLK = row.tokens_T, row.routing_TLK
        if size > 1:
            own_T = torch.from_numpy(zigzag(len(tokens_T), size, rank)).to(tokens_T.device)
            tokens_T, routing_TLK = tokens_T[own_T], None if routing_TLK is None else routing_TLK[own_T]
        if own := replays.get(id(model)):
            hand_out(own, routing_TLK, get_model_config(model))
        output = model(tokens_T[None], None, None, packed_seq_params=params)

        def loss_function(out: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            loss, collected = loss_of(row, out)
            # Megatron wants a token count, by which `finalize_without_scaling` does not divide.
            return loss, torch.ones((), dtype=torch.int, device=out.device), collected

        return output, loss_function

    return step
