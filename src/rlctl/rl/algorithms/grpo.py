"""Group relative policy optimization: DeepSeekMath, arXiv 2402.03300.

    A = (r - mean(r)) / std(r)                                    over the group of a prompt
    loss = w * -min(q A, clip(q, 1 - clip_low, 1 + clip_high) A) + kl_coefficient * KL(policy || reference)

q is the ratio of the policy to the one that sampled, and w corrects for the engine's distribution. The options of the
sections `advantage` and `loss` make other published algorithms of it: RLOO's baseline, DAPO's clip-higher and average
over tokens, Dr. GRPO's advantage without the standard deviation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlctl.backends.batch import TokenBatch
from rlctl.config.schema import RlctlConfig
from rlctl.rl.advantages import group_advantages
from rlctl.rl.algorithms.algorithm import Algorithm
from rlctl.telemetry.metrics import Metric

if TYPE_CHECKING:
    import torch

KL = Metric("kl", "mean", curve="KL(policy || reference)", column="kl", form=".2e")


class Grpo(Algorithm):
    """GRPO with the options of the sections `advantage` and `loss`."""

    metrics = (
        Metric("clip_fraction", "mean", column="clip"),
        Metric("ratio/mean", "mean"),
        Metric("ratio/max", "max"),
        Metric("importance_weight", "mean"),
        Metric("importance_limited", "mean"),
    )

    def __init__(self, config: RlctlConfig) -> None:
        super().__init__(config)
        if "reference_logprobs" in self.needs:
            self.metrics = (KL, *self.metrics)

    def advantages(self, rewards_G: np.ndarray) -> np.ndarray:
        """Return the rewards compared with those of the group."""
        options = self.config.advantage
        return group_advantages(rewards_G, options.baseline, options.normalize_std)

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        """Return the clipped surrogate, corrected for the engine's distribution, plus the KL penalty.

        The correction does not weigh the penalty, which is to hold the policy also on tokens that it masks.
        """
        from rlctl.rl.losses import clipped_surrogate, kl_penalty

        o = self.config.loss
        ratio_R, weights_R = self._ratio_and_weights(batch)
        loss_R = weights_R * clipped_surrogate(ratio_R, batch.advantages_R, o.clip_low, o.clip_high, o.dual_clip)
        if not o.kl_coefficient:
            return loss_R
        if batch.reference_logprobs_R is None:
            raise ValueError("loss.kl_coefficient needs the reference policy's log-probs, and the batch has none")
        penalty_R = kl_penalty(batch.logprobs_R, batch.reference_logprobs_R, o.kl_estimator, o.kl_cap)
        return loss_R + o.kl_coefficient * penalty_R

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        """Return how far the policy is from the one that sampled, and what the bounds of the loss held back.

        `kl` estimates KL(policy || reference) by the penalty's estimator, where a reference policy is held.
        """
        from rlctl.rl.losses import is_clipped, is_limited, kl_penalty

        o = self.config.loss
        ratio_R, weights_R = self._ratio_and_weights(batch)
        to_reference = {}
        if "reference_logprobs" in self.needs and batch.reference_logprobs_R is not None:
            to_reference["kl"] = kl_penalty(batch.logprobs_R, batch.reference_logprobs_R, o.kl_estimator)
        return {
            **to_reference,
            "clip_fraction": is_clipped(ratio_R, batch.advantages_R, o.clip_low, o.clip_high, o.dual_clip),
            "ratio/mean": ratio_R,
            "ratio/max": ratio_R,
            "importance_weight": weights_R,
            "importance_limited": is_limited(weights_R, o.importance_correction, o.importance_cap),
        }

    def _ratio_and_weights(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        from rlctl.rl.losses import importance_weights, old_logprobs, policy_ratio

        o, old_R = self.config.loss, old_logprobs(batch)
        weights_R = importance_weights(old_R, batch.rollout_logprobs_R, o.importance_correction, o.importance_cap)
        return policy_ratio(batch.logprobs_R, old_R), weights_R
