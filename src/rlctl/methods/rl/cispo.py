"""Clipped importance-sampling policy optimization: MiniMax-M1, arXiv 2506.13585, equations 4 and 5.

    surrogate = -sg[clip(q, 1 - clip_low, 1 + clip_high)] A log pi          q = pi / pi_old of the token

The bound limits the weight of a token and does not end its gradient, so that the policy goes on learning from rare
tokens that become likely. The paper tunes the upper bound alone and gives no number. The settings have no lower bound
(clip_low 1) and the upper bound q <= 5, which arXiv 2510.13786 ("The art of scaling reinforcement learning compute for
LLMs") found good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.backends.batching.batch import TokenBatch
from rlctl.methods.rl.policy_gradient import PolicyGradient
from rlctl.methods.rl.rl_config import AlgorithmConfig
from rlctl.methods.rl.sections import PolicyLoss, RatioBounds

if TYPE_CHECKING:
    import torch


class CispoLoss(RatioBounds, PolicyLoss):
    """The policy loss of CISPO, its KL penalty, and the correction for the engine's numerical differences."""


class CispoConfig(AlgorithmConfig):
    """The configuration of `--algorithm cispo`."""

    loss: CispoLoss = CispoLoss()


class Cispo(PolicyGradient):
    """REINFORCE with a bounded weight of each token."""

    Config = CispoConfig
    config: CispoConfig
    defaults = {"loss.clip_low": 1.0, "loss.clip_high": 4.0}

    def surrogate(self, ratio_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        o = self.config.loss
        return -ratio_R.detach().clamp(1 - o.clip_low, 1 + o.clip_high) * batch.advantages_R * batch.logprobs_R

    def is_bounded(self, ratio_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        o = self.config.loss
        return (ratio_R < 1 - o.clip_low) | (ratio_R > 1 + o.clip_high)
