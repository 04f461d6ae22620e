"""Losses over sampled tokens, penalties and importance weights as plain functions, each with its paper.

Suffix R: response tokens.

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
p = q the same gradient to first order.

All statements hold for tokens sampled from q itself, that is for the first optimizer step after sampling.

Importance weights: engine and trainer hold the same weights but compute with other kernels and precisions, so the
engine's distribution mu differs a little from the trainer's pi_old. A loss over tokens of mu is unbiased for pi_old
when each is weighted by w = pi_old / mu; the weight's variance is kept in bounds at the price of some bias.
"""

from __future__ import annotations

from typing import Literal

import torch

from rlctl.backends.batch import TokenBatch

KlEstimator = Literal["k1", "k2", "k3"]
ImportanceCorrection = Literal["off", "truncated", "masked"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this before exp(): float32 overflows at 88, and beyond e^20 a token says nothing more."""


def clipped_surrogate(
    ratio_R: torch.Tensor,
    advantages_R: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """Return the loss of each token [R]: the negative clipped surrogate objective of PPO.

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO (arXiv 1707.06347, equation 7) with separate bounds (DAPO's
    clip-higher, arXiv 2503.14476, section 3.1). `dual_clip` c > 1 bounds the loss of a token with A < 0 at -c A
    (dual-clip PPO, arXiv 1912.09729, equation 5), since r A has no bound there.
    """
    clipped_R = ratio_R.clamp(1 - clip_low, 1 + clip_high)
    objective_R = torch.minimum(ratio_R * advantages_R, clipped_R * advantages_R)
    if dual_clip is not None:
        bounded_R = torch.maximum(objective_R, dual_clip * advantages_R)
        objective_R = torch.where(advantages_R < 0, bounded_R, objective_R)
    return -objective_R


def is_clipped(
    ratio_R: torch.Tensor,
    advantages_R: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """Return which tokens a bound keeps from moving the policy, bool [R]: their surrogate has no gradient."""
    above_R = (advantages_R > 0) & (ratio_R > 1 + clip_high)
    below_R = (advantages_R < 0) & (ratio_R < 1 - clip_low)
    clipped_R = above_R | below_R
    if dual_clip is not None:
        clipped_R = clipped_R | ((advantages_R < 0) & (ratio_R > dual_clip))
    return clipped_R


def policy_ratio(logprobs_R: torch.Tensor, old_logprobs_R: torch.Tensor) -> torch.Tensor:
    """Return pi / pi_old of each token [R], with gradient; the log-ratio is clamped to +-`LOG_RATIO_LIMIT`."""
    return (logprobs_R - old_logprobs_R).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def old_logprobs(batch: TokenBatch) -> torch.Tensor:
    """Return the log-probs of the policy that sampled [R], as the trainer computes them, without gradient.

    Where they were not recomputed the current policy is taken as the old one: a ratio to it is 1 and has the gradient
    of the log-prob, which is exact for the first optimizer step after sampling.
    """
    return batch.logprobs_R.detach() if batch.old_logprobs_R is None else batch.old_logprobs_R


def k3(log_ratio_R: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - 1 - d: unbiased, never negative. d is clamped to +-`LOG_RATIO_LIMIT`."""
    clamped_R = log_ratio_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(clamped_R) - clamped_R


def kl_penalty(
    logprobs_R: torch.Tensor, reference_logprobs_R: torch.Tensor, estimator: KlEstimator, cap: float | None = None
) -> torch.Tensor:
    """Return the penalty of each token towards the reference [R]; differentiable in `logprobs_R`, see the table above.

    `logprobs_R` are the current policy's (q), with gradient; `reference_logprobs_R` the reference's (p), without. A
    token whose penalty is beyond +-`cap` has the cap and no gradient.
    """
    penalty_R = _uncapped_penalty(logprobs_R, reference_logprobs_R, estimator)
    return penalty_R if cap is None else penalty_R.clamp(-cap, cap)


def _uncapped_penalty(
    logprobs_R: torch.Tensor, reference_logprobs_R: torch.Tensor, estimator: KlEstimator
) -> torch.Tensor:
    log_ratio_R = reference_logprobs_R.detach() - logprobs_R
    match estimator:
        case "k1":
            value_R = -log_ratio_R.detach()
            return value_R + value_R * (logprobs_R - logprobs_R.detach())
        case "k2":
            return 0.5 * log_ratio_R.square()
        case "k3":
            return k3(log_ratio_R)
    raise ValueError(f"unknown KL estimator {estimator!r}: k1, k2 or k3")


def importance_weights(
    old_logprobs_R: torch.Tensor, rollout_logprobs_R: torch.Tensor, correction: ImportanceCorrection, cap: float
) -> torch.Tensor:
    """Return the weight of each token [R], without gradient, from the trainer's and the engine's log-probs.

    - `off`: 1.
    - `truncated`: min(w, cap). Truncated importance sampling (Ionides 2008); for engines and trainers of RL:
      Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025).
    - `masked`: w inside [1 / cap, cap], else 0, so that a token the two disagree on does not count at all (IcePop, in
      "Every step evolves", arXiv 2510.18855).
    """
    log_ratio_R = (old_logprobs_R - rollout_logprobs_R).detach()
    weights_R = log_ratio_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    match correction:
        case "off":
            return torch.ones_like(weights_R)
        case "truncated":
            return weights_R.clamp(max=cap)
        case "masked":
            return torch.where((weights_R >= 1 / cap) & (weights_R <= cap), weights_R, 0.0)
    raise ValueError(f"unknown importance correction {correction!r}: off, truncated or masked")


def is_limited(weights_R: torch.Tensor, correction: ImportanceCorrection, cap: float) -> torch.Tensor:
    """Return which tokens the correction truncates or masks, bool [R], from their weights."""
    match correction:
        case "truncated":
            return weights_R >= cap
        case "masked":
            return weights_R == 0
    return torch.zeros_like(weights_R, dtype=torch.bool)
