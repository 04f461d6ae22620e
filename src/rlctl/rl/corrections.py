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
    """Return importance weights with both masks applied."""
    found = importance_weights(old_logprobs(batch), batch, options)
    kept_R = torch.ones_like(batch.counted_R)
    if options.sequence_mask is not None:
        kept_R = kept_R & in_sequence_bounds(old_logprobs(batch), batch, options.sequence_mask)
    if options.off_policy_mask is not None:
        kept_R = kept_R & on_policy(batch, options.off_policy_mask)
    return Correction(torch.where(kept_R, found.weights_R, 0.0), found.limited_R | ~kept_R)


def importance_weights(old_logprobs_R: torch.Tensor, batch: TokenBatch, options: LossConfig) -> Correction:
    """Return w of each token, or with `importance_level=sequence` the product of w over its rollout, bounded.

    - `off`: 1. With `ratio` too: the surrogate's own ratio is to mu then (`PolicyGradient.ratio_to_anchor`).
    - `untruncated`: w.
    - `truncated`: min(w, cap). Truncated importance sampling (Ionides 2008); for engines and trainers of RL:
      Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025).
    - `masked`: w inside [floor, cap], else 0, so that a token the two disagree on does not count at all (IcePop, in
      "Every step evolves", arXiv 2510.18855, with 0.5 and 5).
    """
    weights_R = unbounded_weights(old_logprobs_R, batch, options)
    cap = options.importance_cap
    match options.importance_correction:
        case "off" | "ratio":
            return Correction(torch.ones_like(weights_R), torch.zeros_like(batch.counted_R))
        case "untruncated":
            return Correction(weights_R, torch.zeros_like(batch.counted_R))
        case "truncated":
            return Correction(weights_R.clamp(max=cap), weights_R >= cap)
        case "masked":
            outside_R = (weights_R < (options.importance_floor or 1 / cap)) | (weights_R > cap)
            return Correction(torch.where(outside_R, 0.0, weights_R), outside_R)


def unbounded_weights(old_logprobs_R: torch.Tensor, batch: TokenBatch, options: LossConfig) -> torch.Tensor:
    """Return w of each token, or the product over its rollout, as it is [R]."""
    log_ratio_R = _log_ratio(old_logprobs_R, batch.rollout_logprobs_R)
    if options.importance_level == "sequence":
        log_ratio_R = rollout_sums(log_ratio_R, batch.rollout_R)[batch.rollout_R]
    return log_ratio_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def in_sequence_bounds(old_logprobs_R: torch.Tensor, batch: TokenBatch, bounds: tuple[float, float]) -> torch.Tensor:
    """Return whether the geometric mean of w over a token's rollout is in bounds, bool [R].

    Liu, Li et al., "When speed kills stability: demystifying RL collapse from the training-inference mismatch" (2025);
    the mean, unlike the product, does not grow with the length of a rollout.
    """
    mean_N = rollout_means(_log_ratio(old_logprobs_R, batch.rollout_logprobs_R), batch.rollout_R).exp()
    return ((mean_N >= bounds[0]) & (mean_N <= bounds[1]))[batch.rollout_R]


def on_policy(batch: TokenBatch, limit: float) -> torch.Tensor:
    """Return False for the tokens of a rollout with a negative advantage whose mean of log(mu / pi) is above `limit`,
    bool [R], with the policy pi of now (off-policy sequence masking: DeepSeek-V3.2, arXiv 2512.02556)."""
    mean_N = rollout_means(_log_ratio(batch.rollout_logprobs_R, batch.logprobs_R), batch.rollout_R)
    return (batch.advantages_R >= 0) | (mean_N <= limit)[batch.rollout_R]


def _log_ratio(above_R: torch.Tensor, below_R: torch.Tensor) -> torch.Tensor:
    return (above_R - below_R).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
