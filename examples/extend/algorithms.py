"""An algorithm with its own advantages: `--set run.algorithm=algorithms.py:RankGrpo --set loss.params.power=2`."""

import numpy as np

from rlctl.methods.rl.grpo import Grpo


class RankGrpo(Grpo):
    """GRPO with ranks in place of rewards, which outliers do not change."""

    def advantages(self, rewards_G):
        """Return the centered, scaled ranks of a group's rewards; float64 [G]. Equal rewards share a rank."""
        ranks_G = (rewards_G[:, None] > rewards_G).sum(axis=1) + (rewards_G[:, None] == rewards_G).sum(axis=1) / 2
        powered_G = ranks_G.astype(np.float64) ** self.config.loss.params.get("power", 1.0)
        return (powered_G - powered_G.mean()) / (powered_G.std() + 1e-6)
