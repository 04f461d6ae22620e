"""The critic of a policy on one rank: a second model in the policy's process and process groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlctl.backends.base import CriticSpec
from rlctl.backends.batch import Estimate, MinibatchResult, ValueLoss
from rlctl.backends.megatron.worker import MegatronWorker
from rlctl.checkpoints.rank_loading import load_rank

if TYPE_CHECKING:
    from rlctl.backends.megatron.model import PolicyModel

HEAD = "output_layer.weight"


class ValueWorker(MegatronWorker):
    """A worker whose model is a `ValueModel` of the policy's layout. It trains, sleeps, saves and loads as a policy
    does. Its rows are the policy's, so that each sees the columns that the other adds."""

    def __init__(self, policy: MegatronWorker, critic: CriticSpec) -> None:
        """Build the model with random weights. The policy has joined its process groups."""
        spec = replace(policy.spec, optimizer=critic.optimizer, critic=None, router_replay=False)
        super().__init__(policy.rank, policy.world_size, policy.master_addr, spec)
        self.device, self.offloads = policy.device, critic.offload
        self._replays = {}
        self._build_model()

    @property
    def _kind(self) -> type[PolicyModel]:
        from rlctl.backends.megatron.model import ValueModel

        return ValueModel

    @torch.no_grad()
    def load_model(self, directory: Path | str) -> None:
        """Fill all but the head, which stays 0."""
        world = replace(self.layouts(), head=False)
        params = {name: value.data for name, value in self._named() if name != HEAD}
        load_rank(Path(directory), world, self.rank, params, world.facts)
        self.weights_changed()

    def estimate(self, estimate: Estimate) -> None:
        from rlctl.backends.results import add_advantages

        self._gather_parameters()
        self.add_column("values")
        rows = [row for minibatch in self._rows for row in minibatch]
        if all("values" in row.columns_R for row in rows):  # the last pipeline stage alone has them
            add_advantages(rows, estimate, self.data_group)

    def train_critic(
        self, index: int, loss: ValueLoss, lr: float, weight_decay: float | None = None
    ) -> MinibatchResult | None:
        from rlctl.backends.results import value_batch

        return self.train_on(index, loss, value_batch, lr, weight_decay)
