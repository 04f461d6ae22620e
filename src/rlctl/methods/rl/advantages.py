"""From rewards to advantages: the driver's numpy on per-rollout scalars, and the ranks' own per-token advantages.

Suffixes: G rollouts of a group, N rollouts of one optimizer mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from rlctl.backends.batching.batch import ROUNDING, ValueBatch, equal_up_to_rounding
from rlctl.methods.rl.rl_config import AlgorithmConfig

if TYPE_CHECKING:
    import torch

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that a group of equal rewards has advantage 0 rather than 0/0."""


Baseline = Literal["mean", "leave-one-out", "none", "critic"]
StdOf = Literal["group", "others"]


def nearly_equal(values: np.ndarray) -> bool:
    """Return whether rewards or advantages, at least one, are the same up to rounding."""
    return equal_up_to_rounding(float(values.min()), float(values.max()))


def group_advantages(
    rewards_G: np.ndarray, baseline: Baseline = "mean", normalize_std: bool = True, std_of: StdOf = "group"
) -> np.ndarray:
    """Return the advantage of each rollout over the others of its group; float64 [G], or [P, G] for P groups.

    - `mean` subtracts the mean of the group (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1.2).
    - `leave-one-out` subtracts the mean of the *other* rollouts (RLOO: arXiv 2402.14740, equation 7), which equals the
      former times G / (G - 1). It is an unbiased baseline: independent of the rollout that it is subtracted from.
    - `none` subtracts nothing (REINFORCE++, arXiv 2501.03262, which compares over the batch: see `whitened`).
    - `critic` subtracts nothing here: the ranks subtract the values of each rollout's tokens (`methods/rl/critic.py`).
    - `normalize_std` divides by the group's sample standard deviation (G - 1 degrees of freedom, as published
      implementations of GRPO do). Without it each prompt weighs as its rewards do (Dr. GRPO, arXiv 2503.20783).
      With `std_of` others it is the deviation of the *other* rollouts; if these are all equal, nothing is divided.

    Rewards that are equal up to rounding have exactly the advantage 0 wherever they are compared: without a baseline
    too, where `normalize_std` finds no deviation to divide by.

    Raises ValueError when a group has a single rollout, and this has to be compared with others.
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    size = rewards_G.shape[-1]
    if baseline in ("none", "critic") and not normalize_std:
        return rewards_G
    if size < 2:
        raise ValueError("a group needs at least two rollouts to have a baseline")
    deviation_G = rewards_G - rewards_G.sum(-1, keepdims=True) / size
    match baseline:
        case "mean":
            advantages_G = deviation_G
        case "leave-one-out":
            advantages_G = deviation_G * size / (size - 1)
        case _:
            advantages_G = rewards_G
    if normalize_std:
        advantages_G = advantages_G / _deviation(rewards_G, deviation_G, std_of)
    return np.where(_all_equal(rewards_G), 0.0, advantages_G)


def _deviation(rewards_G: np.ndarray, deviation_G: np.ndarray, std_of: StdOf) -> np.ndarray:
    size = rewards_G.shape[-1]
    if std_of == "group":
        return np.sqrt((deviation_G**2).sum(-1, keepdims=True) / (size - 1)) + STD_EPSILON
    others_GO = rewards_G[..., [[other for other in range(size) if other != index] for index in range(size)]]
    equal_G = _all_equal(others_GO)[..., 0]
    squares_G = ((others_GO - others_GO.mean(-1, keepdims=True)) ** 2).sum(-1)
    return np.where(equal_G, 1.0, np.sqrt(squares_G / max(1, size - 2)) + STD_EPSILON)


def _all_equal(values_G: np.ndarray) -> np.ndarray:
    """Return whether values are the same up to rounding, along the last axis, which stays with length 1."""
    low, high = values_G.min(-1, keepdims=True), values_G.max(-1, keepdims=True)
    return high - low <= ROUNDING * np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))


def whitened(advantages_N: np.ndarray, response_tokens_N: np.ndarray) -> np.ndarray:
    """Return the advantages with mean 0 and standard deviation 1 over all response tokens of the batch; float64 [N].

    REINFORCE++ (arXiv 2501.03262) normalizes the advantages of tokens over the batch, and GDPO (arXiv
    2601.05242) the sums of its terms. The tokens of a rollout share its advantage, so that a rollout counts by its
    length. A batch of equal advantages has nothing to compare, and advantage 0.
    """
    advantages_N, tokens_N = np.asarray(advantages_N, np.float64), np.asarray(response_tokens_N, np.float64)
    counted_N = advantages_N[tokens_N > 0]
    if not len(counted_N) or nearly_equal(counted_N):
        return np.zeros_like(advantages_N)
    deviation_N = advantages_N - np.average(advantages_N, weights=tokens_N)
    return deviation_N / (np.sqrt(np.average(deviation_N**2, weights=tokens_N)) + STD_EPSILON)


def whitened_rollouts(advantages_N: np.ndarray) -> np.ndarray:
    """Return the advantages with mean 0 and sample standard deviation 1 over the rollouts of the batch, long or short;
    float64 [N]. Equal ones have advantage 0."""
    if nearly_equal(advantages_N):
        return np.zeros(len(advantages_N))
    return (advantages_N - advantages_N.mean()) / advantages_N.std(ddof=1)


def overlong_penalty(response_tokens_N: np.ndarray, limit: int, buffer: float, factor: float) -> np.ndarray:
    """Return what the length of each completion costs; float64 [N], never positive.

    min(0, -exceed / buffer) x factor, with exceed = tokens - (limit - buffer): DAPO's soft overlong punishment (arXiv
    2503.14476, equation 13). `limit` is in tokens, and `buffer` is a part of it; 0: nothing costs anything.
    """
    tokens_N = np.asarray(response_tokens_N, np.float64)
    if not buffer:
        return np.zeros_like(tokens_N)
    width = buffer * limit
    return factor * np.minimum(0.0, (limit - width - tokens_N) / width)


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
