"""Group relative policy optimization, DeepSeekMath (arXiv 2402.03300), and what differs from it by settings alone.

    A = (r - mean(r)) / std(r)                                    over the group of a prompt
    surrogate = -min(q A, clip(q, 1 - clip_low, 1 + clip_high) A)     q = pi / pi_old of the token

| name | differs from that by |
|---|---|
| dr-grpo (arXiv 2503.20783) | A = r - mean(r); sums of tokens divided by one constant, not by their number |
| dapo (arXiv 2503.14476) | clip_high 0.28; average over tokens; groups without signal replaced; overlong penalty |
| rloo (arXiv 2402.14740) | A = r - mean of the others' r; sums of tokens |
| reinforce++ (arXiv 2501.03262) | A = r, whitened over the batch; a KL penalty would be in the reward, by k1 |
| reinforce++-baseline (the same) | A = r - mean(r), whitened over the batch; a KL penalty would be in the loss, by k2 |

`config/algorithm_settings.py` has the settings of each name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.backends.batch import TokenBatch
from rlctl.rl.algorithms.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    import torch


class Grpo(PolicyGradient):
    """The clipped surrogate of PPO (arXiv 1707.06347) with the ratio of each token."""

    def surrogate(self, ratio_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        from rlctl.rl.losses import clipped_surrogate

        o = self.config.loss
        return clipped_surrogate(ratio_R, batch.advantages_R, o.clip_low, o.clip_high, o.dual_clip)

    def is_bounded(self, ratio_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        from rlctl.rl.losses import is_clipped

        o = self.config.loss
        return is_clipped(ratio_R, batch.advantages_R, o.clip_low, o.clip_high, o.dual_clip)
