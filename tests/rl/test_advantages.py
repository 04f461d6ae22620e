"""Advantages and token weights against plain-Python float64 references written from the papers."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from rlctl.rl.advantages import group_advantages, overlong_penalty, token_weights, whitened

REWARDS_P_G = [[1.0, 0.0, 0.0, 0.5], [0.2, 0.2, 0.9, -3.0], [1.0, 1.0, 1.0, 0.0]]


@pytest.mark.parametrize("rewards", REWARDS_P_G)
def test_mean_baseline_with_std_is_grpo(rewards: list[float]) -> None:
    """DeepSeekMath (2402.03300) 4.1.2: (r_i - mean(r)) / std(r)."""
    expected = [(reward - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6) for reward in rewards]
    np.testing.assert_allclose(group_advantages(np.array(rewards)), expected, rtol=1e-12)


@pytest.mark.parametrize("rewards", REWARDS_P_G)
def test_mean_baseline_without_std_is_dr_grpo(rewards: list[float]) -> None:
    """Dr. GRPO (2503.20783) section 3.2: r_i - mean(r)."""
    expected = [reward - statistics.fmean(rewards) for reward in rewards]
    got = group_advantages(np.array(rewards), normalize_std=False)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("rewards", REWARDS_P_G)
def test_leave_one_out_is_rloo(rewards: list[float]) -> None:
    """RLOO (2402.14740) equation 7: r_i - mean of the other k - 1 rewards."""
    expected = [rewards[i] - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
    got = group_advantages(np.array(rewards), "leave-one-out", normalize_std=False)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("baseline", ["mean", "leave-one-out", "none"])
def test_equal_rewards_have_no_advantage(baseline: str) -> None:
    got = group_advantages(np.full(6, 0.1), baseline)
    np.testing.assert_allclose(got, 0.0, atol=1e-9)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        group_advantages(np.array([1.0]))


def test_token_level_weights_average_over_all_tokens() -> None:
    """DAPO (2503.14476) equation 8: 1 / sum_i |o_i| for every token."""
    lengths, losses = [3, 1, 4], [[1.0, 2.0, 3.0], [10.0], [0.5, 0.5, 0.5, 4.0]]
    weights_N = token_weights(np.array(lengths), "token")
    total = sum(weight * loss for weight, row in zip(weights_N, losses, strict=True) for loss in row)
    assert math.isclose(total, statistics.fmean(loss for row in losses for loss in row), rel_tol=1e-12)


def test_sequence_level_weights_average_sequence_means() -> None:
    """DeepSeekMath (2402.03300) equation 3: 1/G sum_i 1/|o_i| sum_t."""
    lengths, losses = [3, 1, 4], [[1.0, 2.0, 3.0], [10.0], [0.5, 0.5, 0.5, 4.0]]
    weights_N = token_weights(np.array(lengths), "sequence")
    total = sum(weight * loss for weight, row in zip(weights_N, losses, strict=True) for loss in row)
    assert math.isclose(total, statistics.fmean(statistics.fmean(row) for row in losses), rel_tol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_empty_response_weighs_nothing(level: str) -> None:
    weights_N = token_weights(np.array([0, 2]), level)
    assert weights_N[0] == 0
    assert weights_N[1] == 0.5
    assert (token_weights(np.array([0, 0]), level) == 0).all()


@pytest.mark.parametrize("level_divisor", [1.0, 7.0])
def test_constant_level_weights_divide_every_sum_by_the_same(level_divisor: float) -> None:
    """Dr. GRPO (2503.20783) section 3.1: 1/N sum_i 1/L sum_t; with L = 1 the sums of REINFORCE and RLOO."""
    lengths, losses = [3, 1, 4], [[1.0, 2.0, 3.0], [10.0], [0.5, 0.5, 0.5, 4.0]]
    weights_N = token_weights(np.array(lengths), "constant", level_divisor)
    total = sum(weight * loss for weight, row in zip(weights_N, losses, strict=True) for loss in row)
    assert math.isclose(total, statistics.fmean(sum(row) / level_divisor for row in losses), rel_tol=1e-12)


@pytest.mark.parametrize("size", [3, 5, 6, 8, 11])
def test_rounding_gives_equal_rewards_no_advantage_at_all(size: int) -> None:
    """The mean of equal numbers is not always that number, and 1e-17 / 1e-6 would be a gradient."""
    for baseline in ("mean", "leave-one-out"):
        for reward in (0.1, 0.7, 1 / 3):
            assert not group_advantages(np.full(size, reward), baseline).any()


def test_without_a_baseline_rewards_stay_as_they_are() -> None:
    rewards_G = np.array(REWARDS_P_G[0])
    np.testing.assert_array_equal(group_advantages(rewards_G, "none", normalize_std=False), rewards_G)


def test_whitening_is_over_the_tokens_of_the_batch() -> None:
    """REINFORCE++ (2501.03262): (A - mean(A)) / std(A), A the advantages of all tokens."""
    advantages, lengths = [1.0, -0.5, 0.25, 3.0], [3, 1, 4, 0]
    tokens = [value for value, n in zip(advantages, lengths, strict=True) for _ in range(n)]
    mean, std = statistics.fmean(tokens), statistics.pstdev(tokens)
    got = whitened(np.array(advantages), np.array(lengths))
    np.testing.assert_allclose(got[:3], [(value - mean) / (std + 1e-6) for value in advantages[:3]], rtol=1e-12)


def test_a_batch_of_equal_advantages_has_nothing_to_whiten() -> None:
    assert not whitened(np.full(5, 0.1), np.array([3, 1, 4, 1, 5])).any()
    assert not whitened(np.array([1.0, 2.0]), np.array([0, 0])).any()


def overlong(length: float, limit: float, cache: float) -> float:
    """DAPO (2503.14476) equation 13."""
    if length <= limit - cache:
        return 0.0
    return (limit - cache - length) / cache if length <= limit else -1.0


def test_the_soft_overlong_penalty_is_that_of_dapo() -> None:
    lengths = [0, 1, 1600, 1601, 1800, 2000]
    expected = [0.5 * overlong(length, 2000, 400) for length in lengths]
    np.testing.assert_allclose(overlong_penalty(np.array(lengths), 2000, 0.2, 0.5), expected, rtol=1e-12)
    assert expected[-1] == -0.5
    assert not overlong_penalty(np.array(lengths), 2000, 0.0, 1.0).any()
