"""An algorithm with its own setting, `advantage.rank_power`: `--algorithm rank`."""

import numpy as np

from rlctl.config.section import PositiveNumber
from rlctl.methods.rl.grpo import Grpo
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.methods.rl.sections import AdvantageConfig


class RankAdvantage(AdvantageConfig):
    """Advantages by rank."""

    rank_power: PositiveNumber = 1.0
    """Exponent of the ranks; above 1 the best rollouts count more."""


class RankConfig(RlConfig):
    """The configuration of `--algorithm rank`."""

    advantage: RankAdvantage = RankAdvantage()


class Rank(Grpo):
    """GRPO with ranks in place of rewards, which outliers do not change."""

    Config = RankConfig

    def advantages(self, rewards_G):
        """Return the centered, scaled ranks of a group's rewards; float64 [G]."""
        powered_G = rewards_G.argsort().argsort().astype(np.float64) ** self.config.advantage.rank_power
        return (powered_G - powered_G.mean()) / (powered_G.std() + 1e-6)
