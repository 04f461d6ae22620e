"""Rollouts that are made while the policy trains, from weights that may be some versions old.

*Admission*: a group is begun while (max_staleness + version + 1) x groups of a batch exceeds the groups begun so far,
so that no group is older than `rollouts.max_staleness` versions when it is trained on (arXiv 2505.24298, section 5.1).
*Consumption*: with `rollouts.order=position` each batch holds the next positions; with `arrival` those that finished
first, but a group that was admitted `max_staleness` versions ago is waited for. No rollout is thrown away.

With `refit.in_flight=wait` all groups admitted under one version are dealt to the engines in turn and sampled to their
end under it, before the next refit: what is sampled then follows from the run's seed alone. With `keep` groups go to
the engine with the least to do, one by one, and go on under the new weights.

Two threads work besides the loop: one takes finished groups from the engines, the other has them scored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.backends.clients import EngineClient, PendingGroups
from rlctl.backends.messages import GroupRequest, GroupResult
from rlctl.cluster.workers import WorkerGroup, first_done
from rlctl.config.schema import RlctlConfig
from rlctl.data.rollouts import RolloutGroup
from rlctl.envs.reward_worker import RewardWorker
from rlctl.errors import InputError, RlctlError, WaitTimeoutError, WorkerError
from rlctl.refit.sync import WeightSync
from rlctl.rollouts.ledger import Ledger
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.rollouts.scored_groups import GroupMaker, load_groups, restored_ledger, save_groups
from rlctl.rollouts.source import RolloutBatch
from rlctl.telemetry.phases import Phase, StepTimer

LOOK_S = 0.5
"""Longest time between two looks at what has changed."""
QUIET_S = 60.0
"""Time without any finished group after which it is said who waits for whom."""
GROUPS_FILE = "finished_rollouts.npz"


@dataclass
class Progress:
    """Groups between admission and training. Guarded by the source's condition."""

    admitted: dict[int, int] = field(default_factory=dict)
    """Position -> version of the weights at its admission, until it is trained on."""
    asked: dict[object, dict[int, GroupRequest]] = field(default_factory=dict)
    """Engine -> the groups that it samples, by position."""
    calls: list[PendingGroups] = field(default_factory=list)
    """Calls of engines that have not ended."""
    sampled: list[GroupResult] = field(default_factory=list)
    """Groups that are not scored yet."""
    scoring: int = 0
    """Groups that are being scored."""
    finished: dict[int, RolloutGroup] = field(default_factory=dict)
    """Position -> scored group, in the order in which they finished."""
    failures: int = 0
    """Completions on which a scorer failed, since the last batch."""
    lost: list[tuple[object, RlctlError]] = field(default_factory=list)
    """Engines that failed, and how."""
    trouble: BaseException | None = None
    """An error in a thread that ends the run."""


