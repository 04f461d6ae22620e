"""An environment of several turns: `--env game.py:HigherLower`."""

import random

from rlctl.environments.interface import Step


class HigherLower:
    """The model guesses a number; the environment answers `higher` or `lower`."""

    def __init__(self, largest=20):  # --set environment.params.largest=50
        self.largest = largest

    def reset(self, row, seed):
        self.number = random.Random(seed).randint(1, self.largest)
        return f"Guess a number from 1 to {self.largest}. Write the number alone."

    def step(self, message):
        guess = message["content"].strip()
        if message["stop_reason"] == "length" or not guess.isdecimal():
            return Step("Write one number alone.", metrics={"unreadable": 1})
        if int(guess) == self.number:
            return Step(reward=1.0, done=True)
        return Step("higher" if int(guess) < self.number else "lower")
