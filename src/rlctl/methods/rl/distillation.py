"""On-policy distillation: the policy learns from a teacher's probabilities on its own rollouts.

    sampled   GRPO's loss, with A = weight * sg[log teacher - log pi_old] + reward_weight * A(rewards) of each token
    top-k     weight * (s KL(teacher || pi) + (1 - s) KL(pi || teacher)) + reward_weight * GRPO's loss; s: forward_share

`sampled` is the policy gradient of the reverse KL divergence KL(pi || teacher), estimated by the token that was
sampled, with the outcome's advantage added: MiMo-V2-Flash (arXiv 2601.02780). A token is held to account for itself
and not for those that follow, as there.

`top-k` compares the two distributions at each position over the K tokens that are most likely for the teacher
(on-policy generalised knowledge distillation, arXiv 2306.13649, over part of the vocabulary). Probabilities of the
other tokens are left out (`renormalize`: both distributions are those of the K tokens alone), or are one further event
(`tail`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import model_validator

from rlctl.backends.batching.batch import TokenBatch
from rlctl.config.section import NonNegativeNumber
from rlctl.data.rollouts import RolloutGroup
from rlctl.methods.divergences import OF_TOP, TopTokens, divergence, of_top, require_normalized
from rlctl.methods.rl.grpo import Grpo
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.telemetry.metrics import Metric

if TYPE_CHECKING:
    import torch

TEACHER_KL = Metric("teacher_kl", "mean", curve="KL(policy || teacher)", column="teach", form=".3f")
"""The mean of log pi - log teacher over the sampled tokens, which is unbiased for that divergence of the next token."""


class DistillationConfig(TopTokens):
    """The loss of `--algorithm distillation`. Keys of the most likely tokens apply to `loss=top-k`."""

    loss: Literal["sampled", "top-k"] = "sampled"
    """Form of the divergence: `sampled` takes log teacher - log policy of the chosen token as its advantage (reverse
    KL), and `top-k` compares the distributions over the teacher's `top_k` most likely tokens."""
    reward_weight: NonNegativeNumber = 0.0
    """Weight of the advantages of the rewards, which are added; with 0 rewards are shown, if there are any, and not
    learned from."""


class DistillationRlConfig(RlConfig):
    """The configuration of `--algorithm distillation`."""

    distillation: DistillationConfig = DistillationConfig()

    @property
    def whitens_penalties(self) -> bool:
        """Advantages are whitened before the teacher adds to them."""
        return False

    @property
    def learns_from_rewards(self) -> bool:
        return self.distillation.reward_weight > 0

    @model_validator(mode="after")
    def validate_mixture(self) -> DistillationRlConfig:
        require_normalized(self.teacher.mix, self.distillation)
        if self.teacher.mix == "divergences" and self.distillation.loss == "sampled":
            raise ValueError(
                "teacher.mix = divergences compares distributions, and distillation.loss = sampled one token, where "
                "teacher.mix = log-probs is the weighted mean of the divergences; or choose distillation.loss = top-k"
            )
        return self

    @model_validator(mode="after")
    def validate_no_critic(self) -> DistillationRlConfig:
        if self.has_critic:
            raise ValueError("advantage.baseline = critic learns from rewards, and distillation learns from a teacher")
        return self


class Distillation(Grpo):
    """GRPO's loss with a teacher's log-probs in its advantages, or next to it."""

    Config = DistillationRlConfig
    config: DistillationRlConfig
    requires = frozenset({"teacher_logprobs"})
    needs_old_logprobs = True

    def __init__(self, config: DistillationRlConfig) -> None:
        super().__init__(config)
        self.metrics = (TEACHER_KL, *(OF_TOP if self.teacher_top else ()), *self.metrics)

    @property
    def teacher_top(self) -> int:
        return self.config.distillation.top_k if self.config.distillation.loss == "top-k" else 0

    @property
    def learns_without_advantage(self) -> bool:
        """The teacher scores every token, for any reward."""
        return True

    def batch_advantages(self, groups: Sequence[RolloutGroup]) -> list[np.ndarray]:
        """Return the weighted advantages of the rewards, where they are learned from."""
        weight = self.config.distillation.reward_weight
        if not weight:
            return [np.zeros(len(group.rollouts)) for group in groups]
        return [weight * advantages_G for advantages_G in super().batch_advantages(groups)]

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        """Return GRPO's loss, with the divergence over the teacher's most likely tokens where that is the loss."""
        loss_R = super().token_loss(batch)
        return (
            loss_R + self.config.distillation.weight * divergence(batch, self.config.distillation)
            if self.teacher_top
            else loss_R
        )

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        """Return how far the policy is from the teacher, and what GRPO measures."""
        from rlctl.methods.rl.losses import old_full_logprobs

        metrics = {"teacher_kl": old_full_logprobs(batch) - _of_teacher(batch), **super().measure(batch)}
        if self.teacher_top:
            metrics |= of_top(batch, self.config.distillation)
        return metrics

    def _with_penalised_advantages(self, batch: TokenBatch) -> TokenBatch:
        from rlctl.methods.rl.losses import old_full_logprobs

        batch = super()._with_penalised_advantages(batch)
        if self.teacher_top:
            return batch
        gain_R = (_of_teacher(batch) - old_full_logprobs(batch)).detach()
        return replace(batch, advantages_R=batch.advantages_R + self.config.distillation.weight * gain_R)


def _of_teacher(batch: TokenBatch) -> torch.Tensor:
    assert batch.teacher_logprobs_R is not None  # `requires` has them
    return batch.teacher_logprobs_R
