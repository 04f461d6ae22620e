"""Losses over sampled tokens, KL penalties and corrections for the engine's distribution, each with its paper.

Suffixes: R response tokens, N the rollouts of a micro-batch.

KL divergence: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html. For tokens
x ~ q and the log-ratio d = log p(x) - log q(x), the estimators of KL(q || p) are

| name | formula        | value    | gradient of its sum over sampled tokens with respect to q                      |
|------|----------------|----------|--------------------------------------------------------------------------------|
| k1   | -d             | unbiased | as a plain loss its expectation is 0; here: unbiased for KL(q || p), see below |
| k2   | d^2 / 2        | biased   | -d * grad log q: unbiased for KL(q || p)                                       |
| k3   | exp(d) - 1 - d | unbiased | (1 - exp(d)) * grad log q: biased; unbiased for KL(p || q), the other way  |

k1 and k3 are unbiased in value, k1 with the larger variance. The gradient of the KL is E[-d * grad log q], plus
E[grad log q] = 0. Differentiating k1 itself gives only that last term, noise without a mean. k1 is therefore used as
the classical RLHF penalty in the reward: its value k1, its gradient k1 * grad log q, which is also that of k2.
k3 is differentiated as it stands, as in GRPO (arXiv 2402.03300, equation 4): low variance, never negative, and near
p = q the same gradient to first order. A weight q / q without gradient below, or q / mu for tokens of another
distribution mu (`kl_weights`), gives an estimate the gradient of its expectation: k1 and k3 then have the gradient of
the KL, of the next token.

All statements hold for tokens sampled from q itself, that is for the first optimizer step after sampling, and for the
next token alone. The KL divergence of whole completions also changes because a token changes what follows it, which no
estimator's own gradient knows of (arXiv 2506.09477): `score_term` adds it, to any of the three, and a penalty in the
reward has it by construction.

Corrections: engine and trainer hold the same weights but compute with other kernels and precisions, so the engine's
distribution mu differs a little from the trainer's pi_old. A loss over tokens of mu is unbiased for pi_old when each is
weighted by w = pi_old / mu; the weight's variance is kept in bounds at the price of some bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rlctl.backends.batching.batch import TokenBatch, ValueBatch
from rlctl.methods.rl.sections import PolicyLoss

KlEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this before exp(): float32 overflows at 88, and beyond e^20 a token has no information."""


def rollout_sums(values_R: torch.Tensor, rollout_R: torch.Tensor) -> torch.Tensor:
    """Return the sum over the response tokens of each rollout of a micro-batch [N], which holds them all."""
    rollouts = int(rollout_R.max()) + 1 if len(rollout_R) else 0
    return values_R.new_zeros(rollouts).index_add(0, rollout_R, values_R)


def rollout_means(values_R: torch.Tensor, rollout_R: torch.Tensor) -> torch.Tensor:
    """Return the mean over the response tokens of each rollout [N]; tokens that the policy did not choose are none."""
    return rollout_sums(values_R, rollout_R) / rollout_sums(torch.ones_like(values_R), rollout_R).clamp(min=1)


def sums_to_go(values_R: torch.Tensor, rollout_R: torch.Tensor, discount: float = 1.0) -> torch.Tensor:
    """Return for each token the sum over it and the tokens of its rollout that follow it [R], each token further on
    multiplied by `discount` once more.

    Sums over 2 n tokens are made of those over n, so that a rollout of n tokens takes log2(n) passes over all of them.
    """
    total_R, reach = values_R.double(), 1
    longest = int(torch.bincount(rollout_R).max()) if len(rollout_R) else 0
    while reach < longest:
        own_R = rollout_R[reach:] == rollout_R[:-reach]
        further_R = torch.where(own_R, discount**reach * total_R[reach:], 0.0)
        total_R = torch.cat([total_R[:-reach] + further_R, total_R[-reach:]])
        reach *= 2
    return total_R.to(values_R.dtype)


def old_logprobs(batch: TokenBatch) -> torch.Tensor:
    """Return the log-probs of the policy before the batch's first optimizer step [R], as the trainer computes them,
    without gradient. Without lag it is the policy that sampled.

    Where they were not recomputed the current policy is taken as the old one: a ratio to it is 1 and has the gradient
    of the log-prob, which is exact for the first optimizer step after sampling.
    """
    return batch.logprobs_R.detach() if batch.old_logprobs_R is None else batch.old_logprobs_R


