"""The interface through which the loop reports on a run."""

from __future__ import annotations

from typing import Any, Protocol

from rlctl.refit.records import RefitReport
from rlctl.rollouts.source import Batch
from rlctl.rollouts.validation import Validated


class Journal(Protocol):
    """Receives a run's status messages and metrics."""

    def doing(self, activity: str) -> None:
        """Show the run's current activity."""

    def begin_step(self, step: int) -> None:
        """Show the start of a step (counted from 1); the timer reports its phases."""

    def say(self, text: str) -> None:
        """Show a message that stays on the terminal."""

    def refitted(self, report: RefitReport) -> None:
        """Report the first refit."""

    def keep_rollouts(self, step: int, batch: Batch) -> None:
        """Write some rollouts of a step to the run directory."""

    def validated(self, step: int, result: Validated) -> None:
        """Report a validation after `step` finished steps, and write some of its samples."""

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Write and show the metrics of a finished step."""
