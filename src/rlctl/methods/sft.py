"""Supervised fine-tuning: the negative log-likelihood of the tokens that a dataset has a loss for.

loss = - log pi(token)          averaged over the tokens of the batch (loss.level = token)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlctl.backends.batch import TokenBatch
from rlctl.methods.rl.algorithm import Algorithm
from rlctl.telemetry.metrics import Metric

if TYPE_CHECKING:
    import torch


class Sft(Algorithm):
    """Cross entropy with the texts of a dataset."""

    rows = "texts"
    metrics = (Metric("likelihood", "mean", curve="mean probability of a token of the texts", form=".3f"),)

    def advantages(self, rewards_G: np.ndarray) -> np.ndarray:
        """Return zeros: no text is better than another."""
        return np.zeros(len(rewards_G))

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        return -batch.logprobs_R

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        return {"likelihood": batch.logprobs_R.exp()}
