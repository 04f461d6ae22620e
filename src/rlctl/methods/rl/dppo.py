"""Divergence proximal policy optimization, arXiv 2602.04879.

    D = divergence of the policy from mu, the engine's distribution, of (the chosen token, all others)
    surrogate = -M q A        M = 0 where the policy has left mu in the direction of A by D > bound, else 1

`loss.divergence` is the total variation |pi - mu|, or KL(mu || pi). The bound is `loss.clip_high` for tokens with A > 0
that have become more likely, and `loss.clip_low` for those with A < 0 that have become less likely; 0.15 for the total
variation, and 0.05 for KL. The surrogate's ratio to mu is q = pi / pi_old times the importance weight pi_old / mu,
which the settings leave untruncated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlctl.backends.batching.batch import TokenBatch
from rlctl.config.section import PositiveNumber
from rlctl.methods.rl.policy_gradient import PolicyGradient
from rlctl.methods.rl.rl_config import AlgorithmConfig
from rlctl.methods.rl.sections import PolicyLoss

if TYPE_CHECKING:
    import torch


class DppoLoss(PolicyLoss):
    """The policy loss of DPPO, its KL penalty, and the correction for the engine's numerical differences."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.15
    """Largest divergence of tokens that become less likely."""
    clip_high: PositiveNumber = 0.15
    """Largest divergence of tokens that become more likely."""
    divergence: Literal["tv", "kl"] = "tv"
    """Bounded divergence: total variation, or KL, of the chosen token against all others."""


class DppoConfig(AlgorithmConfig):
    """The configuration of `--algorithm dppo`."""

    loss: DppoLoss = DppoLoss()


class Dppo(PolicyGradient):
    """A surrogate without clipping, on tokens with a distribution close to the sampling one."""

    Config = DppoConfig
    config: DppoConfig
    defaults = {
        "loss.clip_low": 0.15,
        "loss.clip_high": 0.15,
        "loss.divergence": "tv",
        "loss.importance_correction": "untruncated",
    }

    def surrogate(self, ratio_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        import torch

        loss_R = -ratio_R * batch.advantages_R
        return torch.where(self.is_bounded(ratio_R, batch), 0.0, loss_R)

    def is_bounded(self, ratio_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        o, advantages_R, divergence_R = self.config.loss, batch.advantages_R, self.divergence(batch)
        more_likely_R = batch.logprobs_R.detach() > batch.rollout_logprobs_R
        above_R = (advantages_R > 0) & more_likely_R & (divergence_R > o.clip_high)
        below_R = (advantages_R < 0) & ~more_likely_R & (divergence_R > o.clip_low)
        return above_R | below_R

    def divergence(self, batch: TokenBatch) -> torch.Tensor:
        """Return D of each token [R]: |pi - mu|, or mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))."""
        import torch

        log_q_R, log_p_R = batch.logprobs_R.detach(), batch.rollout_logprobs_R
        if self.config.loss.divergence == "tv":
            return (log_q_R.exp() - log_p_R.exp()).abs()
        rest_q_R, rest_p_R = -torch.expm1(log_q_R), -torch.expm1(log_p_R)
        tiny = torch.finfo(log_q_R.dtype).tiny
        rest_R = torch.special.xlogy(rest_p_R, rest_p_R.clamp(min=tiny) / rest_q_R.clamp(min=tiny))
        return log_p_R.exp() * (log_p_R - log_q_R) + rest_R
