"""A policy's rank with room for a critic next to it, and the critic's own rank, whatever backend trains.

The critic is a second model in the policy's process and process groups. Its rows are the policy's, so that each sees
the columns that the other adds.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rlctl.backends.base import CriticSpec
from rlctl.backends.batch import AdvantageEstimate, BatchShard, Fetch, MinibatchResult, ValueLoss
from rlctl.backends.policy_rank import PolicyRank
from rlctl.backends.results import add_advantages
from rlctl.backends.rows import PackedRow
from rlctl.errors import WorkerError

CRITIC = "critic"
"""The critic's part of a checkpoint, a directory inside of the policy's."""


class RankWithCritic(PolicyRank):
    """The base of policy workers that can have a critic; methods as in `PolicyWorker` and `CriticWorker`."""

    critic: ValueRank | None = None

    # --- what a backend does, to one model

    @abstractmethod
    def new_critic(self, critic: CriticSpec) -> ValueRank:
        """Build the critic in the process groups that this rank has joined."""

    @abstractmethod
    def load_weights(self, directory: Path) -> None:
        """Fill the weights of the model."""

    @abstractmethod
    def offload(self, keep_weights: bool) -> int:
        """`sleep` of the model alone."""

    @abstractmethod
    def trained_not_finite(self) -> list[str]:
        """List the trained parameters with a value that is not finite."""

    @abstractmethod
    def load_checkpoint(self, directory: Path) -> None:
        """Read what `begin_save` wrote."""

    # --- both models

    def build_critic(self) -> None:
        """To be called at the end of `build`. With turns on the device, the critic is built where the policy was, and
        waits from here on."""
        self.critic, critic = None, self.spec.critic
        if critic is None:
            return
        if critic.offload:
            self.sleep()
        self.critic = self.new_critic(critic)
        if critic.offload:
            self.critic.sleep()
            self.wake()

    def load_model(self, directory: Path | str) -> None:
        self.load_weights(Path(directory))
        if self.critic is not None:
            with self._critics_turn():
                self.critic.load_model(directory)

    def sleep(self, keep_weights: bool = False) -> int:
        """The bytes returned include those of an earlier `sleep` that kept the weights. A critic that does not take
        turns with the policy sleeps whenever it does."""
        of_critic = self.critic.sleep() if self.critic is not None and not self.critic.offloads else 0
        return of_critic + self.offload(keep_weights)

    def wake(self) -> None:
        super().wake()
        if self.critic is not None and not self.critic.offloads:
            self.critic.wake()

    def load_batch(self, shard: BatchShard, fetch: Fetch) -> None:
        super().load_batch(shard, fetch)
        if self.critic is not None:
            self.critic.share_rows(self)

    def share_rows(self, other: PolicyRank) -> None:
        """Work on the rows of another model from here on."""
        self._rows = other._rows

    def parameters_not_finite(self) -> list[str]:
        odd = self.trained_not_finite()
        if self.critic is not None:
            with self._critics_turn():
                odd += [f"{CRITIC}: {name}" for name in self.critic.parameters_not_finite()]
        return odd

    def save_begin(self, directory: Path | str) -> None:
        super().save_begin(directory)
        if self.critic is not None:
            place = Path(directory, CRITIC)
            place.mkdir(exist_ok=True)  # each rank makes sure of it
            with self._critics_turn():
                self.critic.save_begin(place)

    def save_written(self) -> bool:
        return super().save_written() and (self.critic is None or self.critic.save_written())

    def save_finish(self) -> dict[str, str]:
        digests = super().save_finish()
        if self.critic is not None:
            digests |= {f"{CRITIC}/{name}": digest for name, digest in self.critic.save_finish().items()}
        return digests

    def load_saved(self, directory: Path | str) -> None:
        self.load_checkpoint(Path(directory))
        if self.critic is not None:
            with self._critics_turn():
                self.critic.load_saved(Path(directory, CRITIC))

    # --- the critic

    def critic_begin(self) -> None:
        if self._value_rank().offloads:
            self.sleep()
            self._value_rank().wake()

    def critic_end(self) -> None:
        if self._value_rank().offloads:
            self._value_rank().sleep()
            self.wake()

    @contextlib.contextmanager
    def _critics_turn(self) -> Iterator[None]:
        self.critic_begin()
        yield
        self.critic_end()

    def estimate(self, estimate: AdvantageEstimate) -> None:
        self._value_rank().estimate(estimate)

    def train_critic(
        self, index: int, loss: ValueLoss, lr: float, weight_decay: float | None = None
    ) -> MinibatchResult | None:
        return self._value_rank().train_critic(index, loss, lr, weight_decay)

    def _value_rank(self) -> ValueRank:
        if self.critic is None:
            raise WorkerError("This policy was started without a critic.")
        return self.critic


class ValueRank(RankWithCritic):
    """One rank of a critic, whose model puts out values: the base of a backend's critic, before its policy worker. It
    trains, sleeps, saves and loads as a policy does."""

    def __init__(self, policy: RankWithCritic, critic: CriticSpec) -> None:
        """The policy has joined its process groups."""
        spec = replace(policy.spec, optimizer=critic.optimizer, critic=None, router_replay=False)
        super().__init__(policy.rank, policy.world_size, policy.master_addr, spec)
        self.device, self.offloads = policy.device, critic.offload

    def estimate(self, estimate: AdvantageEstimate) -> None:
        with self.under_weights_of("old_logprobs"):
            self.add_column("values")
        rows = self._all_rows()
        if all("values" in row.columns_R for row in rows):  # the last pipeline stage alone has them
            add_advantages(rows, estimate, self.data_group)

    def train_critic(
        self, index: int, loss: ValueLoss, lr: float, weight_decay: float | None = None
    ) -> MinibatchResult | None:
        return self.train_on(index, loss, PackedRow.value_batch, lr, weight_decay)
