"""Per-token advantages: rollout advantage minus KL penalty, computed on the ranks before whitening."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlctl.backends.batching.batch import ValueBatch
from rlctl.methods.rl.rl_config import AlgorithmConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PenalizedAdvantages:
    """Computes per-token advantages with the KL penalty on the ranks, which whiten them: REINFORCE++ (arXiv 2501.03262)
    normalizes r - kl_coefficient * sum of KL_i over i >= t over the batch."""

    config: AlgorithmConfig
    column: str = "reference_logprobs"
    whitens: bool = True

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        return self.config.advantage.clip_low, self.config.advantage.clip_high

    def __call__(self, batch: ValueBatch) -> tuple[None, torch.Tensor]:
        """Return the advantage of each token of a micro-batch [R], before it is whitened."""
        from rlctl.methods.rl.losses import penalized

        old_R, reference_R = batch.old_logprobs_R, batch.reference_logprobs_R
        assert old_R is not None  # `needs` has both
        assert reference_R is not None
        return None, penalized(batch.rewards_R, old_R, reference_R, batch, self.config.loss)
