"""A text game of several turns: `--env game.py:HigherLower`."""

import random

from rlctl.environments.interface import Step

EXAMPLE = [
    {"role": "system", "content": "Guess a number from 1 to 8. Write one number alone."},
    {"role": "user", "content": "Guess."},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "higher"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "lower"},
    {"role": "assistant", "content": "6"},
    {"role": "user", "content": "Right. A new number: guess."},
]


class HigherLower:
    """The model guesses a number; the environment answers `higher` or `lower`. The prompt shows one game."""

    def reset(self, row, seed):
        self.number = random.Random(seed).randint(1, 8)
        return EXAMPLE

    def step(self, message):
        guess = message["content"].strip()
        if not guess.isdecimal():
            return Step("Write one number alone.", metrics={"unreadable": 1})
        if int(guess) == self.number:
            return Step(reward=1.0, done=True, metrics={"found": 1})
        return Step("higher" if int(guess) < self.number else "lower")
