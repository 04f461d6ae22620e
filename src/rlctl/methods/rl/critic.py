"""PPO's critic (arXiv 1707.06347): a value model next to the policy, and the advantages that are made of its values.

    r_t = reward of the rollout at its last response token, - kl_coefficient * KL_t with `loss.kl_in=reward`
    d_t = r_t + gamma V_(t + 1) - V_t
    A_t = d_t + gamma lambda A_(t + 1)                             generalized advantage estimation (arXiv 1506.02438)
    R_t = A_t + V_t                                                what the critic learns
    loss = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

t counts the response tokens of a rollout, those that the policy chose: tokens of an environment lie between two of
them and are none. With `advantage.whiten` the advantages of all tokens of the batch, not the returns, then have mean 0
and standard deviation 1. Each token has the weight in this loss that it has in the policy's.

The critic is on the policy's ranks and under its layout, so that values, returns and advantages stay on the ranks. The
driver has rewards, for which `WeightedSequence.advantage` is the place, and sums. `Critic` is the loop's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from rlctl.backends.base import CriticWorker
from rlctl.backends.batching.batch import LossOutput, MinibatchResult, ValueBatch
from rlctl.backends.clients import PolicyClient, only_result
from rlctl.cluster.workers import WorkerGroup
from rlctl.methods.rl.rl_config import AlgorithmConfig
from rlctl.telemetry.metrics import Metric
from rlctl.training.schedule import learning_rate, weight_decay

if TYPE_CHECKING:
    import torch

METRICS = (
    Metric("critic/loss", "mean", curve="loss of the critic", column="v loss", form=".2e"),
    Metric("critic/explained_variance", "mean", curve="explained variance of the returns", column="expl"),
)
"""The metrics of a critic that the terminal and the report show; `critic_metrics` has them all."""


class Critic:
    """The value model of a run: trained on each batch before the policy is."""

    def __init__(self, config: AlgorithmConfig, policy: PolicyClient) -> None:
        """`policy`: its ranks have the critic next to it."""
        self._config, self._policy, self._ranks = config, policy, cast(WorkerGroup[CriticWorker], policy.group)

    def alone(self, step: int) -> bool:
        """Return whether `step` (from 0) trains the critic alone."""
        return step < self._config.critic.warmup_steps

    def train(self, step: int, minibatches: int) -> dict[str, Any]:
        """Give the tokens of the loaded batch their advantages, train on it, and return the metrics."""
        options, steps = self._config.critic, self._config.run.steps
        lr = learning_rate(step, steps, options.lr, options.scheduler)
        decay = weight_decay(step, steps, options.weight_decay, options.scheduler)
        loss, ranks = ClippedValueLoss(options.value_clip, options.loss_weight), self._ranks
        ranks.call(CriticWorker.critic_begin)
        self._policy.estimate(TokenAdvantages(self._config))
        results = [
            only_result(ranks.call(CriticWorker.train_critic, index, loss, lr, decay))
            for _ in range(self._config.batch.epochs)
            for index in range(minibatches)
        ]
        ranks.call(CriticWorker.critic_end)
        return {"critic": {"lr": lr, **critic_metrics(results)}}


@dataclass(frozen=True)
class TokenAdvantages:
    """From values to returns and advantages on the ranks: their `AdvantageEstimate`."""

    config: AlgorithmConfig
    column: str = "values"
    bounds: tuple[None, None] = (None, None)

    @property
    def whitens(self) -> bool:
        return self.config.advantage.whiten

    def __call__(self, batch: ValueBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the return and the advantage of each token of a micro-batch [R]."""
        import torch

        from rlctl.methods.rl.losses import kl_penalty, sums_to_go

        critic, o, values_R, rollout_R = self.config.critic, self.config.loss, batch.values_R, batch.rollout_R
        last_R = torch.ones_like(batch.counted_R)
        last_R[:-1] = rollout_R[1:] != rollout_R[:-1]
        rewards_R = torch.where(last_R, batch.rewards_R, 0.0)
        if self.config.penalty_in_reward:
            assert batch.old_logprobs_R is not None  # `needs` has both
            assert batch.reference_logprobs_R is not None
            penalty_R = kl_penalty(batch.old_logprobs_R, batch.reference_logprobs_R, o.kl_estimator, o.kl_cap)
            rewards_R = rewards_R - o.kl_coefficient * torch.where(batch.counted_R, penalty_R, 0.0)
        following_R = torch.where(last_R, 0.0, values_R.roll(-1))
        errors_R = rewards_R + critic.gamma * following_R - values_R
        advantages_R = sums_to_go(errors_R, rollout_R, critic.gamma * critic.gae_lambda)
        return advantages_R + values_R, advantages_R


@dataclass(frozen=True)
class ClippedValueLoss:
    """The critic's loss on the ranks, and sums for its metrics."""

    clip: float | None
    weight: float = 1.0
    """Factor of the loss; metrics are without it."""

    def __call__(self, batch: ValueBatch) -> LossOutput:
        """Return the loss of one micro-batch."""
        import torch

        assert batch.old_values_R is not None  # `estimate` came before
        assert batch.returns_R is not None
        old_R, returns_R, counted_R = batch.old_values_R, batch.returns_R, batch.counted_R
        loss_R = (batch.values_R - returns_R).square()
        if self.clip is not None:  # as published implementations do (arXiv 2006.05990)
            clipped_R = old_R + (batch.values_R - old_R).clamp(-self.clip, self.clip)
            loss_R = torch.maximum(loss_R, (clipped_R - returns_R).square())
        loss_R = 0.5 * loss_R
        loss = self.weight * torch.where(counted_R, batch.token_weights_R * loss_R, 0.0).sum()
        with torch.no_grad():
            error_R = returns_R - old_R
            moved_R = (batch.values_R - old_R).abs()
            values = {
                "tokens": torch.ones_like(loss_R),
                "loss": loss_R,
                "values": old_R,
                "returns": returns_R,
                "returns_squared": returns_R.square(),
                "errors": error_R,
                "errors_squared": error_R.square(),
                "clipped": (moved_R > self.clip if self.clip is not None else torch.zeros_like(moved_R)),
            }
            sums = {name: torch.where(counted_R, value.double(), 0.0).sum() for name, value in values.items()}
        return LossOutput(loss=loss, sums=sums)


def critic_metrics(results: Sequence[MinibatchResult]) -> dict[str, Any]:
    """Return the metrics over all optimizer steps on a batch.

    `explained_variance` is 1 - Var(R - V) / Var(R) with the values before the step: 1 where they foretell the returns,
    0 where they are no better than a constant. `clip_fraction` is the share of tokens whose value has moved further
    than the clip.
    """
    metrics: dict[str, Any] = {
        "grad_norm": results[-1].grad_norm,
        "skipped_steps": sum(result.skipped for result in results),
    }
    names = {name for result in results for name in result.sums}
    sums = {name: sum(result.sums.get(name, 0.0) for result in results) for name in names}
    if not (tokens := sums.get("tokens", 0.0)):
        return metrics

    def variance(name: str) -> float:
        return sums[f"{name}_squared"] / tokens - (sums[name] / tokens) ** 2

    spread = variance("returns")
    return metrics | {
        "loss": sums["loss"] / tokens,
        "explained_variance": 1 - variance("errors") / spread if spread > 0 else 0.0,
        "clip_fraction": sums["clipped"] / tokens,
        "values_mean": sums["values"] / tokens,
        "returns_mean": sums["returns"] / tokens,
    }
