"""The critic of a policy of transformers' modules on one rank: a second model in the policy's process and groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.backends.base import CriticSpec
from rlctl.backends.dtensor.tensor_parallel import local_part
from rlctl.backends.dtensor.worker import DTensorWorker
from rlctl.backends.rank_with_critic import ValueRank
from rlctl.checkpoints.rank_loading import load_moments, load_value_head
from rlctl.weights.dtensor import DTensorWorld

if TYPE_CHECKING:
    from rlctl.backends.dtensor.model import PolicyModel

HEAD = "value_head.weight"
"""The head's name in a checkpoint."""


class ValueWorker(ValueRank, DTensorWorker):
    """A worker whose model is a `ValueModel` of the policy's layout. The head, which no published file holds, begins
    as 0."""

    def __init__(self, policy: DTensorWorker, critic: CriticSpec) -> None:
        """Build the model with random weights."""
        super().__init__(policy, critic)
        self.groups = policy.groups
        self.build_model()

    @property
    def _kind(self) -> type[PolicyModel]:
        from rlctl.backends.dtensor.model import ValueModel

        return ValueModel

    def layouts(self) -> DTensorWorld:
        return replace(super().layouts(), head=False)

    def saved(self) -> dict[str, Tensor]:
        return super().saved() | {HEAD: self.model.get_parameter("head.weight")}

    @torch.no_grad()
    def load_of_megatron(self, directory: Path) -> None:
        from rlctl.backends.dtensor.checkpoint import moments_of, set_steps

        world, stored = self.layouts(), load_value_head(directory)
        self.load_weights(directory, critic=True, masters=True)
        moments = moments_of(self.saved(), self._trainer())
        heads = {name: own.pop(HEAD) for name, own in moments.items()} | {"weight": local_part(self.saved()[HEAD])}
        for name, head in heads.items():
            head.copy_(stored[name][: len(head)])  # of its one row, the first shard has all
        steps = load_moments(directory, world, self.rank, moments, world.facts, critic=True)
        set_steps(self._trainer(), steps)
