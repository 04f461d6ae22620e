"""Estimators of the KL divergence between two policies from the log-probs of sampled tokens.

J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html. For tokens x ~ q and the
log-ratio d = log p(x) - log q(x), the estimators of KL(q || p) are

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
"""

from __future__ import annotations

from typing import Literal

import torch

KlEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this before exp(): float32 overflows at 88, and beyond e^20 a token says nothing more."""


def k1(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """-d for d = log p - log q: unbiased, may be negative."""
    return -log_ratio_T


def k2(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased, small variance."""
    return 0.5 * log_ratio_T.square()


def k3(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d: unbiased, never negative. d is clamped to +-`LOG_RATIO_LIMIT`."""
    clamped_T = log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(clamped_T) - clamped_T


def kl_penalty(logprobs_T: torch.Tensor, reference_logprobs_T: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Penalty of each token towards the reference [T]; differentiable in `logprobs_T`, see the table above.

    `logprobs_T` are the current policy's (q), with gradient; `reference_logprobs_T` the reference's (p), without.
    """
    log_ratio_T = reference_logprobs_T.detach() - logprobs_T
    match estimator:
        case "k1":
            value_T = k1(log_ratio_T).detach()
            return value_T + value_T * (logprobs_T - logprobs_T.detach())
        case "k2":
            return k2(log_ratio_T)
        case "k3":
            return k3(log_ratio_T)
    raise ValueError(f"unknown KL estimator {estimator!r}: k1, k2 or k3")
