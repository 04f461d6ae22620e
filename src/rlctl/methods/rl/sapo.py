"""Soft adaptive policy optimization, arXiv 2511.20347.

    surrogate = -4 / t * sigmoid(t (q - 1)) A        q = pi / pi_old of the token

t is `loss.sapo_temperature_positive` where A > 0, else `loss.sapo_temperature_negative`. No token is clipped: near
q = 1 the gradient equals the gradient of q A, and it fades as q leaves 1, the faster the larger t is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.backends.batching.batch import TokenBatch
from rlctl.config.section import PositiveNumber
from rlctl.methods.rl.policy_gradient import PolicyGradient
from rlctl.methods.rl.rl_config import AlgorithmConfig
from rlctl.methods.rl.sections import PolicyLoss

if TYPE_CHECKING:
    import torch


class SapoLoss(PolicyLoss):
    """The policy loss of SAPO, its KL penalty, and the correction for what the engine computes differently."""

    sapo_temperature_positive: PositiveNumber = 1.0
    """Temperature of the gate where the advantage is positive."""
    sapo_temperature_negative: PositiveNumber = 1.05
    """Temperature of the gate where the advantage is negative."""


class SapoConfig(AlgorithmConfig):
    """The configuration of `--algorithm sapo`."""

    loss: SapoLoss = SapoLoss()


class Sapo(PolicyGradient):
    """A surrogate with a soft gate in place of the clip."""

    Config = SapoConfig
    config: SapoConfig
    defaults = {
        "loss.sapo_temperature_positive": 1.0,
        "loss.sapo_temperature_negative": 1.05,
        "loss.level": "sequence",
    }

    def surrogate(self, ratio_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        import torch

        o, positive_R = self.config.loss, batch.advantages_R > 0
        # Of the advantages' dtype: where() of two numbers alone would be float32.
        temperature_R = torch.full_like(batch.advantages_R, o.sapo_temperature_negative)
        temperature_R[positive_R] = o.sapo_temperature_positive
        return -torch.sigmoid(temperature_R * (ratio_R - 1)) * 4 / temperature_R * batch.advantages_R

    def is_bounded(self, ratio_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        import torch

        return torch.zeros_like(batch.counted_R)
