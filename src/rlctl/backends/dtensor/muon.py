"""Muon on FSDP2's shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlctl.backends.base import PolicySpec
from rlctl.backends.dtensor.tensor_parallel import local_part
from rlctl.backends.muon import Divided, Muon
from rlctl.models.families import weights_of
from rlctl.models.matrices import Matrix, Role
from rlctl.weights.dtensor import DTensorWorld
from rlctl.weights.hidden_matrices import MatrixPart, hidden_matrices, owners_of, parts_of_params


def use_muon(optimizer: Any, spec: PolicySpec, world: DTensorWorld, rank: int, inner: nn.Module) -> None:
    """Have Muon update the hidden matrices of transformers' modules `inner`. Collective."""
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    named = {name: param for name, param in inner.named_parameters() if id(param) in trained}
    matrices = list(_matrices(world, inner, set(named)))
    holders = {m.tensor: sorted({r for shard in world.shards(m.tensor) for r in shard.ranks}) for m in matrices}
    owners = owners_of(matrices, lambda matrix: holders[matrix.tensor])
    dtype = torch.float32 if spec.dtype == "float32" else torch.bfloat16
    held = list(_held(world, rank, named, matrices))
    Muon(optimizer, spec.optimizer, Divided(matrices, owners, torch.distributed.group.WORLD), held, dtype)


def _matrices(world: DTensorWorld, inner: nn.Module, trained: set[str]) -> Iterator[Matrix]:
    """Yield the trained hidden matrices. Of a family without a file these are the weights of linear layers, and
    stacked experts."""
    linear = {f"{path}.weight" for path, module in inner.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    for matrix in hidden_matrices(weights_of(world.facts).matrices):
        params = {piece.param for piece in world.modules.by_tensor.get(matrix.tensor, ())}
        if params and params <= trained and (matrix.role is not Role.OTHER or params <= linear):
            yield matrix


def _held(
    world: DTensorWorld, rank: int, named: dict[str, nn.Parameter], matrices: list[Matrix]
) -> Iterator[tuple[Tensor, list[MatrixPart]]]:
    layout = world.layout(rank)
    parts = parts_of_params(layout, matrices)
    whole = {piece.param for matrix in matrices for piece in world.modules.by_tensor[matrix.tensor]}
    for name in whole & named.keys():
        assert local_part(named[name]).numel() == layout.params[name].size, name
    # A rank without elements of a parameter leaves its (empty) part to Muon as well.
    for name, param in named.items():
        if name in whole:
            yield param, parts.get(name, [])
