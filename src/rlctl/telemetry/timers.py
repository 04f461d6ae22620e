"""Where the time of a step goes: disjoint phases of the driver's wall clock that add up to its total."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rlctl.telemetry.phases import Phase


class StepTimer:
    """Times one step. A phase entered inside another one is counted to the inner one only."""

    def __init__(self) -> None:
        self._start = self._mark = time.perf_counter()
        self._open: list[Phase] = [Phase.OTHER]
        self._seconds = dict.fromkeys(Phase, 0.0)

    @contextlib.contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Count the block to `phase`."""
        self._count()
        self._open.append(phase)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        self._seconds[self._open[-1]] += now - self._mark
        self._mark = now

    def seconds(self) -> dict[str, float]:
        """Seconds by phase so far, and their sum as `total`."""
        self._count()
        return {**{phase.value: value for phase, value in self._seconds.items()}, "total": self._mark - self._start}
