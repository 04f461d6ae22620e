"""Importance weights for the difference between the engine that sampled a token and the trainer that learns from it.

Both hold the same weights but compute with other kernels and precisions, so the engine's distribution mu differs a
little from the trainer's pi_old. A loss over tokens of mu is unbiased for pi_old when each is weighted by
w = pi_old / mu; the weight's variance is kept in bounds at the price of some bias.
"""

from __future__ import annotations

from typing import Literal

import torch

from rlctl.rl.kl import LOG_RATIO_LIMIT

ImportanceCorrection = Literal["off", "truncated", "masked"]


def importance_weights(
    old_logprobs_T: torch.Tensor, rollout_logprobs_T: torch.Tensor, correction: ImportanceCorrection, cap: float
) -> torch.Tensor:
    """Weight of each token [T], without gradient, from the trainer's and the engine's log-probs.

    - `off`: 1.
    - `truncated`: min(w, cap). Truncated importance sampling (Ionides 2008); for engines and trainers of RL:
      Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025).
    - `masked`: w inside [1 / cap, cap], else 0, so that a token the two disagree on does not count at all (IcePop, in
      "Every step evolves", arXiv 2510.18855).
    """
    log_ratio_T = (old_logprobs_T - rollout_logprobs_T).detach()
    weights_T = log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    match correction:
        case "off":
            return torch.ones_like(weights_T)
        case "truncated":
            return weights_T.clamp(max=cap)
        case "masked":
            return torch.where((weights_T >= 1 / cap) & (weights_T <= cap), weights_T, 0.0)
    raise ValueError(f"unknown importance correction {correction!r}: off, truncated or masked")
