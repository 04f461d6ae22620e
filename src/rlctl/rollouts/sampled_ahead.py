"""Rollouts of one run of a sweep, sampled by its own engines while the policy trains the other runs.

The rollouts are made from the run's newest weights and in the order of their positions, so they are those that would be
made when the batch is due.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlctl.errors import WaitTimeoutError, WorkerError
from rlctl.refit.sync import WeightSync
from rlctl.rollouts.source import Batch, RolloutSource
from rlctl.telemetry.phases import Phase, StepTimer


class SampledAhead:
    """A synchronous source whose next batch can begin before it is due; methods as in `RolloutSource`."""

    def __init__(self, source: RolloutSource, sync: WeightSync, timer: StepTimer) -> None:
        """`source` has another timer, because it works while other runs are timed."""
        self._source, self._sync, self._timer = source, sync, timer
        self._pending: Future[Batch] | None = None
        self._state: dict[str, Any] = {}
        """The state of `source` before the pending batch, which no step has trained on."""

    def begin(self, version: int) -> None:
        """Begin the next batch, for a policy with weights `version`, which the engines have."""
        self._state = self._source.state()
        self._pending = pending = Future[Batch]()
        self._sync.policy_elsewhere = True
        threading.Thread(target=self._make, args=(pending, version), daemon=True).start()

    def _make(self, pending: Future[Batch], version: int) -> None:
        try:
            pending.set_result(self._source.next(version))
        except BaseException as error:  # noqa: BLE001 - whatever it is, `next` raises it
            pending.set_exception(error)

    def next(self, version: int) -> Batch:
        """Return the batch, waiting for one that has begun. The policy has the run's adapter again."""
        pending = self._pending
        with self._timer(Phase.WAITING):
            if pending is None:
                return self._source.next(version)
            try:
                return pending.result()
            except (WorkerError, WaitTimeoutError) as error:
                self._sync.policy_elsewhere = False
                self._sync.recover(error, version)
                return self._source.next(version)
            finally:
                self._sync.policy_elsewhere, self._pending = False, None

    def state(self) -> dict[str, Any]:
        return self._source.state() if self._pending is None else self._state

    def write(self, directory: Path) -> None:
        self._source.write(directory)

    def restore(self, state: Mapping[str, Any], directory: Path) -> None:
        self._source.restore(state, directory)

    def close(self) -> None:
        """Wait for the pending batch, whose engines are to stop."""
        if self._pending is not None:
            self._pending.exception()
