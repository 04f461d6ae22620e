"""Corrections for tokens that another distribution than the policy's chose: weights, and masks of whole rollouts.

Engine and trainer hold the same weights but compute with other kernels and precisions, so the engine's distribution mu
differs a little from the trainer's pi_old. A loss over tokens of mu is unbiased for pi_old when each is weighted by
w = pi_old / mu; the weight's variance is kept in bounds at the price of some bias.

Suffixes: R response tokens, N the rollouts of a micro-batch. Nothing here has a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlctl.backends.batch import TokenBatch
from rlctl.config.schema import LossConfig
from rlctl.rl.losses import LOG_RATIO_LIMIT, old_logprobs, rollout_means, rollout_sums


@dataclass(frozen=True)
class Correction:
    """The weight of each token in the policy loss [R], and whether a bound or a mask has changed it, bool [R]."""

    weights_R: torch.Tensor
    limited_R: torch.Tensor


def correction(batch: TokenBatch, options: LossConfig) -> Correction:
    """Return w of each token, or with `importance_level=sequence` the product over its rollout, bounded and masked.

    - `off`: 1. With `ratio` too: the surrogate's own ratio is to mu then (`PolicyGradient.ratio_to_anchor`).
    - `untruncated`: w.
    - `truncated`: min(w, cap). Truncated importance sampling (Ionides 2008); for engines and trainers of RL:
      Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025).
    - `masked`: w inside [floor, cap], else 0, so that a token the two disagree on does not count at all (IcePop, in
      "Every step evolves", arXiv 2510.18855, with 0.5 and 5).
    - `sequence_mask`: 0 where the geometric mean of w over the rollout is out of bounds (Liu, Li et al., "When speed
      kills stability: demystifying RL collapse from the training-inference mismatch", 2025). Unlike the product, the
      mean does not grow with the length of a rollout.
    - `off_policy_mask`: 0 where the advantage is negative and the rollout's mean of log(mu / pi) is above the limit,
      with the policy pi of now (off-policy sequence masking: DeepSeek-V3.2, arXiv 2512.02556).
    """
    weights_R, cap = unbounded_weights(old_logprobs(batch), batch, options), options.importance_cap
    limited_R = torch.zeros_like(batch.counted_R)
    match options.importance_correction:
        case "off" | "ratio":
            weights_R = torch.ones_like(weights_R)
        case "truncated":
            weights_R, limited_R = weights_R.clamp(max=cap), weights_R >= cap
        case "masked":
            limited_R = (weights_R < (options.importance_floor or 1 / cap)) | (weights_R > cap)
            weights_R = torch.where(limited_R, 0.0, weights_R)
    kept_R = torch.ones_like(batch.counted_R)
    if bounds := options.sequence_mask:
        mean_N = rollout_means(_log_ratio(old_logprobs(batch), batch.rollout_logprobs_R), batch.rollout_R).exp()
        kept_R = kept_R & ((mean_N >= bounds[0]) & (mean_N <= bounds[1]))[batch.rollout_R]
    if (limit := options.off_policy_mask) is not None:
        mean_N = rollout_means(_log_ratio(batch.rollout_logprobs_R, batch.logprobs_R), batch.rollout_R)
        kept_R = kept_R & ((batch.advantages_R >= 0) | (mean_N <= limit)[batch.rollout_R])
    return Correction(torch.where(kept_R, weights_R, 0.0), limited_R | ~kept_R)


def unbounded_weights(old_logprobs_R: torch.Tensor, batch: TokenBatch, options: LossConfig) -> torch.Tensor:
    """Return w of each token, or the product over its rollout, as it is [R]."""
    log_ratio_R = _log_ratio(old_logprobs_R, batch.rollout_logprobs_R)
    if options.importance_level == "sequence":
        log_ratio_R = rollout_sums(log_ratio_R, batch.rollout_R)[batch.rollout_R]
    return log_ratio_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _log_ratio(above_R: torch.Tensor, below_R: torch.Tensor) -> torch.Tensor:
    return (above_R - below_R).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
