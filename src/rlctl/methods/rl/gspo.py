"""Group sequence policy optimization, arXiv 2507.18071.

    s = (pi(y) / pi_old(y)) ** (1 / |y|)              of a whole rollout: exp(mean of the log-ratios of its tokens)
    surrogate = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

It is written per token as sg[s] * pi / sg[pi] (equation 14): the same value and gradient, since the tokens of a rollout
share their advantage and `loss.level=sequence` takes their mean. The mean is over the tokens that the policy chose, and
a rollout is in one micro-batch as a whole, also under context parallelism, so that nothing is missing from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.backends.batching.batch import TokenBatch
from rlctl.methods.rl.grpo import Grpo

if TYPE_CHECKING:
    import torch


class Gspo(Grpo):
    """GRPO's surrogate with the ratio of the sequence."""

    defaults = {"loss.clip_low": 3e-4, "loss.clip_high": 4e-4, "loss.level": "sequence"}

    def ratio(self, batch: TokenBatch) -> torch.Tensor:
        from rlctl.methods.rl.losses import LOG_RATIO_LIMIT, old_logprobs, rollout_means

        log_ratio_R = (batch.logprobs_R - old_logprobs(batch)).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        sequence_R = rollout_means(log_ratio_R, batch.rollout_R).exp()[batch.rollout_R]
        return sequence_R * (batch.logprobs_R - batch.logprobs_R.detach()).exp()
