"""From rewards to advantages, and from lengths to token weights: the driver's numpy on per-rollout scalars.

Suffix N: one entry a rollout of the step (or of one optimizer mini-batch, for the weights).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Baseline = Literal["mean", "leave-one-out"]
LossLevel = Literal["token", "sequence"]

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that a group of equal rewards has advantage 0 rather than 0/0."""


def group_advantages(
    rewards_N: np.ndarray, groups_N: np.ndarray, baseline: Baseline = "mean", normalize_std: bool = True
) -> np.ndarray:
    """Advantage of each rollout over the others of its group; float64 [N], the same order as `rewards_N`.

    `groups_N` names the group of each rollout; groups may differ in size and need not be contiguous.

    - `mean` subtracts the mean of the group (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1.2).
    - `leave-one-out` subtracts the mean of the *other* rollouts (RLOO: arXiv 2402.14740, equation 7), which equals the
      former times G / (G - 1). It is an unbiased baseline: independent of the rollout that it is subtracted from.
    - `normalize_std` divides by the group's sample standard deviation (G - 1 degrees of freedom, as published
      implementations of GRPO do). Without it each prompt weighs as its rewards do (Dr. GRPO, arXiv 2503.20783).

    Raises ValueError when a group has a single rollout, which has nothing to be compared with.
    """
    rewards_N = np.asarray(rewards_N, dtype=np.float64)
    _, group_of_N, size_of_group = np.unique(groups_N, return_inverse=True, return_counts=True)
    if rewards_N.shape != group_of_N.shape:
        raise ValueError(f"{rewards_N.shape[0]} rewards for {group_of_N.shape[0]} rollouts")
    if (size_of_group < 2).any():
        raise ValueError("a group needs at least two rollouts to have a baseline")
    size_N = size_of_group[group_of_N]
    deviation_N = rewards_N - _sum_of_group(rewards_N, group_of_N) / size_N
    advantages_N = deviation_N * size_N / (size_N - 1) if baseline == "leave-one-out" else deviation_N
    if not normalize_std:
        return advantages_N
    std_N = np.sqrt(_sum_of_group(deviation_N**2, group_of_N) / (size_N - 1))
    return advantages_N / (std_N + STD_EPSILON)


def _sum_of_group(values_N: np.ndarray, group_of_N: np.ndarray) -> np.ndarray:
    """For each rollout the sum over its group, float64 [N]."""
    return np.bincount(group_of_N, weights=values_N)[group_of_N]


def token_weights(response_tokens_N: np.ndarray, level: LossLevel) -> np.ndarray:
    """Weight of each *token* of a rollout in the loss of one optimizer mini-batch; float64 [N].

    The backend sums weight * loss over the tokens of every rank and micro-batch and divides by nothing, so that the
    result does not depend on how rollouts were dealt to ranks and packed. `response_tokens_N` must hold the whole
    mini-batch, of all data-parallel ranks.

    - `token`: 1 / (all response tokens); long rollouts weigh more (DAPO, arXiv 2503.14476, section 3.3).
    - `sequence`: 1 / (N * tokens of this rollout); the mean over rollouts of their token means (GRPO, arXiv 2402.03300,
      equation 3).

    A rollout without response tokens has weight 0 (and counts in N).
    """
    tokens_N = np.asarray(response_tokens_N, dtype=np.float64)
    denominator_N = np.full_like(tokens_N, tokens_N.sum()) if level == "token" else tokens_N * len(tokens_N)
    return np.divide(1.0, denominator_N, out=np.zeros_like(tokens_N), where=tokens_N > 0)
