"""The policy-gradient loss of PPO and GRPO over sampled tokens, and the metrics that come with it.

Suffix T: one element for each token that the policy chose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlctl.backends.base import LossOutput, TokenBatch
from rlctl.config.schema import GrpoConfig
from rlctl.rl.corrections import ImportanceCorrection, importance_weights
from rlctl.rl.kl import LOG_RATIO_LIMIT, KlEstimator, k3, kl_penalty


def clipped_surrogate(
    ratio_T: torch.Tensor,
    advantages_T: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """Loss of each token [T]: the negative clipped surrogate objective of PPO.

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO (arXiv 1707.06347, equation 7) with separate bounds (DAPO's
    clip-higher, arXiv 2503.14476, section 3.1). `dual_clip` c > 1 bounds the loss of a token with A < 0 at -c A
    (dual-clip PPO, arXiv 1912.09729, equation 5), since r A has no bound there.
    """
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    objective_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    if dual_clip is not None:
        bounded_T = torch.maximum(objective_T, dual_clip * advantages_T)
        objective_T = torch.where(advantages_T < 0, bounded_T, objective_T)
    return -objective_T


def is_clipped(
    ratio_T: torch.Tensor,
    advantages_T: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """Which tokens a bound keeps from moving the policy, bool [T]: those whose surrogate has no gradient for it."""
    above_T = (advantages_T > 0) & (ratio_T > 1 + clip_high)
    below_T = (advantages_T < 0) & (ratio_T < 1 - clip_low)
    clipped_T = above_T | below_T
    if dual_clip is not None:
        clipped_T = clipped_T | ((advantages_T < 0) & (ratio_T > dual_clip))
    return clipped_T


def policy_ratio(logprobs_T: torch.Tensor, old_logprobs_T: torch.Tensor) -> torch.Tensor:
    """pi / pi_old of each token [T], with gradient; the log-ratio is clamped to +-`LOG_RATIO_LIMIT`."""
    return (logprobs_T - old_logprobs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True)
class GrpoLoss:
    """A `TokenLoss`: sum over tokens of weight * (w * clipped surrogate + kl_coefficient * KL penalty).

    w corrects for the engine's sampling distribution (`corrections`). It does not weigh the KL penalty, which is to
    hold the policy also on tokens that the correction masks. All normalisation is in the token weights.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k3"
    importance_correction: ImportanceCorrection = "truncated"
    importance_cap: float = 2.0

    @classmethod
    def from_config(cls, grpo: GrpoConfig) -> GrpoLoss:
        """The loss that the `grpo` section describes."""
        return cls(
            clip_low=grpo.clip_low,
            clip_high=grpo.clip_high,
            dual_clip=grpo.dual_clip,
            kl_coefficient=grpo.kl_coefficient,
            kl_estimator=grpo.kl_estimator,
            importance_correction=grpo.importance_correction,
            importance_cap=grpo.importance_cap,
        )

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Loss and metrics of one micro-batch; `run_loss.loss_metrics` turns the sums of a mini-batch into means.

        Without `old_logprobs_T` the current policy is taken as the old one: the ratio is 1 and its gradient that of the
        log-prob, which is exact for the first optimizer step after sampling.
        """
        old_T = batch.logprobs_T.detach() if batch.old_logprobs_T is None else batch.old_logprobs_T
        ratio_T = policy_ratio(batch.logprobs_T, old_T)
        surrogate_T = clipped_surrogate(ratio_T, batch.advantages_T, self.clip_low, self.clip_high, self.dual_clip)
        weights_T = importance_weights(old_T, batch.rollout_logprobs_T, self.importance_correction, self.importance_cap)
        loss_T = weights_T * surrogate_T
        if self.kl_coefficient:
            if batch.reference_logprobs_T is None:
                raise ValueError("grpo.kl_coefficient needs the reference policy's log-probs, and the batch has none")
            loss_T = loss_T + self.kl_coefficient * kl_penalty(
                batch.logprobs_T, batch.reference_logprobs_T, self.kl_estimator
            )
        # Left-out tokens have weight 0; where() also keeps an infinite value of theirs from becoming 0 * inf.
        loss = torch.where(batch.loss_mask_T, batch.token_weights_T * loss_T, 0.0).sum()
        return self._with_metrics(loss, batch, old_T.detach(), ratio_T.detach(), weights_T)

    @torch.no_grad()
    def _with_metrics(
        self,
        loss: torch.Tensor,
        batch: TokenBatch,
        old_T: torch.Tensor,
        ratio_T: torch.Tensor,
        weights_T: torch.Tensor,
    ) -> LossOutput:
        """The loss with its sums (over tokens) and maxima."""
        logprobs_T = batch.logprobs_T.detach()
        mask_T = batch.loss_mask_T
        # Trainer against engine under the weights that sampled: what differs is arithmetic, not training.
        log_ratio_T = torch.where(mask_T, old_T - batch.rollout_logprobs_T, 0.0)
        difference_T = log_ratio_T.abs()
        clipped_T = is_clipped(ratio_T, batch.advantages_T, self.clip_low, self.clip_high, self.dual_clip)
        columns_T = {
            "tokens": torch.ones_like(logprobs_T),
            "kl": self._kl_metric(batch, logprobs_T),
            "entropy": batch.entropy_T,
            "clip_fraction": clipped_T.to(logprobs_T.dtype),
            "ratio": ratio_T,
            "logprob_diff": difference_T,
            "engine_kl": k3(log_ratio_T),
            "prob_error": difference_T.clamp(max=LOG_RATIO_LIMIT).exp(),
            "importance_weight": weights_T,
            "importance_limited": self._is_limited(weights_T).to(logprobs_T.dtype),
        }
        sums = {name: torch.where(mask_T, column_T, 0.0).sum() for name, column_T in columns_T.items()}
        maxima = {"ratio": torch.where(mask_T, ratio_T, 0.0).max(), "logprob_diff": difference_T.max()}
        return LossOutput(loss=loss, sums=sums, maxima=maxima)

    def _is_limited(self, weights_T: torch.Tensor) -> torch.Tensor:
        """Which tokens the correction truncates or masks, bool [T]."""
        match self.importance_correction:
            case "truncated":
                return weights_T >= self.importance_cap
            case "masked":
                return weights_T == 0
        return torch.zeros_like(weights_T, dtype=torch.bool)

    def _kl_metric(self, batch: TokenBatch, logprobs_T: torch.Tensor) -> torch.Tensor:
        """Estimate of each token [T]: KL(policy || reference) with a reference, else KL(engine || policy).

        The former by the penalty's estimator, the latter by k3 with the engine as the sampling distribution.
        """
        if batch.reference_logprobs_T is not None:
            return kl_penalty(logprobs_T, batch.reference_logprobs_T, self.kl_estimator)
        return k3(logprobs_T - batch.rollout_logprobs_T)
