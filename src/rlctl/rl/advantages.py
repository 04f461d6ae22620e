"""From rewards to advantages, and from lengths to token weights: the driver's numpy on per-rollout scalars.

Suffixes: G the rollouts of a group, N those of one optimizer mini-batch.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that a group of equal rewards has advantage 0 rather than 0/0."""


def group_advantages(
    rewards_G: np.ndarray, baseline: Literal["mean", "leave-one-out"] = "mean", normalize_std: bool = True
) -> np.ndarray:
    """Return the advantage of each rollout over the others of its group; float64 [G].

    - `mean` subtracts the mean of the group (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1.2).
    - `leave-one-out` subtracts the mean of the *other* rollouts (RLOO: arXiv 2402.14740, equation 7), which equals the
      former times G / (G - 1). It is an unbiased baseline: independent of the rollout that it is subtracted from.
    - `normalize_std` divides by the group's sample standard deviation (G - 1 degrees of freedom, as published
      implementations of GRPO do). Without it each prompt weighs as its rewards do (Dr. GRPO, arXiv 2503.20783).

    Raises ValueError when a group has a single rollout, which has nothing to be compared with.
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    size = len(rewards_G)
    if size < 2:
        raise ValueError("a group needs at least two rollouts to have a baseline")
    deviation_G = rewards_G - rewards_G.sum() / size
    advantages_G = deviation_G * size / (size - 1) if baseline == "leave-one-out" else deviation_G
    if not normalize_std:
        return advantages_G
    return advantages_G / (np.sqrt((deviation_G**2).sum() / (size - 1)) + STD_EPSILON)


def token_weights(response_tokens_N: np.ndarray, level: Literal["token", "sequence"]) -> np.ndarray:
    """Return the weight of each response *token* of a rollout in the loss of one optimizer mini-batch; float64 [N].

    The backend sums weight * loss over the tokens of every rank and micro-batch and divides by nothing, so that the
    result does not depend on how rollouts were dealt to ranks and packed. `response_tokens_N`, counted by the loss
    mask, must hold the whole mini-batch, of all data-parallel ranks.

    - `token`: 1 / (all response tokens); long rollouts weigh more (DAPO, arXiv 2503.14476, section 3.3).
    - `sequence`: 1 / (N * tokens of this rollout); the mean over rollouts of their token means (GRPO, arXiv 2402.03300,
      equation 3).

    A rollout without response tokens has weight 0 (and counts in N).
    """
    tokens_N = np.asarray(response_tokens_N, dtype=np.float64)
    denominator_N = np.full_like(tokens_N, tokens_N.sum()) if level == "token" else tokens_N * len(tokens_N)
    return np.divide(1.0, denominator_N, out=np.zeros_like(tokens_N), where=tokens_N > 0)
