"""Muon on Megatron's distributed optimizer, whose ranks hold ranges of flattened parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from rlctl.backends.base import PolicySpec
from rlctl.backends.megatron.checkpoint import blocks_of_range
from rlctl.backends.megatron.optimizer import inner_optimizers
from rlctl.backends.muon import Divided, Muon
from rlctl.models.matrices import Matrix
from rlctl.weights.hidden_matrices import MatrixPart, hidden_matrices, owners_of, parts_of_params
from rlctl.weights.layout import View
from rlctl.weights.megatron import MegatronWorld


def use_muon(optimizer: Any, spec: PolicySpec, world: MegatronWorld, rank: int, named: Mapping[str, Tensor]) -> None:
    """Have Muon update the hidden matrices of an optimizer. `named`: parameters by their names in the layout.
    Collective."""
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)  # a pipeline stage
    assert not isinstance(group, int)  # Megatron's type includes -1, for a rank without a group
    ranks = torch.distributed.get_process_group_ranks(group)
    stage = rank // world.parallel.stage_size
    matrices = [m for layer in world.layers_of(stage) for m in hidden_matrices(world.weights.layer(layer))]
    # Megatron has a second optimizer where experts have other data-parallel ranks than the rest.
    apart = any(_of_experts(param) for param in named.values())
    for inner in inner_optimizers(optimizer):
        experts = any(_of_experts(param) for buffer in inner.buffers for param in buffer.params)
        updated = [m for m in matrices if (m.expert is not None and apart) == experts]
        holders = {m.tensor: sorted({r for shard in world.shards(m.tensor) for r in shard.ranks}) for m in updated}
        owners = [ranks.index(owner) for owner in owners_of(updated, lambda m, holders=holders: holders[m.tensor])]
        held = list(_held(inner, world, rank, named, updated))
        dtype = torch.float32 if spec.dtype == "float32" else torch.bfloat16
        Muon(inner.optimizer, spec.optimizer, Divided(updated, owners, group), held, dtype)


def _of_experts(param: Tensor) -> bool:
    return not getattr(param, "allreduce", True)


def _held(
    inner: Any, world: MegatronWorld, rank: int, named: Mapping[str, Tensor], matrices: list[Matrix]
) -> Iterator[tuple[Tensor, list[MatrixPart]]]:
    """Yield this rank's range of each parameter, as the inner optimizer has it, and the parts of matrices in it."""
    parts = parts_of_params(world.layout(rank), matrices)
    for name, param in named.items():
        if parts.get(name) and param in inner.model_param_group_index_map:
            group, order = inner.model_param_group_index_map[param]
            span = inner._get_model_param_range_map(param)["param"]
            blocks = [block for part in parts[name] for block in _in_range(part, span.start, span.end)]
            yield inner.optimizer.param_groups[group]["params"][order], blocks


def _in_range(part: MatrixPart, first: int, last: int) -> Iterator[MatrixPart]:
    """Yield the blocks of `part` among elements `first` to `last` of the flattened parameter."""
    view = part.view
    assert view.strides == (view.shape[1], 1) or view.shape[0] == 1, "parts of Megatron's parameters are whole rows"
    begin, end = max(first, view.offset), min(last, view.offset + view.shape[0] * view.shape[1])
    for (row, column), (rows, columns) in blocks_of_range(view.shape, begin - view.offset, end - view.offset):
        yield MatrixPart(
            part.matrix, part.row + row, part.column + column, View(begin - first, (rows, columns), (columns, 1))
        )
        begin += rows * columns
