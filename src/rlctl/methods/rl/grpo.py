"""Group relative policy optimization, DeepSeekMath (arXiv 2402.03300), and what differs from it by settings alone.

    A = (r - mean(r)) / std(r)                                    over the group of a prompt
    surrogate = -min(q A, clip(q, 1 - clip_low, 1 + clip_high) A)     q = pi / pi_old of the token

| name | differs from that by |
|---|---|
| dr-grpo (arXiv 2503.20783) | A = r - mean(r); sums of tokens divided by one constant, not by their number |
| dapo (arXiv 2503.14476) | clip_high 0.28; average over tokens; groups without signal replaced; overlong penalty |
| rloo (arXiv 2402.14740) | A = r - mean of the others' r; sums of tokens |
| reinforce++ (arXiv 2501.03262) | A = r, whitened over the batch; a KL penalty would be in r, by k1 |
| reinforce++-baseline (the same) | A = r - mean(r), whitened over the batch; a KL penalty would be in the loss, by k2 |

Each name has a class below with its settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.backends.batching.batch import TokenBatch
from rlctl.methods.rl.policy_gradient import PolicyGradient
from rlctl.methods.rl.rl_config import RlConfig

if TYPE_CHECKING:
    import torch


class Grpo(PolicyGradient):
    """The clipped surrogate of PPO (arXiv 1707.06347, equation 7) with the ratio of each token and separate bounds."""

    Config = RlConfig
    config: RlConfig

    def surrogate(self, ratio_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return -min(q A, clip(q) A); `loss.dual_clip` c > 1 bounds the loss of a token with A < 0 at -c A, since q A
        has no bound there (dual-clip PPO, arXiv 1912.09729, equation 5)."""
        import torch

        o, advantages_R = self.config.loss, batch.advantages_R
        clipped_R = ratio_R.clamp(1 - o.clip_low, 1 + o.clip_high)
        objective_R = torch.minimum(ratio_R * advantages_R, clipped_R * advantages_R)
        if o.dual_clip is not None:
            bounded_R = torch.maximum(objective_R, o.dual_clip * advantages_R)
            objective_R = torch.where(advantages_R < 0, bounded_R, objective_R)
        return -objective_R

    def is_bounded(self, ratio_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        o, advantages_R = self.config.loss, batch.advantages_R
        above_R = (advantages_R > 0) & (ratio_R > 1 + o.clip_high)
        outside_R = ratio_R < 1 - o.clip_low
        if o.dual_clip is not None:
            outside_R = outside_R | (ratio_R > o.dual_clip)
        return above_R | ((advantages_R < 0) & outside_R)


class DrGrpo(Grpo):
    """GRPO without the standard deviation and without the length of a rollout."""

    defaults = {"advantage.normalize_std": False, "loss.level": "constant"}


class Dapo(Grpo):
    """GRPO with a higher upper bound, dynamic sampling and a penalty of long completions."""

    defaults = {
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.28,
        "loss.level": "token",
        "filter.groups": "replace",
        # 4,096 of 20,480 tokens in section 4.1 of the paper.
        "reward.overlong_buffer": 0.2,
        "reward.overlong_factor": 1.0,
    }


class Rloo(Grpo):
    """GRPO with the mean of the other rollouts as the baseline."""

    defaults = {
        "advantage.baseline": "leave-one-out",
        "advantage.normalize_std": False,
        "loss.level": "constant",
        "loss.length_divisor": 1,
    }


class ReinforcePlusPlus(Grpo):
    """Whitened rewards without groups, with a KL penalty in the reward."""

    defaults = {
        "advantage.baseline": "none",
        "advantage.normalize_std": False,
        "advantage.whiten": True,
        "loss.kl_in": "reward",
        "loss.kl_estimator": "k1",
    }


class ReinforcePlusPlusBaseline(Grpo):
    """Rewards less the mean of their group, whitened, with a KL penalty in the loss."""

    defaults = {
        "advantage.normalize_std": False,
        "advantage.whiten": True,
        "loss.kl_in": "loss",
        "loss.kl_estimator": "k2",
    }


class Ppo(Grpo):
    """The clipped surrogate with a critic's advantages."""

    defaults = {
        "advantage.baseline": "critic",
        "advantage.normalize_std": False,
        "advantage.whiten": True,
        "loss.kl_in": "reward",
        "loss.kl_estimator": "k1",
    }
