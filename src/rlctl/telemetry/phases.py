"""The phases of a step, shared by terminal, metrics, report and planner, and their timer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from enum import StrEnum


class Phase(StrEnum):
    """Driver wall time, disjoint; the parts of a step add up to its total."""

    GENERATION = "generation"
    REWARD = "reward"
    WAITING = "waiting"
    """The policy waits for rollouts that are made while it trains."""
    LOGPROBS = "logprobs"
    CRITIC = "critic"
    """Token values and training of the critic, if any."""
    TRAINING = "training"
    REFIT = "refit"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    OTHER = "other"


ASIDE = frozenset({Phase.CHECKPOINT, Phase.VALIDATION})
"""Phases that make and train on no tokens of the step: `tokens_per_s` leaves them out."""


class RefitPhase(StrEnum):
    """Parts of a refit, reported in `refit_seconds`."""

    OFFLOAD = "offload"
    """The policy's gradients and optimizer make room, where devices are shared."""
    WAKE = "wake"
    """Engines bring samples in flight to a stop and take their weights back from host memory."""
    EXCHANGE = "exchange"
    """Policy ranks wait for other nodes' boxes, if any."""
    PACK = "pack"
    """Engines wait for policy ranks to fill memory that both see."""
    TRANSFER = "transfer"
    """The same with movers that send messages or files."""
    LOAD = "load"
    CACHE_RESET = "cache_reset"


class StepTimer:
    """Times one step after another. A phase entered inside another one is counted to the inner one only."""

    def __init__(self) -> None:
        self.watch: Callable[[Phase], None] = lambda phase: None
        """Called with each beginning phase, and with the outer one at its end."""
        self.restart()

    def restart(self) -> None:
        self._start = self._mark = time.perf_counter()
        self._open: list[Phase] = [Phase.OTHER]
        self._seconds = dict.fromkeys(Phase, 0.0)

    @contextlib.contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Count the block to `phase`."""
        self._count()
        self._open.append(phase)
        self.watch(phase)
        try:
            yield
        finally:
            self._count()
            self._open.pop()
            self.watch(self._open[-1])

    def _count(self) -> None:
        now = time.perf_counter()
        self._seconds[self._open[-1]] += now - self._mark
        self._mark = now

    def seconds(self) -> dict[str, float]:
        """Return the seconds of the step so far by phase, and their sum as `total`."""
        self._count()
        return {**{phase.value: value for phase, value in self._seconds.items()}, "total": self._mark - self._start}