class AsynchronousSource:
    """Keeps groups in flight while the policy trains; `next` waits for the rest of a batch. See the module."""

    def __init__(
        self,
        config: RlctlConfig,
        prompts: PromptStream,
        engines: EngineClient,
        rewards: WorkerGroup[RewardWorker] | None,
        sync: WeightSync,
        timer: StepTimer,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._config, self._prompts, self._timer, self._tell = config, prompts, timer, tell
        self._engines, self._sync = engines, sync
        self._groups = GroupMaker(config, prompts, rewards)
        self._ledger = Ledger()
        self._whole_calls = config.refit.in_flight == "wait"
        self._changed = threading.Condition()
        self._progress = Progress()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (("rollouts", self._collect), ("scores", self._score))
        ]
        for thread in self._threads:
            thread.start()
        if self._whole_calls:
            sync.before_refit = self.settle

    def close(self) -> None:
        """End the threads. Groups under way are left to the end of the engines."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=2 * LOOK_S)

    def next(self, version: int) -> RolloutBatch:
        """Return the next batch, once all of it is there; begin what may be begun under `version`."""
        self._begin(self._admit(version), version)
        with self._timer(Phase.WAITING):
            positions = self._wait(lambda: self._batch(version), version, "rollouts of the next batch")
        with self._changed:
            groups = [self._progress.finished.pop(position) for position in positions]
            ages = [version - self._progress.admitted.pop(position) for position in positions]
            failures, self._progress.failures = self._progress.failures, 0
            self._ledger.hand_over(positions)
        return RolloutBatch(
            tuple(groups), {"scorer_failures": failures, "offloaded_bytes": 0, "versions_since_admission": max(ages)}
        )

    def state(self) -> dict[str, Any]:
        """Return the ledger and what else `restore` needs; groups under way are begun again by it."""
        self._scored_if_settled()
        with self._changed:
            admitted = {str(position): self._progress.admitted[position] for position in self._progress.finished}
            return {**self._ledger.state(), "admitted": admitted, "order": list(self._progress.finished)}

    def write(self, directory: Path) -> None:
        """Write the finished groups, with all their columns."""
        with self._changed:
            groups = [self._progress.finished[position] for position in self._progress.finished]
        save_groups(directory / GROUPS_FILE, groups)

    def restore(self, state: Mapping[str, Any], directory: Path) -> None:
        """Go on from what `state` returned and `write` wrote.

        Raises InputError where the ledger or the file cannot be read.
        """
        self._ledger = restored_ledger(state, self._prompts)
        stored = load_groups(directory / GROUPS_FILE, self._groups.row_at) if self._ledger.finished else []
        groups = {group.position: group for group in stored if group.position in self._ledger.finished}
        if groups.keys() != self._ledger.finished:
            raise InputError(f"{directory / GROUPS_FILE} lacks groups of its ledger.", "Remove the checkpoint.")
        with self._changed:
            self._progress.finished = groups
            self._progress.admitted = {int(position): version for position, version in state["admitted"].items()}

    # Admission

    def _admit(self, version: int) -> list[GroupRequest]:
        """Take the positions that may be begun under `version`."""
        rollouts, groups = self._config.rollouts, self._config.batch.prompts
        with self._changed:
            begun = self._ledger.taken
            positions = self._ledger.take(max(0, (rollouts.max_staleness + version + 1) * groups - begun))
            self._progress.admitted.update(dict.fromkeys(positions, version))
        return [self._groups.request(position, self._groups.row_at(position)) for position in positions]

    def _begin(self, requests: Sequence[GroupRequest], version: int) -> None:
        """Ask the engines for `requests`; an engine that fails is replaced."""
        engines = self._engines.engines
        shares: dict[object, list[GroupRequest]] = {engine: [] for engine in engines}
        with self._changed:
            asked = {engine: len(self._progress.asked.get(engine, ())) for engine in engines}
        for index, request in enumerate(requests):
            engine = engines[index % len(engines)]
            if not self._whole_calls:
                engine = min(engines, key=lambda one: (asked[one] + len(shares[one]), engines.index(one)))
            shares[engine].append(request)
        for engine, share in shares.items():
            if share:
                self._ask(engine, share)

    def _ask(self, engine: object, share: Sequence[GroupRequest]) -> None:
        limit_s = self._config.cluster.step_timeout_s
        with self._changed:
            waited_for = bool(self._progress.asked.setdefault(engine, {}))
            self._progress.asked[engine].update({request.group: request for request in share})
        try:
            if self._whole_calls:
                call = self._engines.begin(engine, share, self._groups.sampling, limit_s)
            else:
                self._engines.submit(engine, share, self._groups.sampling)
                call = None if waited_for else self._engines.collect(engine, limit_s)
        except (WorkerError, WaitTimeoutError) as error:
            self._lose(engine, error)
            return
        with self._changed:
            self._progress.calls += [call] if call else []
            self._changed.notify_all()

    # Consumption

    def _batch(self, version: int) -> list[int] | None:
        """Return the positions of the batch to train `version` on; None: not all of them are finished."""
        finished, size = self._progress.finished, self._config.batch.prompts
        if self._config.rollouts.order == "position":
            chosen = self._ledger.next_to_hand_over(size)
            return chosen if all(position in finished for position in chosen) else None
        oldest = version - self._config.rollouts.max_staleness
        due = [position for position, admitted in self._progress.admitted.items() if admitted <= oldest]
        if len(finished) < size or not all(position in finished for position in due):
            return None
        early = [position for position in finished if position in due]
        return [*early, *(position for position in finished if position not in due)][:size]

    def settle(self) -> None:
        """Wait until no engine samples anything: the weights are about to change."""
        limit_s = self._config.cluster.step_timeout_s
        with self._timer(Phase.WAITING), self._changed:
            # An engine that is lost is missed by the refit, which replaces it; its groups are begun again by `next`.
            self._changed.wait_for(lambda: not self._progress.calls or self._progress.trouble, limit_s)
            self._raise_trouble()
            if self._progress.calls:
                raise WaitTimeoutError(
                    f"The engines did not finish their groups in {limit_s:.0f} s.", "Raise cluster.step_timeout_s."
                )

    def _scored_if_settled(self) -> None:
        """Where nothing is in flight at a checkpoint, leave nothing unscored either: a resumed run then has the same
        rollouts as this one."""
        if self._whole_calls:
            with self._changed:
                self._changed.wait_for(lambda: not self._unscored() or self._progress.trouble)
                self._raise_trouble()

    def _unscored(self) -> int:
        return len(self._progress.sampled) + self._progress.scoring

    def _wait(self, find: Callable[[], list[int] | None], version: int, what: str) -> list[int]:
        """Wait for what `find` returns, and replace engines that fail meanwhile."""
        quiet_since, before = time.monotonic(), -1
        while True:
            with self._changed:
                self._raise_trouble()
                lost, self._progress.lost = self._progress.lost, []
                if not lost:
                    if (found := find()) is not None:
                        return found
                    self._changed.wait(LOOK_S)
                finished = len(self._progress.finished)
            for engine, error in lost:
                self._replace(engine, error, version)
            if finished != before:
                quiet_since, before = time.monotonic(), finished
            elif time.monotonic() - quiet_since > QUIET_S:
                quiet_since = time.monotonic()
                self._tell(f"the policy waits for {what}: {self._whereabouts()}")

    def _whereabouts(self) -> str:
        with self._changed:
            parts = [
                f"engine {index} samples {len(self._progress.asked.get(engine, ()))} group(s)"
                for index, engine in enumerate(self._engines.engines)
            ]
            return ", ".join([*parts, f"{self._unscored()} group(s) wait for their rewards"])

    def _replace(self, engine: object, error: RlctlError, version: int) -> None:
        """Bring the engines back after `engine` failed, if a refit has not, and begin its groups again."""
        if engine in self._engines.engines:
            self._sync.recover(error, version)
        with self._changed:
            again = list(self._progress.asked.pop(engine, {}).values())
        self._begin(again, version)

    def _lose(self, engine: object, error: RlctlError) -> None:
        with self._changed:
            self._progress.lost.append((engine, error))
            self._changed.notify_all()

    def _raise_trouble(self) -> None:
        if self._progress.trouble is not None:
            raise self._progress.trouble

    # Threads

    def _guarded(self, work: Callable[[], bool]) -> None:
        try:
            while work():
                pass
        except BaseException as error:  # noqa: BLE001 - it is raised where the loop waits
            with self._changed:
                if not self._closed:
                    self._progress.trouble = error
                self._changed.notify_all()

    def _collect(self) -> bool:
        """Take what engines have finished; return whether to go on."""
        with self._changed:
            while not self._progress.calls and not self._closed:
                self._changed.wait()
            calls = {id(one.call): one for one in self._progress.calls}
        if self._closed:
            return False
        for call in first_done([one.call for one in calls.values()], LOOK_S):
            pending = calls[id(call)]
            try:
                results = pending.results()
            except (WorkerError, WaitTimeoutError) as error:
                with self._changed:
                    self._progress.calls.remove(pending)
                self._lose(pending.engine, error)
                continue
            self._took(pending, results)
        return True

    def _took(self, pending: PendingGroups, results: Sequence[GroupResult]) -> None:
        with self._changed:
            left = self._progress.asked.get(pending.engine, {})
            for result in results:
                left.pop(result.group, None)
            self._progress.calls.remove(pending)
            self._progress.sampled += results
            if left and not self._whole_calls:
                try:
                    again = self._engines.collect(pending.engine, self._config.cluster.step_timeout_s)
                    self._progress.calls.append(again)
                except WorkerError as error:
                    self._progress.lost.append((pending.engine, error))
            self._changed.notify_all()

    def _score(self) -> bool:
        """Score what was sampled; return whether to go on."""
        with self._changed:
            while not self._progress.sampled and not self._closed:
                self._changed.wait()
            results, self._progress.sampled = self._progress.sampled, []
            self._progress.scoring = len(results)
        if self._closed:
            return False
        rows = {result.group: self._groups.row_at(result.group) for result in results}
        groups, failures = self._groups.scored(results, rows)
        with self._changed:
            self._progress.scoring = 0
            self._progress.failures += failures
            self._progress.finished.update({group.position: group for group in groups})
            self._ledger.finish(group.position for group in groups)
            self._changed.notify_all()
        return True
