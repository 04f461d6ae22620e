"""Rollouts on demand: the policy waits while engines sample and scorers score.

With `filter.groups=replace`, each round samples as many prompts as trainable groups are missing. The batch keeps all
groups, so rewards describe the prompts, not a selection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlctl.backends.clients import EngineClient, generate_groups
from rlctl.data.rollouts import RolloutGroup
from rlctl.errors import InputError
from rlctl.refit.sync import WeightSync
from rlctl.rollouts.ledger import Ledger
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.rollouts.scored_groups import GroupMaker, Scorers
from rlctl.rollouts.source import RolloutBatch
from rlctl.settings.config import RolloutConfig
from rlctl.telemetry.phases import Phase, StepTimer


class SynchronousSource:
    """Samples and scores `batch.prompts` groups in each call of `next`, or more with `filter.groups=replace`."""

    def __init__(
        self,
        config: RolloutConfig,
        prompts: PromptStream,
        engines: EngineClient,
        rewards: Scorers | None,
        sync: WeightSync,
        timer: StepTimer,
        trains_on: Callable[[RolloutGroup], bool] = lambda group: True,
    ) -> None:
        """`trains_on` selects the groups that fill a batch with replacement."""
        self._config, self._prompts, self._timer = config, prompts, timer
        self._engines, self._sync = engines, sync
        self._groups = GroupMaker(config, prompts, rewards)
        self._ledger = Ledger()
        self._trains_on = trains_on

    def next(self, version: int) -> RolloutBatch:
        """Return the groups of the next positions; they are the same for any number of engines."""
        try:
            return self._next(version)
        except BaseException:
            # A checkpoint, or the next call, then asks for them again.
            self._ledger.give_back(self._ledger.finished | self._ledger.under_way)
            raise

    def _next(self, version: int) -> RolloutBatch:
        config, replaces = self._config, self._config.filter.groups == "replace"
        groups: list[RolloutGroup] = []
        measured = {"scorer_failures": 0, "offloaded_bytes": 0}
        missing, rounds = config.batch.prompts, 0
        while missing and rounds < (config.filter.max_rounds if replaces else 1):
            positions = self._ledger.take(missing)
            rows = {position: self._prompts.prompt_at(position) for position in positions}
            requests = [self._groups.request(position, row) for position, row in rows.items()]
            # Nothing but training follows the only round of sampling; then come new weights.
            with self._timer(Phase.GENERATION), self._sync.generating(refit_next=not replaces) as freed_bytes:
                results = generate_groups(
                    self._engines,
                    requests,
                    self._groups.sampling,
                    config.cluster.step_limit_s,
                    lambda error: self._sync.recover(error, version),
                )
            with self._timer(Phase.REWARD) if self._groups.scores else contextlib.nullcontext():
                scored, failures = self._groups.scored(results, rows)
            self._ledger.finish(positions)
            self._prompts.observe(scored)
            groups += scored
            measured["scorer_failures"] += failures
            measured["offloaded_bytes"] = max(measured["offloaded_bytes"], freed_bytes)
            missing -= sum(self._trains_on(group) for group in scored) if replaces else len(scored)
            rounds += 1
        if replaces:
            measured |= {"sampling_rounds": rounds, "missing_groups": missing}
        measured |= self._groups.lost(groups, self._ledger)
        self._ledger.hand_over(group.position for group in groups)
        return RolloutBatch(tuple(groups), measured)

    def state(self) -> dict[str, Any]:
        """Return the state of the next batches. Nothing is in progress between calls of `next`."""
        return self._groups.state(self._ledger)

    def write(self, directory: Path) -> None:
        """There is nothing to write: no group is finished and not trained on."""

    def restore(self, state: Mapping[str, Any], directory: Path) -> None:
        """Go on after the trained positions of `state`. Raises InputError where another source's groups are in it."""
        self._ledger = self._groups.restored(state)
        if self._ledger.finished:
            raise InputError(
                "The checkpoint holds finished rollouts that were not trained on, and synchronous rollouts cannot take "
                "them over.",
                "Resume with the settings that the run was started with (rollouts.mode=async).",
            )
