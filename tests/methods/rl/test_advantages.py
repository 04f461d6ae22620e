"""Advantages and token weights against plain-Python float64 references written from the papers."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from rlctl.methods.rl.advantages import (
    STD_EPSILON,
    Baseline,
    StdOf,
    group_advantages,
    overlong_penalty,
    whitened,
    whitened_rollouts,
)
from rlctl.training.train_batch import token_weights


@pytest.mark.parametrize("baseline", ["mean", "leave-one-out", "none"])
def test_equal_rewards_have_no_advantage(baseline: str) -> None:
    got = group_advantages(np.full(6, 0.1), baseline)
    np.testing.assert_allclose(got, 0.0, atol=1e-9)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        group_advantages(np.array([1.0]))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_empty_response_weighs_nothing(level: str) -> None:
    weights_N = token_weights(np.array([0, 2]), level)
    assert weights_N[0] == 0
    assert weights_N[1] == 0.5
    assert (token_weights(np.array([0, 0]), level) == 0).all()


@pytest.mark.parametrize("size", [3, 5, 6, 8, 11])
def test_rounding_gives_equal_rewards_no_advantage_at_all(size: int) -> None:
    """The mean of equal numbers is not always that number, and 1e-17 / 1e-6 would be a gradient."""
    for baseline in ("mean", "leave-one-out"):
        for reward in (0.1, 0.7, 1 / 3):
            assert not group_advantages(np.full(size, reward), baseline).any()


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 0.0]])
def test_leave_one_out_can_divide_by_the_deviation_of_the_others(rewards: list[float]) -> None:
    """NeMo-RL's: (r - mean) / (std + 1e-6), both of the other rollouts, or r - mean where their std is 0."""
    expected = []
    for index, reward in enumerate(rewards):
        others = rewards[:index] + rewards[index + 1 :]
        std = statistics.stdev(others) if len(others) > 1 else 0.0
        expected.append((reward - statistics.fmean(others)) / (std + 1e-6 if std > 0 else 1.0))
    got = group_advantages(np.array(rewards), "leave-one-out", std_of="others")
    np.testing.assert_allclose(got, expected, rtol=1e-12)


NEARLY = [0.1 + 0.2, 0.3, 0.1 * 3, float(np.float32(0.1) + np.float32(0.2)), float(np.float32(0.3))]
"""The number 0.3, as sums in float64 and float32 come to it."""


def test_rewards_that_differ_by_rounding_are_equal_wherever_they_are_compared() -> None:
    """As where they are the same to the last bit: by NeMo-RL's formula the one that is right has 1 - 0.3, which nothing
    divides since the others have no deviation. For the others it is (r - mean) / std of the others, as ever."""
    for shift in (0.0, -0.3, 1000.0):  # 0.1 + 0.2 - 0.3 is not 0
        equal = [value + shift for value in NEARLY]
        got = group_advantages(np.array([*equal, 1.0 + shift]), "leave-one-out", std_of="others")
        rest = [0.3] * (len(equal) - 1) + [1.0]
        expected = (0.3 - statistics.fmean(rest)) / (statistics.stdev(rest) + 1e-6)
        np.testing.assert_allclose(got, [*[expected] * len(equal), 0.7], rtol=1e-3)
        for baseline in ("mean", "leave-one-out"):
            for normalize in (True, False):
                assert not group_advantages(np.array(equal), baseline, normalize).any()
        assert not whitened_rollouts(np.array(equal)).any()
        assert not whitened(np.array(equal), np.arange(1, 6)).any()
    assert group_advantages(np.array([1e6, 1e6 + 1, 1e6]), "mean", False).any()
    assert group_advantages(np.array([0.3, 0.30001]), "mean", False).any()


def test_whitening_over_rollouts_counts_each_once() -> None:
    """GDPO in NeMo-RL: (A - mean(A)) / std(A) over the rollouts of the batch, with one degree of freedom less."""
    advantages = [1.0, -0.5, 0.25, 3.0]
    mean, std = statistics.fmean(advantages), statistics.stdev(advantages)
    got = whitened_rollouts(np.array(advantages))
    np.testing.assert_allclose(got, [(value - mean) / std for value in advantages], rtol=1e-12)
    assert not whitened_rollouts(np.full(5, 0.1)).any()


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


@pytest.mark.parametrize("baseline", ["mean", "leave-one-out", "none"])
@pytest.mark.parametrize("std_of", ["group", "others"])
def test_advantages_of_groups_together_follow_the_formula_of_each(baseline: Baseline, std_of: StdOf) -> None:
    """The formulas in plain Python, a group at a time; group 1 has equal rewards, group 2 all but one."""
    rewards_PG = np.array(
        [[0.0, 1.0, 0.25, 0.5], [0.3, 0.3, 0.1 + 0.2, 0.3], [1.0, 0.0, 0.0, 0.0], [-2.0, 3.0, 5.0, 1.0]]
    )
    for got_G, rewards_G in zip(group_advantages(rewards_PG, baseline, True, std_of), rewards_PG.tolist(), strict=True):
        for index, reward in enumerate(rewards_G):
            others = rewards_G[:index] + rewards_G[index + 1 :]
            base = {"mean": statistics.mean(rewards_G), "leave-one-out": statistics.mean(others), "none": 0.0}[baseline]
            compared = rewards_G if std_of == "group" else others
            deviation = statistics.stdev(compared) + STD_EPSILON if max(compared) - min(compared) > 1e-9 else 1.0
            expected = 0.0 if max(rewards_G) - min(rewards_G) < 1e-9 else (reward - base) / deviation
            assert got_G[index] == pytest.approx(expected, rel=1e-12, abs=1e-12)
