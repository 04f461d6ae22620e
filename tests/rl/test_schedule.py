"""The learning rate over the steps of a run."""

from __future__ import annotations

import math

import pytest

from rlctl.config.schema import SchedulerConfig
from rlctl.rl.schedule import learning_rate


def rates(steps: int, **scheduler) -> list[float]:
    return [learning_rate(step, steps, 2e-5, SchedulerConfig(**scheduler)) for step in range(steps)]


def test_constant_without_warm_up() -> None:
    assert rates(5) == [2e-5] * 5


def test_warm_up_rises_linearly_to_the_peak_and_wastes_no_step() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([0.5e-5, 1e-5, 1.5e-5, 2e-5, 2e-5, 2e-5])


def test_linear_decay() -> None:
    assert rates(4, decay="linear") == pytest.approx([2e-5, 1.5e-5, 1e-5, 0.5e-5])
    assert rates(4, decay="linear", min_lr=1e-5) == pytest.approx([2e-5, 1.75e-5, 1.5e-5, 1.25e-5])


def test_cosine_decay_after_warm_up() -> None:
    """SGDR (1608.03983) equation 5: min + (max - min) (1 + cos(pi T_cur / T)) / 2."""
    expected = [1e-5, 2e-5] + [1e-6 + 19e-6 * (1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)]
    assert rates(10, decay="cosine", warmup_steps=2, min_lr=1e-6) == pytest.approx(expected)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_stays_at_the_minimum_past_the_end(decay: str) -> None:
    scheduler = SchedulerConfig(decay=decay, min_lr=1e-7)
    assert learning_rate(50, 10, 1e-5, scheduler) == pytest.approx(1e-7)


def test_warm_up_longer_than_the_run_never_reaches_the_peak() -> None:
    assert rates(3, warmup_steps=10, decay="cosine") == pytest.approx([2e-6, 4e-6, 6e-6])
