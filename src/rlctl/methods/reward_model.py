"""Reward models: a model with a scalar head, trained on which of two completions is preferred.

    score(y)   = head applied to the last hidden state of prompt and completion, at the token that ends the completion
    loss       = - log sigmoid(score(chosen) - score(rejected) - m)        averaged over the pairs of a batch

This is the likelihood of Bradley and Terry (1952) as Ouyang et al. 2022 use it (arXiv 2203.02155, equation 1). The
margin m is what a row holds in its field `margin`, or 0 (Touvron et al. 2023, arXiv 2307.09288, equation 2). Metrics
have the names that they have with dpo, and `rewards/margins` is the difference of the scores without m.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.backends.batch import TokenBatch
from rlctl.data.texts import MARGIN
from rlctl.methods.preference import PAIRS, REWARDS, Dpo, Pairs, summed
from rlctl.telemetry.metrics import Metric

if TYPE_CHECKING:
    import torch


class Rm(Dpo):
    """Learns a score by which chosen completions are above rejected ones."""

    requires = frozenset()
    metrics = (Metric(PAIRS, "sum"), *REWARDS)

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        from torch.nn.functional import logsigmoid

        pairs, margins_P = self.pairs(batch), 0.0
        if MARGIN in batch.extra_R:
            margins_P, _ = summed(batch.extra_R[MARGIN], batch.rollout_R)
        return pairs.spread(-logsigmoid(pairs.margins_P - margins_P))

    def pairs(self, batch: TokenBatch) -> Pairs:
        """Return the pairs of a micro-batch; each text has one token with a loss, whose value is its score."""
        import torch

        chosen, rejected = summed(batch.logprobs_R, batch.rollout_R)
        ones = torch.ones_like(chosen)
        return Pairs(batch.rollout_R // 2, 2 * ones, chosen, rejected, chosen, rejected, chosen, rejected)
