"""Advantages and token weights against plain-Python float64 references written from the papers."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from rlctl.rl.advantages import group_advantages, token_weights

REWARDS_P_G = [[1.0, 0.0, 0.0, 0.5], [0.2, 0.2, 0.9, -3.0], [1.0, 1.0, 1.0, 0.0]]


def flat(rewards_P_G: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    groups = [group for group, rewards in enumerate(rewards_P_G) for _ in rewards]
    return np.array([reward for rewards in rewards_P_G for reward in rewards]), np.array(groups)


def test_mean_baseline_with_std_is_grpo() -> None:
    """DeepSeekMath (2402.03300) 4.1.2: (r_i - mean(r)) / std(r)."""
    rewards_N, groups_N = flat(REWARDS_P_G)
    expected = [
        (reward - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6)
        for rewards in REWARDS_P_G
        for reward in rewards
    ]
    np.testing.assert_allclose(group_advantages(rewards_N, groups_N), expected, rtol=1e-12)


def test_mean_baseline_without_std_is_dr_grpo() -> None:
    """Dr. GRPO (2503.20783) section 3.2: r_i - mean(r)."""
    rewards_N, groups_N = flat(REWARDS_P_G)
    expected = [reward - statistics.fmean(rewards) for rewards in REWARDS_P_G for reward in rewards]
    np.testing.assert_allclose(group_advantages(rewards_N, groups_N, normalize_std=False), expected, rtol=1e-12)


def test_leave_one_out_is_rloo() -> None:
    """RLOO (2402.14740) equation 7: r_i - mean of the other k - 1 rewards."""
    rewards_N, groups_N = flat(REWARDS_P_G)
    expected = [
        rewards[i] - statistics.fmean(rewards[:i] + rewards[i + 1 :])
        for rewards in REWARDS_P_G
        for i in range(len(rewards))
    ]
    got = group_advantages(rewards_N, groups_N, "leave-one-out", normalize_std=False)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)


def test_groups_may_be_interleaved_and_differ_in_size() -> None:
    rewards_N = np.array([1.0, 5.0, 0.0, 7.0, 2.0])
    groups_N = np.array([9, 4, 9, 4, 9])
    got = group_advantages(rewards_N, groups_N, normalize_std=False)
    np.testing.assert_allclose(got, [0.0, -1.0, -1.0, 1.0, 1.0], atol=1e-15)


@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
def test_equal_rewards_have_no_advantage(baseline: str) -> None:
    got = group_advantages(np.full(6, 0.1), np.zeros(6, dtype=int), baseline)
    np.testing.assert_allclose(got, 0.0, atol=1e-9)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        group_advantages(np.array([1.0, 0.0, 1.0]), np.array([0, 0, 1]))


def test_rewards_and_groups_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rewards for 2"):
        group_advantages(np.zeros(3), np.zeros(2, dtype=int))


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
