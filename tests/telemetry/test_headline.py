"""The headline of a run: validation where there is one, else the first and the last fifth of the steps."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlctl.telemetry.headline import Mean, change, headline


def lines(*rewards: float, **more: Any) -> list[dict[str, Any]]:
    return [{"step": step, "reward_mean": reward, **more} for step, reward in enumerate(rewards, 1)]


def test_a_run_that_validates_is_judged_by_its_first_and_last_validation() -> None:
    steps = lines(*[0.9] * 10)
    steps[0]["validation_at_start"] = {"reward_mean": 0.25, "reward_stderr": 0.1, "response_tokens_mean": 99.0}
    steps[4]["validation"] = {"reward_mean": 0.4, "reward_stderr": 0.1}
    steps[9]["validation"] = {"reward_mean": 0.5, "reward_stderr": 0.125}
    found = headline(steps)
    assert found is not None
    assert found.text() == "validation reward: 0.250 ± 0.100 before step 1, 0.500 ± 0.125 after step 10"
    assert change(steps[5:], "reward_mean") == change(steps[9:], "reward_mean")  # one validation: no first one
    only = headline(steps[9:])
    assert only is not None
    assert only.text() == "validation reward: 0.500 ± 0.125 after step 10"


def test_other_runs_are_judged_by_the_first_and_the_last_fifth_of_their_steps() -> None:
    steps = lines(0.0, 0.2, 0.4, *[9.0] * 6, 0.7, 0.8, 0.9)
    found = headline(steps)
    assert found is not None
    assert (found.first, found.last) == (
        Mean(pytest.approx(0.2), pytest.approx(0.2 / math.sqrt(3))),
        Mean(pytest.approx(0.8), pytest.approx(0.1 / math.sqrt(3))),
    )
    assert found.text() == "training reward: 0.200 ± 0.115 in steps 1 to 3, 0.800 ± 0.058 in steps 10 to 12"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "training reward: 1.000 in step 1"),
        (2, "training reward: 1.000 in step 1, 2.000 in step 2"),
        (3, "training reward: 1.000 in step 1, 3.000 in step 3"),
        (5, "training reward: 1.500 ± 0.500 in steps 1 to 2, 4.500 ± 0.500 in steps 4 to 5"),
    ],
)
def test_few_steps_have_the_noise_that_they_can_tell(count: int, text: str) -> None:
    found = headline(lines(*map(float, range(1, count + 1))))
    assert found is not None
    assert found.text() == text


def test_a_run_without_rewards_is_judged_by_its_loss() -> None:
    found = headline([{"step": step, "loss": 100.0 * step} for step in (1, 2)])
    assert found is not None
    assert found.text() == "training loss: 100.0 in step 1, 200.0 in step 2"
    assert headline([{"step": 1}]) is None
    assert headline([]) is None
