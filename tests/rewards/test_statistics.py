"""Metrics of samples against their definitions by enumeration, and the paired test against chance."""

from __future__ import annotations

import itertools
import math
from itertools import combinations, product

import numpy as np
import pytest

from rlctl.rewards.statistics import (
    Estimate,
    Sampled,
    default_ks,
    majority,
    metrics_of,
    paired_difference,
    pass_at_k,
)


@pytest.mark.parametrize(("samples", "right", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (6, 6, 4), (4, 3, 4), (7, 1, 5)])
def test_pass_at_k_is_the_share_of_all_draws_with_a_right_sample(samples: int, right: int, k: int) -> None:
    draws = list(itertools.combinations(range(samples), k))
    share = sum(any(index < right for index in draw) for draw in draws) / len(draws)
    assert pass_at_k(samples, right, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow() -> None:
    assert pass_at_k(5000, 1, 2500) == pytest.approx(0.5)


def voted(*answers: str | None, right: str = "7") -> list[Sampled]:
    return [Sampled(answer == right, float(answer == right), answer) for answer in answers]


@pytest.mark.parametrize(
    ("answers", "value"),
    [
        (["7", "7", "8"], 1.0),
        (["7", "8", "8"], 0.0),
        (["7", "8"], 0.5),
        (["7", "8", "9", None], 1 / 3),
        ([None, None, "7"], 1.0),
        ([None, None], 0.0),
    ],
)
def test_majority_counts_answers_and_shares_ties(answers: list[str | None], value: float) -> None:
    assert majority(voted(*answers)) == pytest.approx(value)


def test_standard_errors_are_clustered_by_prompt() -> None:
    """Samples of a prompt that always agree say no more than one of them."""
    alike = [[Sampled(right, float(right), str(right))] * 8 for right in (True, False, True, True)]
    found = metrics_of(alike, default_ks(8))
    assert set(found) == {"mean@8", "pass@1", "pass@2", "pass@4", "pass@8", "majority@8"}
    expected = np.std([1, 0, 1, 1], ddof=1) / math.sqrt(4)
    for estimate in found.values():
        assert (estimate.value, estimate.stderr) == (pytest.approx(0.75), pytest.approx(expected))
    assert metrics_of(alike[:1], [1])["mean@8"].stderr is None


def test_pass_at_k_is_no_bootstrap() -> None:
    """verl 0.9.1 draws with replacement (best@4/mean 0.687 of 1,000 draws); pass@k is drawn without (2107.03374)."""
    samples, draws = [1, 0, 0, 0], list(product(range(4), repeat=4))
    assert np.mean([max(samples[place] for place in draw) for draw in draws]) == pytest.approx(1 - 0.75**4)
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 1, 2) == pytest.approx(np.mean([max(pair) for pair in combinations(samples, 2)]))


def test_part_of_the_credit_has_a_metric_of_its_own() -> None:
    found = metrics_of([[Sampled(True, 1.0)], [Sampled(False, 0.5)]], [1])
    assert found["mean@1"].value == 0.5
    assert found["score@1"].value == 0.75
    assert "majority@1" not in found


def test_rewards_that_call_nothing_right_are_compared_by_their_mean() -> None:
    """A function whose values stay below 1 calls no completion right, before or after training."""
    before, after = ([[Sampled(False, value + prompt / 100)] for prompt in range(8)] for value in (0.3, 0.6))
    one, other = (metrics_of(prompts, [1], judged=False) for prompts in (before, after))
    assert [*one] == ["score@1", "mean@1", "pass@1"]
    assert paired_difference(one["mean@1"], other["mean@1"]).p == 1
    found = paired_difference(one["score@1"], other["score@1"])
    assert (found.value, found.p) == (pytest.approx(0.3), pytest.approx(2 / 2**8))
    assert [*metrics_of([[Sampled(True, 1.0)]], [1], judged=False)] == ["score@1", "mean@1", "pass@1"]


def test_a_paired_test_of_few_prompts_is_the_sign_test() -> None:
    """All of 6 prompts better by as much: of 64 sign changes two are as extreme."""
    one, other = Estimate.of([0.0] * 6), Estimate.of([1.0] * 6)
    found = paired_difference(one, other)
    assert (found.value, found.p) == (1.0, pytest.approx(2 / 64))
    assert found.beyond_noise
    assert paired_difference(one, one).p == 1.0
    assert paired_difference(Estimate.of([0.0] * 5), Estimate.of([1.0] * 5)).p == pytest.approx(2 / 32)


def test_drawn_and_counted_permutations_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    one, other = Estimate.of(generator.random(12).tolist()), Estimate.of((generator.random(12) + 0.2).tolist())
    exact = paired_difference(one, other).p
    monkeypatch.setattr("rlctl.rewards.statistics.EXACT_PROMPTS", 3)
    assert paired_difference(one, other).p == pytest.approx(exact, abs=0.02)


def test_models_that_are_alike_are_called_different_no_more_often_than_is_said() -> None:
    generator = np.random.default_rng(1)
    calls = 0
    for _ in range(80):
        chances = generator.random(60)
        one, other = (Estimate.of((generator.random(60) < chances).astype(float).tolist()) for _ in range(2))
        calls += paired_difference(one, other).beyond_noise
    assert calls / 80 < 0.12
