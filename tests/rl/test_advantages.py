"""Advantages and token weights against plain-Python float64 references written from the papers."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from rlctl.rl.advantages import group_advantages, token_weights

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


@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
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
    assert weights_N[1] == (0.5 if level == "token" else 0.25)
    assert (token_weights(np.array([0, 0]), level) == 0).all()
