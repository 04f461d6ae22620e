"""The critic of a Megatron policy on one rank: a second model in the policy's process and process groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.backends.base import CriticSpec
from rlctl.backends.megatron.worker import MegatronWorker
from rlctl.backends.rank_with_critic import ValueRank
from rlctl.checkpoints.rank_loading import load_moments, load_rank, load_value_head
from rlctl.weights.megatron import MegatronWorld

if TYPE_CHECKING:
    from rlctl.backends.megatron.model import PolicyModel

HEAD = "output_layer.weight"


class ValueWorker(ValueRank, MegatronWorker):
    """A worker whose model is a `ValueModel` of the policy's layout."""

    def __init__(self, policy: MegatronWorker, critic: CriticSpec) -> None:
        """Build the model with random weights."""
        super().__init__(policy, critic)
        self._replays = {}
        self._build_model()

    @property
    def _kind(self) -> type[PolicyModel]:
        from rlctl.backends.megatron.model import ValueModel

        return ValueModel

    @torch.no_grad()
    def load_weights(self, directory: Path) -> None:
        """Fill all but the head, which stays 0."""
        world = replace(self.layouts(), head=False)
        params = {name: value.data for name, value in self._named() if name != HEAD}
        load_rank(directory, world, self.rank, params, world.facts)
        self.weights_changed()

    def read_moments(self, directory: Path, world: MegatronWorld, moments: dict[str, dict[str, Tensor]]) -> float:
        stored, world = load_value_head(directory), replace(world, head=False)
        others = {}
        for moment, own in moments.items():
            if HEAD in own:  # the last pipeline stage alone has it
                own[HEAD].copy_(stored[moment])
            others[moment] = {name: value for name, value in own.items() if name != HEAD}
        return load_moments(directory, world, self.rank, others, world.facts, critic=True)

    def read_masters(self, directory: Path, world: MegatronWorld, masters: dict[str, Tensor]) -> None:
        if HEAD in masters:
            masters[HEAD].copy_(load_value_head(directory)["weight"])
        others, world = {name: value for name, value in masters.items() if name != HEAD}, replace(world, head=False)
        load_rank(directory, world, self.rank, others, world.facts, critic=True)
