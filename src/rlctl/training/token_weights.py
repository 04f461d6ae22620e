"""From lengths to token weights. Suffix N: the rollouts or texts of one optimizer mini-batch."""

from __future__ import annotations

from typing import Literal

import numpy as np

Level = Literal["token", "sequence", "constant"]


def token_weights(response_tokens_N: np.ndarray, level: Level, divisor: float = 1.0) -> np.ndarray:
    """Return the weight of each response *token* of a rollout in the loss of one optimizer mini-batch; float64 [N].

    The backend sums weight * loss over the tokens of every rank and micro-batch and divides by nothing, so that the
    result does not depend on how rollouts were dealt to ranks and packed. `response_tokens_N`, counted by the loss
    mask, must hold the whole mini-batch, of all data-parallel ranks.

    - `token`: 1 / (all response tokens); long rollouts weigh more (DAPO, arXiv 2503.14476, section 3.3).
    - `sequence`: 1 / (n * tokens of this rollout); the mean over rollouts of their token means (GRPO, arXiv 2402.03300,
      equation 3).
    - `constant`: 1 / (n * divisor); the mean over rollouts of their token sums, by the same divisor for short and long
      ones (Dr. GRPO, arXiv 2503.20783, section 3.1; REINFORCE and RLOO with the divisor 1).

    n counts the rollouts with response tokens. One without, or of which none is learned from, has weight 0.
    """
    tokens_N = np.asarray(response_tokens_N, dtype=np.float64)
    rollouts = np.count_nonzero(tokens_N)
    match level:
        case "token":
            denominator_N = np.full_like(tokens_N, tokens_N.sum())
        case "sequence":
            denominator_N = tokens_N * rollouts
        case "constant":
            denominator_N = np.full_like(tokens_N, divisor * rollouts)
    return np.divide(1.0, denominator_N, out=np.zeros_like(tokens_N), where=tokens_N > 0)
