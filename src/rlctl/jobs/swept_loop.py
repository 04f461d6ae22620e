"""The loop of one run of a sweep, which shares the policy with the other runs."""

from __future__ import annotations

from typing import Any

from rlctl.preparation.job import Job
from rlctl.rollouts.sampled_ahead import SampledAhead
from rlctl.runs.interrupt import StopRequest
from rlctl.telemetry.phases import Phase
from rlctl.training.loop import Loop, Parts


class SweptLoop(Loop):
    """The loop of one run among several: at the start of each step its adapter takes its place."""

    def __init__(self, job: Job, parts: Parts, number: int, step: int, version: int) -> None:
        super().__init__(job.config, parts, step=step, version=version)
        self._number = number

    def begin(self) -> None:
        self._use_adapter()
        super().begin()
        validation = self.parts.validation
        if self.step or validation is None or not validation.due(0):  # else the engines answer its prompts first
            self._sample_ahead()

    def advance(self, stop: StopRequest) -> None:
        super().advance(stop)
        if not stop.requested:
            self._sample_ahead()
        self.parts.saver.finish()  # the policy has one save under way at most

    def _sample_ahead(self) -> None:
        """Begin the next batch of a run with its own engines."""
        if isinstance(self.parts.source, SampledAhead) and not self.ended:
            self.parts.source.begin(self.version)

    def keep(self) -> None:
        """Save the last step of a run that another one's stop request ended."""
        if self._trained is not None:
            self._use_adapter()
            self._save(self.step, self._trained, ending=True)

    def sample(self) -> Any:
        with self.parts.timer(Phase.REFIT):
            self._use_adapter()
            if self.parts.sync is not None and not isinstance(self.parts.source, SampledAhead):
                self.parts.sync.refit(self.version)
        return super().sample()

    def _use_adapter(self) -> None:
        if self.parts.sync is not None:
            self.parts.sync.to_policy()
        self.parts.policy.use_adapter(self._number)
