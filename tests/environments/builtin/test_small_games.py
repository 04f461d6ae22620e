"""The built-in environments of a few lines, driven directly."""

from __future__ import annotations

import re
from typing import Any

from rlctl.environments.builtin.calculator import Calculator
from rlctl.environments.builtin.guess_number import GuessNumber

NO_ROW: dict[str, Any] = {"prompt": [], "answer": None}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_sum_is_right_with_the_calculator_and_without() -> None:
    one = Calculator()
    *_, asked = one.reset(NO_ROW, seed=3)
    a, b = map(int, re.findall(r"\d+", asked["content"]))
    assert 10 <= min(a, b) <= max(a, b) <= 99
    told = one.step(said(f"<calc>{a} + {b}</calc>"))
    assert (told.messages, told.done, told.metrics) == (f"Result: {a + b}", False, {"calls": 1.0})
    ended = one.step(said(f"It is {a + b}."))
    assert (ended.reward, ended.done, ended.metrics) == (1.0, True, {"right_after_a_call": 1.0})
    assert Calculator().reset(NO_ROW, seed=3)[-1] == asked
    other = Calculator()
    other.reset(NO_ROW, seed=3)
    assert other.step(said(f"{a} + {b} is {a + b + 1}")).reward == 0.0


def test_calls_beyond_the_limit_are_answers_and_rows_bring_their_own_questions() -> None:
    one = Calculator(calls=1)
    assert one.reset({"prompt": "What is 1 + 2?", "answer": 3}, seed=0) == []
    assert not one.step(said("<calc>1 + 2</calc>")).done
    last = one.step(said("<calc>1 + 3"))
    assert (last.done, last.reward) == (True, 1.0)


def test_a_number_is_found_by_halving_and_lost_by_talking() -> None:
    for seed in range(12):
        one = GuessNumber()
        one.reset(NO_ROW, seed)
        low, high, reward = 1, 9, 0.0
        while not reward:
            guess = (low + high) // 2
            step = one.step(said(f" {guess}\n"))
            reward = step.reward
            assert reward == 1.0 or not step.done
            low, high = (guess + 1, high) if step.messages == "higher" else (low, guess - 1)
    one = GuessNumber(guesses=2)
    one.reset(NO_ROW, 0)
    wrong = 1 if one.number > 1 else 2
    assert [one.step(said(str(wrong))).done for _ in range(2)] == [False, True]
    one.reset(NO_ROW, 0)
    lost = one.step(said("I think it is 5"))
    assert (lost.done, lost.reward, lost.metrics) == (True, 0.0, {"invalid": 1.0})