def full_logprobs(batch: TokenBatch) -> torch.Tensor:
    """Return the policy's log-probs over the whole vocabulary [R], with gradient."""
    return batch.logprobs_R if batch.full_logprobs_R is None else batch.full_logprobs_R


def old_full_logprobs(batch: TokenBatch) -> torch.Tensor:
    """Return `old_logprobs` over the whole vocabulary [R]."""
    if batch.full_logprobs_R is None:
        return old_logprobs(batch)
    return batch.full_logprobs_R.detach() if batch.old_full_logprobs_R is None else batch.old_full_logprobs_R


def k3(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - 1 - d: unbiased, never negative. d is clamped to +-`LOG_RATIO_LIMIT`."""
    clamped_R = log_ratio_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(clamped_R) - clamped_R


def kl_weights(batch: TokenBatch, weight: Literal["off", "policy", "importance"]) -> torch.Tensor | None:
    """Return the weights of the penalties of tokens [R], with gradient, or None where each counts once."""
    if weight == "off":
        return None
    below_R = batch.logprobs_R if weight == "policy" else batch.rollout_logprobs_R
    return (batch.logprobs_R - below_R.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def kl_penalty(
    logprobs_R: torch.Tensor,
    reference_logprobs_R: torch.Tensor,
    estimator: KlEstimator,
    cap: float | None = None,
    weights_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the penalty of each token towards the reference [R]; differentiable in `logprobs_R`, see the table above.

    `logprobs_R` are the current policy's (q), with gradient; `reference_logprobs_R` the reference's (p), without. A
    token whose penalty is beyond +-`cap` has the cap and no gradient. With weights, the penalty is the weight times the
    estimator as the table has it, and where the log-ratio is beyond its limit, neither has a gradient.
    """
    log_ratio_R = reference_logprobs_R.detach() - logprobs_R
    if weights_R is not None:
        limited_R = log_ratio_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        weights_R = torch.where(limited_R == log_ratio_R, weights_R, weights_R.detach())
        log_ratio_R = limited_R
    match estimator:
        case "k1" if weights_R is not None:
            penalty_R = -log_ratio_R
        case "k1":
            value_R = -log_ratio_R.detach()
            penalty_R = value_R + value_R * (logprobs_R - logprobs_R.detach())
        case "k2":
            penalty_R = 0.5 * log_ratio_R.square()
        case "k3":
            penalty_R = k3(log_ratio_R)
    if weights_R is not None:
        penalty_R = weights_R * penalty_R
    return penalty_R if cap is None else penalty_R.clamp(-cap, cap)


def penalized(
    advantages_R: torch.Tensor,
    logprobs_R: torch.Tensor,
    reference_logprobs_R: torch.Tensor,
    batch: TokenBatch | ValueBatch,
    options: PolicyLoss,
) -> torch.Tensor:
    """Subtract from the advantages [R] the KL penalties of each token and its successors, under the sampling policy
    (`logprobs_R`)."""
    penalty_R = kl_penalty(logprobs_R, reference_logprobs_R, options.kl_estimator, options.kl_cap)
    to_go_R = sums_to_go(torch.where(batch.counted_R, penalty_R, 0.0), batch.rollout_R)
    return advantages_R - options.kl_coefficient * to_go_R


def score_term(
    sampled_logprobs_R: torch.Tensor,
    logprobs_R: torch.Tensor,
    reference_logprobs_R: torch.Tensor,
    rollout_R: torch.Tensor,
    estimator: KlEstimator,
    cap: float | None = None,
) -> torch.Tensor:
    """Return what `kl_penalty` leaves out of the gradient of the KL divergence of whole completions, as a term of the
    loss [R] whose value is 0.

    It is (sum of unbiased estimates over the tokens that follow) * grad log q: those of k3 for k3, else those of k1. k3
    lacks the term of the token itself too, which the gradients of k1 and k2 have. `sampled_logprobs_R` are the log q of
    the distribution that tokens are sampled from, which truncation changes.
    """
    values_R = kl_penalty(logprobs_R.detach(), reference_logprobs_R, "k3" if estimator == "k3" else "k1", cap)
    to_go_R = sums_to_go(values_R, rollout_R)
    factor_R = to_go_R if estimator == "k3" else to_go_R - values_R
    return factor_R * (sampled_logprobs_R - sampled_logprobs_R.detach())


@dataclass(frozen=True)
class Correction:
    """The weight of each token in the policy loss [R], and whether a bound or a mask has changed it, bool [R]."""

    weights_R: torch.Tensor
    limited_R: torch.Tensor


def correction(batch: TokenBatch, options: PolicyLoss) -> Correction:
    """Return w of each token, or with `importance_level=sequence` the product over its rollout, bounded and masked.

    - `off`: 1. With `ratio` too: the surrogate's own ratio is to mu then (`PolicyGradient.ratio_to_anchor`).
    - `untruncated`: w.
    - `truncated`: min(w, cap), and no less than the floor if there is one. Truncated importance sampling (Ionides
      2008); for engines and trainers of RL: Yao et al., "Your efficient RL framework secretly brings you off-policy
      RL training" (2025).
    - `masked`: w inside [floor, cap], else 0, so that a token the two disagree on does not count at all (IcePop, in
      "Every step evolves", arXiv 2510.18855, with 0.5 and 5).
    - `sequence_mask`: 0 where the geometric mean of w over the rollout is out of bounds (Liu, Li et al., "When speed
      kills stability: demystifying RL collapse from the training-inference mismatch", 2025). Unlike the product, the
      mean does not grow with the length of a rollout.
    - `error_mask`: 0 where the mean of exp|log w| over the rollout's tokens is above the limit.
    - `off_policy_mask`: 0 where the advantage is negative and the rollout's mean of log(mu / pi) is above the limit,
      with the policy pi of now (off-policy sequence masking: DeepSeek-V3.2, arXiv 2512.02556).
    """
    weights_R, cap = unbounded_weights(old_logprobs(batch), batch, options), options.importance_cap
    limited_R = torch.zeros_like(batch.counted_R)
    match options.importance_correction:
        case "off" | "ratio":
            weights_R = torch.ones_like(weights_R)
        case "truncated":
            floor = options.importance_floor or 0.0
            weights_R, limited_R = weights_R.clamp(floor, cap), (weights_R > cap) | (weights_R < floor)
        case "masked":
            floor = 1 / cap if options.importance_floor is None else options.importance_floor
            limited_R = (weights_R < floor) | (weights_R > cap)
            weights_R = torch.where(limited_R, 0.0, weights_R)
    kept_R = torch.ones_like(batch.counted_R)
    if bounds := options.sequence_mask:
        mean_N = rollout_means(_log_ratio(old_logprobs(batch), batch.rollout_logprobs_R), batch.rollout_R).exp()
        kept_R = kept_R & ((mean_N >= bounds[0]) & (mean_N <= bounds[1]))[batch.rollout_R]
    if (limit := options.error_mask) is not None:
        error_R = _log_ratio(old_logprobs(batch), batch.rollout_logprobs_R).abs().exp()
        kept_R = kept_R & (rollout_means(error_R, batch.rollout_R) <= limit)[batch.rollout_R]
    if (limit := options.off_policy_mask) is not None:
        mean_N = rollout_means(_log_ratio(batch.rollout_logprobs_R, batch.logprobs_R), batch.rollout_R)
        kept_R = kept_R & ((batch.advantages_R >= 0) | (mean_N <= limit)[batch.rollout_R])
    return Correction(torch.where(kept_R, weights_R, 0.0), limited_R | ~kept_R)


def unbounded_weights(old_logprobs_R: torch.Tensor, batch: TokenBatch, options: PolicyLoss) -> torch.Tensor:
    """Return w of each token, or the product over its rollout, as it is [R]."""
    log_ratio_R = _log_ratio(old_logprobs_R, batch.rollout_logprobs_R)
    if options.importance_level == "sequence":
        log_ratio_R = rollout_sums(log_ratio_R, batch.rollout_R)[batch.rollout_R]
    return log_ratio_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _log_ratio(above_R: torch.Tensor, below_R: torch.Tensor) -> torch.Tensor:
    return (above_R - below_R).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
