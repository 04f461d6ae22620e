"""Guess a number with hints: several turns, and a final reward."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from rlctl.environments.interface import Message, Step

RULES = (
    "You guess my number, from 1 to {largest}. I say higher, lower or right. Say one number and nothing else.\n\n"
    "For example:\nGuess.\n5\nhigher\n7\nlower\n6\nright\n\nA new number. Guess."
)


class GuessNumber:
    """A number from 1 to `largest`, to be found in `guesses` turns. Anything that is not a guess loses."""

    def __init__(self, largest: int = 9, guesses: int = 4) -> None:
        self.largest, self.guesses = largest, guesses

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        self.number, self.left = random.Random(seed).randint(1, self.largest), self.guesses
        return [{"role": "user", "content": RULES.format(largest=self.largest)}]

    def step(self, message: Message) -> Step:
        text = message["content"].strip().rstrip(".")
        guess = int(text) if text.isdecimal() and len(text) < 10 else 0
        self.left -= 1
        if guess == self.number:
            return Step(reward=1.0, done=True)
        valid = 1 <= guess <= self.largest
        hint = "higher" if guess < self.number else "lower"
        return Step(hint, done=not valid or self.left == 0, metrics={"invalid": float(not valid)})
