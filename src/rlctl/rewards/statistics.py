"""Metrics of sampled answers with standard errors, and significance of differences.

Each metric is a mean over prompts of one value per prompt, so errors are clustered by prompt (Miller 2024, arXiv
2411.00640, sections 2 and 4).

Suffixes: P prompts, N samples of one prompt.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SIGNIFICANCE = 0.05
"""Probability by chance below which a difference is significant."""
PERMUTATIONS = 10_000
EXACT_PROMPTS = 14
"""Maximum prompts for counting all sign changes (16,384); more are drawn at random."""


@dataclass(frozen=True)
class Sampled:
    """One scored sample of a prompt."""

    right: bool
    score: float
    """The value that the scorer gave it: 1 where it is right, and perhaps part of the credit where it is not."""
    answer: str | None = None
    """The completion's answer in normalized form; None: no answer."""


@dataclass(frozen=True)
class Estimate:
    """A metric with its standard error."""

    value: float
    stderr: float | None
    """None for one prompt, which has no spread."""
    values_P: tuple[float, ...]
    """The value of each prompt."""

    @classmethod
    def of(cls, values_P: Sequence[float]) -> Estimate:
        """Return the mean over prompts and its standard error, std / sqrt(P) with P - 1 degrees of freedom."""
        values = np.asarray(values_P, dtype=np.float64)
        stderr = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
        return cls(float(values.mean()), stderr, tuple(values.tolist()))


@dataclass(frozen=True)
class Difference:
    """The difference of two models on the same prompts."""

    value: float
    stderr: float | None
    p: float
    """Probability of such a difference by chance if the models are equal on each prompt."""

    @property
    def beyond_noise(self) -> bool:
        return self.p < SIGNIFICANCE


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k with `right` of `samples`: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021,
    arXiv 2107.03374, section 2.1)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(samples_N: Sequence[Sampled]) -> float:
    """Return whether the most frequent answer is right (Wang et al. 2022, arXiv 2203.11171); ties give the expectation.
    Samples without an answer have no vote; no votes give 0."""
    votes: dict[str, list[bool]] = defaultdict(list)
    for sample in samples_N:
        if sample.answer is not None:
            votes[sample.answer].append(sample.right)
    most = max(map(len, votes.values()), default=0)
    winners = [np.mean(rights) for rights in votes.values() if len(rights) == most]
    return float(np.mean(winners)) if winners else 0.0


def default_ks(samples: int) -> list[int]:
    """Return the powers of two up to `samples`, and `samples`."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def metrics_of(
    prompts_P: Sequence[Sequence[Sampled]], ks: Sequence[int], *, judged: bool = True
) -> dict[str, Estimate]:
    """Return `mean@n`, `pass@k`, with several samples `majority@n`, and with partial credit `score@n`. `judged`: a
    scorer decides which answers are right; else `score@n` comes first. Raises ValueError if k exceeds n."""
    n = len(prompts_P[0])
    score = {f"score@{n}": lambda samples: float(np.mean([sample.score for sample in samples]))}
    values: dict[str, Callable[[Sequence[Sampled]], float]] = {} if judged else {**score}
    values[f"mean@{n}"] = lambda samples: float(np.mean([sample.right for sample in samples]))
    for k in ks:
        values[f"pass@{k}"] = lambda samples, k=k: pass_at_k(n, sum(sample.right for sample in samples), k)
    if n > 1:
        values[f"majority@{n}"] = majority
    if any(sample.score != sample.right for samples in prompts_P for sample in samples):
        values |= score
    return {name: Estimate.of([value(samples) for samples in prompts_P]) for name, value in values.items()}


def paired_difference(first: Estimate, other: Estimate, seed: int = 0) -> Difference:
    """Return `other` minus `one` on the same prompts, with a two-sided paired permutation test: exact for few prompts,
    else `PERMUTATIONS` draws of signs."""
    differences_P = np.asarray(other.values_P) - np.asarray(first.values_P)
    mean = Estimate.of(differences_P.tolist())
    observed = abs(differences_P.sum()) - 1e-9  # sums of the same numbers in another order are equal
    moved = differences_P[differences_P != 0]
    if len(moved) <= EXACT_PROMPTS:
        signs = 1 - 2 * ((np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))) & 1)
        return Difference(mean.value, mean.stderr, float(np.mean(np.abs(signs @ moved) >= observed)))
    generator, as_large = np.random.Generator(np.random.PCG64(seed)), 0
    for draws in np.array_split(np.arange(PERMUTATIONS), max(1, PERMUTATIONS * len(moved) // 10_000_000)):
        signs = generator.integers(0, 2, (len(draws), len(moved)), dtype=np.int8) * 2.0 - 1
        as_large += int(np.sum(np.abs(signs @ moved) >= observed))
    return Difference(mean.value, mean.stderr, (as_large + 1) / (PERMUTATIONS + 1))
