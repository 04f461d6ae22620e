"""The loss of the built-in algorithms. Each algorithm defines its surrogate.

    loss = w * surrogate(ratio, A) + kl_coefficient * KL(policy || reference) - entropy_coefficient * H(policy)

A is the advantage of the token's rollout, w corrects for the engine's distribution (`losses.py`), and the ratio
is that of the policy to pi_old, the policy before the batch's first optimizer step as the trainer computes it, so that
the clipping bounds what this batch does (the decoupled objective of arXiv 2110.00641, with pi_old as its proximal
policy; arXiv 2505.24298, section 5.2). With `loss.importance_correction=ratio` there is no w, and the ratio is to the
engine's distribution itself. With `loss.kl_in=reward` the KL divergence is in A instead: each token loses the penalties
of itself and of the tokens that follow, before `advantage.whiten` acts. A critic has advantages
those of tokens, and hold these penalties already. Neither penalty nor entropy bonus is weighted by w: they are to hold
the policy also on tokens that a correction masks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rlctl.backends.batching.batch import TokenBatch
from rlctl.methods.rl.advantages import group_advantages
from rlctl.methods.rl.algorithm import Algorithm
from rlctl.methods.rl.rl_config import AlgorithmConfig
from rlctl.telemetry.metrics import Metric

if TYPE_CHECKING:
    import torch


KL = Metric("kl", "mean", curve="KL(policy || reference)", column="kl", form=".2e")


class PolicyGradient(Algorithm):
    """An algorithm with the options of `advantage` and `loss`; a subclass gives `surrogate` and `is_bounded`."""

    metrics = (
        Metric("clip_fraction", "mean", column="clip"),
        Metric("ratio/mean", "mean"),
        Metric("ratio/max", "max"),
        Metric("importance_weight", "mean"),
        Metric("importance_limited", "mean"),
    )

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__(config)
        if "reference_logprobs" in self.needs:
            self.metrics = (KL, *self.metrics)

    @property
    def learns_without_advantage(self) -> bool:
        """Whether there is a term next to the surrogate, which is 0 where the advantage is."""
        own_loss = self.user_loss is not None or type(self).token_loss is not PolicyGradient.token_loss
        if own_loss or self.config.has_critic or self.config.advantage.judges_turns:
            return True  # with a critic, the driver has rewards, which the critic may have expected or not
        loss = self.config.loss
        return loss.kl_coefficient > 0 or loss.entropy_coefficient > 0 or loss.positive_nll_weight > 0

    def advantages(self, rewards_G: np.ndarray) -> np.ndarray:
        """Return the rewards compared within the group."""
        options = self.config.advantage
        return group_advantages(rewards_G, options.baseline, options.normalize_std, options.std_of)

    def advantages_of(self, rewards_P_G: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return `advantages` of each group; groups of one size are computed together."""
        if type(self).advantages is not PolicyGradient.advantages:
            return super().advantages_of(rewards_P_G)
        by_size: dict[int, list[int]] = {}
        for place, rewards_G in enumerate(rewards_P_G):
            by_size.setdefault(len(rewards_G), []).append(place)
        remaining = list(rewards_P_G)
        for places in by_size.values():
            together_PG = self.advantages(np.stack([rewards_P_G[place] for place in places]))
            for place, advantages_G in zip(places, together_PG, strict=True):
                remaining[place] = advantages_G
        return remaining

    def ratio_to_anchor(self, batch: TokenBatch) -> torch.Tensor:
        """Return the ratio [R] to the policy that `loss.importance_correction` asks for."""
        if self.config.loss.importance_correction == "ratio":
            batch = replace(batch, old_logprobs_R=batch.rollout_logprobs_R)
        return self.ratio(batch)

    def ratio(self, batch: TokenBatch) -> torch.Tensor:
        """Return the ratio of the policy to the old one of `batch`, of each token [R], with gradient."""
        from rlctl.methods.rl.losses import LOG_RATIO_LIMIT, old_logprobs

        return (batch.logprobs_R - old_logprobs(batch)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    @abstractmethod
    def surrogate(self, ratio_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return the policy loss of each token [R], which is 0 and has no gradient where the advantage is 0."""

    @abstractmethod
    def is_bounded(self, ratio_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return the tokens on which a bound of the surrogate acts, bool [R]; their share is `clip_fraction`."""

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        """Return the corrected surrogate with the KL penalty and the entropy bonus."""
        import torch

        from rlctl.methods.rl.losses import correction, full_logprobs, kl_penalty, kl_weights, score_term

        o, batch = self.config.loss, self._with_penalised_advantages(batch)
        loss_R = correction(batch, o).weights_R * self.surrogate(self.ratio_to_anchor(batch), batch)
        if o.kl_coefficient and o.kl_in == "loss":
            weights_R = kl_weights(batch, o.kl_weight)
            full_R = full_logprobs(batch)
            penalty_R = kl_penalty(full_R, _reference(batch), o.kl_estimator, o.kl_cap, weights_R)
            if o.kl_score_term:  # a sum over the tokens that follow passes on what is in tokens that are left out
                reference_R = torch.where(batch.counted_R, _reference(batch), full_R.detach())
                penalty_R = penalty_R + score_term(
                    batch.logprobs_R, full_R, reference_R, batch.rollout_R, o.kl_estimator, o.kl_cap
                )
            loss_R = loss_R + o.kl_coefficient * penalty_R
        if o.entropy_coefficient:
            loss_R = loss_R - o.entropy_coefficient * batch.entropy_R
        return loss_R

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        """Return how far the policy is from the one that sampled, and what the bounds of the loss held back."""
        from rlctl.methods.rl.losses import correction, full_logprobs, kl_penalty

        o, batch = self.config.loss, self._with_penalised_advantages(batch)
        ratio_R, corrected = self.ratio_to_anchor(batch), correction(batch, o)
        to_reference = {}
        if "reference_logprobs" in self.needs and batch.reference_logprobs_R is not None:
            to_reference["kl"] = kl_penalty(full_logprobs(batch), batch.reference_logprobs_R, o.kl_estimator)
        return {
            **to_reference,
            "clip_fraction": self.is_bounded(ratio_R, batch),
            "ratio/mean": ratio_R,
            "ratio/max": ratio_R,
            "importance_weight": corrected.weights_R,
            "importance_limited": corrected.limited_R,
        }

    def _with_penalised_advantages(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with the KL divergence of the policy that sampled in its advantages, where it is to be there
        and `PenalizedAdvantages` have not put it there."""
        from rlctl.methods.rl.losses import old_full_logprobs, penalized

        config = self.config
        if not config.penalty_in_reward or config.has_critic or config.whitens_penalties:
            return batch
        advantages_R = penalized(batch.advantages_R, old_full_logprobs(batch), _reference(batch), batch, config.loss)
        return replace(batch, advantages_R=advantages_R)


def _reference(batch: TokenBatch) -> torch.Tensor:
    assert batch.reference_logprobs_R is not None  # `needs` has them
    return batch.reference_logprobs_R
