"""The generation engines of a run: refitted together, and brought back when one of them is lost.

An engine is lost when its process, or one that it computes with, is gone or does not answer. A new one takes its place
(or the others go on without it), the refit session is formed again, and a full refit that is compared tensor by tensor
brings all of them to the policy's weights. The trainers stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from rlctl.cluster.workers import WorkerGroup
from rlctl.errors import RlctlError, WaitTimeoutError, WorkerError
from rlctl.refit.records import RefitReport
from rlctl.refit.session import RefitSession
from rlctl.rl.devices import DeviceTurns, Turn
from rlctl.telemetry.phases import RefitPhase

ANSWER_TIMEOUT_S = 60.0


class EngineKeeper:
    """Refits engines, and replaces those that are lost, at most `restarts` times."""

    def __init__(
        self,
        engines: WorkerGroup,
        session: RefitSession,
        turns: DeviceTurns,
        *,
        restarts: int,
        start_timeout_s: float,
        tell: Callable[[str], None],
    ) -> None:
        """`tell` hears of every loss and of what became of it."""
        self.engines, self.session, self.turns, self.tell = engines, session, turns, tell
        self.restarts, self.start_timeout_s = restarts, start_timeout_s
        self.lost_so_far = 0

    def refit(self, version: int) -> RefitReport:
        """Bring the policy's weights into every engine as `version`, also where an engine is lost on the way."""
        begun = time.perf_counter()
        self.turns.to_weights()
        offloaded_s = time.perf_counter() - begun
        try:
            report = self.session.refit(version)
        except (WorkerError, WaitTimeoutError) as error:
            return self.recover(error, version)
        return replace(report, seconds={RefitPhase.OFFLOAD: offloaded_s} | report.seconds)

    def recover(self, error: RlctlError, version: int) -> RefitReport:
        """After `error`: replace the engines that are lost, and bring all to `version`, which the policy holds.

        The devices are whose they were before. Raises `error` where no engine is lost, and WorkerError with the words
        of `error` where too many were.
        """
        generating = self.turns.turn is Turn.ENGINES
        while True:
            lost = self._lost()
            if not lost:
                raise error
            self._count(error, lost)
            try:
                self.turns.make_room()
                self._replace(lost)
                self.turns.to_policy()
                self.turns.to_weights()
                self.session.reform(self.engines)
                report = self.session.refit(version, verify=True)
                if generating:
                    self.turns.to_engines()
            except (WorkerError, WaitTimeoutError) as another:
                error = another
                continue
            self.tell(
                f"{len(self.engines)} engine(s) hold version {version} again: {report.bytes / 1e6:.0f} MB in "
                f"{sum(report.seconds.values()):.1f} s, {report.verified} tensors compared, all equal"
            )
            return report

    def _lost(self) -> list[int]:
        """Ranks of the engines that do not answer."""
        asked = self.engines.submit("require_alive")
        outcomes = self.engines.outcomes("require_alive", asked, ANSWER_TIMEOUT_S)
        return [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, WorkerError | WaitTimeoutError)]

    def _count(self, error: RlctlError, lost: list[int]) -> None:
        """Say which engines are lost. Raises WorkerError when these are too many."""
        self.lost_so_far += len(lost)
        if self.restarts == 0:
            raise error
        logs = ", ".join(str(self.engines.log_path(rank)) for rank in lost)
        if self.lost_so_far > self.restarts:
            raise WorkerError(
                f"{self.lost_so_far} engines were lost in this run, more than cluster.engine_restarts = "
                f"{self.restarts}. The last one: {error.message}",
                error.hint or f"See {logs}.",
            ) from None
        self.tell(f"engine {', '.join(map(str, lost))} is lost ({_cause(error)} See {logs}): starting another")

    def _replace(self, lost: list[int]) -> None:
        """New processes for `lost`; where they do not start and others are left, those go on alone."""
        try:
            self.engines.restart(lost)
            self.engines.part(lost).call("start", timeout_s=self.start_timeout_s)
        except (WorkerError, WaitTimeoutError) as error:
            if len(lost) == len(self.engines):
                raise
            self.engines.drop(lost)
            self.tell(f"no other could be started ({_cause(error)}): going on with {len(self.engines)} engine(s)")


def _cause(error: RlctlError) -> str:
    """What happened, without the lines of a log."""
    return error.message.splitlines()[0].partition(" Its last lines")[0].partition(" It wrote nothing")[0]
