"""The order of prompts: shuffled epochs that the seed fixes, so that a step's prompts follow from its number alone."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


class PromptOrder:
    """Epoch after epoch over `size` prompts; every epoch holds each prompt once, in an order of its own.

    A position counts prompts from the start of the run. Nothing is consumed: a resumed run asks for the next step.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        if size < 1:
            raise ValueError("an order needs at least one prompt")
        self.size, self.seed, self.shuffle = size, seed, shuffle

    def at(self, position: int) -> int:
        """Row of the source at `position`."""
        epoch, offset = divmod(position, self.size)
        return int(_permutation(self.size, self.seed, epoch)[offset]) if self.shuffle else offset

    def step(self, step: int, prompts: int) -> list[int]:
        """Rows of step `step` (from 0), when every step takes `prompts` of them. A step may span two epochs."""
        return [self.at(position) for position in range(step * prompts, (step + 1) * prompts)]


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """Order of one epoch, int64 [size].

    Sorts raw 64-bit draws: numpy keeps the streams of its bit generators the same between versions, but not what
    `Generator.permutation` makes of them.
    """
    draws = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    return np.argsort(draws, kind="stable")
