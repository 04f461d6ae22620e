"""Rollouts sampled while the policy trains, from weights that may be some versions old.

*Admission*: a group begins while (max_staleness + version + 1) x groups per batch exceeds the groups trained, finished
and running (arXiv 2505.24298, section 5.1). *Consumption*: with `rollouts.order=position` a batch has the next
positions; with `arrival` the first finished groups, as long as every other group can still be trained within
`max_staleness` versions of its admission. No rollout is discarded. With `filter.groups=replace`, a group without signal
fills no place: another one begins, and the batch holds both.

Groups go to the least loaded engine. With `refit.in_flight=wait`, groups admitted under one version finish before the
next refit, so samples depend only on the seed; replacements are then admitted only while nothing runs. With `keep`
groups continue under the new weights. Pass-rate orders use returned batches, not finished groups.

On shared devices, engines sample while the loop waits for a batch and then give the devices back; rollouts in flight
pause (`keep`) or finish first (`wait`), and scoring continues.

Functions that take `completions` get the groups that begin together, at most a batch, in one call.

Two threads work besides the loop: one collects finished groups, the other has them scored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlctl.backends.clients import EngineClient, PendingGroups
from rlctl.backends.messages import GroupRequest, SampledGroup
from rlctl.cluster.workers import first_done
from rlctl.data.rollouts import RolloutGroup
from rlctl.errors import InputError, RlctlError, WaitTimeoutError, WorkerError
from rlctl.refit.sync import WeightSync
from rlctl.rollouts.ledger import Ledger
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.rollouts.scored_groups import MARGIN_S, GroupMaker, Scorers, load_groups, save_groups
from rlctl.rollouts.source import RolloutBatch
from rlctl.settings.config import RolloutConfig
from rlctl.telemetry.phases import Phase, StepTimer

T = TypeVar("T")
LOOK_S = 0.5
"""Longest time between two looks at what has changed."""
QUIET_S = 60.0
"""Time without a finished group until a message says who waits for whom; the message repeats."""
SCORED_IN = 8
"""Maximum number of batches for the scorer."""
GROUPS_FILE = "finished_rollouts.npz"


class AsynchronousSource:
    """Keeps groups in flight while the policy trains; `next` waits for the rest of a batch. See the module."""

    def __init__(
        self,
        config: RolloutConfig,
        prompts: PromptStream,
        engines: EngineClient,
        rewards: Scorers | None,
        sync: WeightSync,
        timer: StepTimer,
        trains_on: Callable[[RolloutGroup], bool] = lambda group: True,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`trains_on` selects the groups that fill a batch with replacement; `tell` receives who waits for whom."""
        self._config, self._prompts, self._timer, self._tell = config, prompts, timer, tell
        self._engines, self._sync = engines, sync
        self._groups = GroupMaker(config, prompts, rewards)
        self._ledger = Ledger()
        self._waits = config.refit.in_flight == "wait"
        self._replaces = config.filter.groups == "replace"
        self._fills: Callable[[RolloutGroup], bool] = trains_on if self._replaces else lambda group: True
        self._batches = 0
        """Batches that were returned."""
        self._changed = threading.Condition()
        """Guards all that follows: groups between admission and training."""
        self._admitted: dict[int, int] = {}
        """Position -> version of the weights at its admission, until it is trained on."""
        self._asked: dict[object, dict[int, GroupRequest]] = {}
        """Engine -> the groups that it samples, by position."""
        self._calls: list[PendingGroups] = []
        """Calls that wait for a group of an engine."""
        self._together: dict[int, frozenset[int]] = {}
        """Position -> positions that a function of `completions` scores in one call."""
        self._held: list[SampledGroup] = []
        """Groups that are sampled, and that others which the scorer gets with them are not."""
        self._sampled: list[SampledGroup] = []
        """Groups that are to be scored."""
        self._finished: dict[int, RolloutGroup] = {}
        """Position -> scored group, in order of completion."""
        self._unfit: set[int] = set()
        """Finished groups that fill no place of a batch."""
        self._failures = 0
        """Completions with a scorer failure, since the last batch."""
        self._lost: list[tuple[object, RlctlError]] = []
        """Engines that failed, and how."""
        self._trouble: BaseException | None = None
        """An error in a thread that ends the run."""
        self._ended: threading.Thread | None = None
        """The thread of that error."""
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._start_threads()
        if self._waits:
            sync.before_refit = self.wait_for_samples

    def close(self) -> None:
        """End the threads. Groups under way are left to the end of the engines."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=2 * LOOK_S)

    def next(self, version: int) -> RolloutBatch:
        """Return the next batch when complete, and begin groups admitted under `version`. After an error of a process
        it can be called again."""
        self._go_on()
        with self._timer(Phase.WAITING), self._sync.generating() as freed_bytes:
            self._wait(lambda: self._may_admit() or None, "the policy", version)
            self._admit(version)
            # Where engines share the devices with the policy, they give them back with the batch.
            pauses = self._sync.takes_turns and self._waits
            positions = self._wait(
                lambda: None if pauses and self._sampling() else self._batch(version), "the policy", version
            )
        with self._changed:
            measured = self._lost_rollouts([self._finished[position] for position in positions])
            groups = [self._finished.pop(position) for position in positions]
            filled = len(positions) - len(self._unfit.intersection(positions))
            self._unfit.difference_update(positions)
            ages = [version - self._admitted.pop(position) for position in positions]
            self._batches += 1
            failures, self._failures = self._failures, 0
            self._ledger.hand_over(positions)
        self._prompts.observe(groups)
        measured |= {"scorer_failures": failures, "offloaded_bytes": freed_bytes, "versions_since_admission": max(ages)}
        if self._replaces:
            size = self._config.batch.prompts
            measured |= {"sampling_rounds": -(-len(groups) // size), "missing_groups": size - filled}
        return RolloutBatch(tuple(groups), measured)

    def _lost_rollouts(self, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        """Return the metrics of a batch's failing rewards. Where they end the run, a checkpoint asks for all groups
        with a failure again."""
        try:
            return self._groups.lost(groups, self._ledger)
        except InputError:
            again = [position for position, group in self._finished.items() if group.dropped]
            self._finished = {position: group for position, group in self._finished.items() if not group.dropped}
            self._unfit.difference_update(again)
            self._ledger.give_back(again)
            raise

    def state(self) -> dict[str, Any]:
        """Return the ledger and other state for `restore`, which restarts groups under way."""
        if self._waits and self._trouble is None:
            # Nothing is sampled between two steps. Leave nothing unscored either: a resumed run then has the same
            # rollouts as this one.
            self._wait(lambda: not self._to_score() or None, "the checkpoint")
        with self._changed:
            admitted = {str(position): self._admitted[position] for position in self._finished}
            return {**self._groups.state(self._ledger), "admitted": admitted, "batches": self._batches}

    def write(self, directory: Path) -> None:
        with self._changed:
            groups = list(self._finished.values())
        save_groups(directory / GROUPS_FILE, groups)

    def restore(self, state: Mapping[str, Any], directory: Path) -> None:
        """Go on from what `state` returned and `write` wrote. Raises InputError where these cannot be read."""
        self._ledger = self._groups.restored(state)
        stored = load_groups(directory / GROUPS_FILE, self._groups.row_at) if self._ledger.finished else []
        groups = {group.position: group for group in stored if group.position in self._ledger.finished}
        if groups.keys() != self._ledger.finished:
            raise InputError(f"{directory / GROUPS_FILE} lacks groups of its ledger.", "Remove the checkpoint.")
        with self._changed:
            self._finished = groups
            self._unfit = {position for position, group in groups.items() if not self._fills(group)}
            # A synchronous run that resumes here has neither.
            self._admitted = {int(position): version for position, version in state.get("admitted", {}).items()}
            self._batches = state.get("batches", self._ledger.first_open // self._config.batch.prompts)

    def wait_for_samples(self) -> None:
        """Wait until no engine samples anything: the weights are about to change."""
        with self._timer(Phase.WAITING):
            # An engine that is lost is missed by the refit, which replaces it; its groups are begun again by `next`.
            self._wait(lambda: not self._sampling() or None, "the refit")

    # Admission

    def _admit(self, version: int) -> None:
        with self._changed:
            positions = self._ledger.take(self._room())
            self._admitted.update(dict.fromkeys(positions, version))
            size = self._config.batch.prompts
            for first in range(0, len(positions), size) if self._groups.compares else ():
                part = frozenset(positions[first : first + size])
                self._together.update(dict.fromkeys(part, part))
        self._begin([self._groups.request(position, self._groups.row_at(position)) for position in positions])

    def _may_admit(self) -> bool:
        return not (self._replaces and self._waits and self._ledger.under_way)

    def _room(self) -> int:
        size, left = self._config.batch.prompts, self._config.run.steps - self._batches - 1
        ahead = max(0, min(self._config.rollouts.max_staleness, left))  # what no step trains on is not begun
        begun = len(self._finished) + len(self._ledger.under_way)
        most = ahead * size + self._most
        return max(0, min((ahead + 1) * size - (begun - len(self._unfit)), most - begun))

    @property
    def _most(self) -> int:
        return self._config.batch.prompts * (self._config.filter.max_rounds if self._replaces else 1)

    def _sampling(self) -> bool:
        lost = [engine for engine, _ in self._lost]
        return any(groups for engine, groups in self._asked.items() if engine not in lost)

    def _begin(self, requests: Sequence[GroupRequest]) -> None:
        """Ask the engines for `requests`; an engine that fails is replaced."""
        engines = self._engines.engines
        shares: dict[object, list[GroupRequest]] = {engine: [] for engine in engines}
        with self._changed:
            pending_count = {engine: len(self._asked.get(engine, ())) for engine in engines}
        for request in requests:
            shares[min(engines, key=lambda engine: pending_count[engine] + len(shares[engine]))].append(request)
        for engine, share in shares.items():
            if not share:
                continue
            with self._changed:
                waited_for = bool(self._asked.setdefault(engine, {}))
                self._asked[engine].update({request.group: request for request in share})
            try:
                self._engines.submit(engine, share, self._groups.sampling)
                calls = [] if waited_for else [self._engines.collect(engine, self._config.cluster.step_limit_s)]
            except (WorkerError, WaitTimeoutError) as error:
                self._lose(engine, error)
                continue
            with self._changed:
                self._calls += calls
                self._changed.notify_all()

    # Consumption

    def _batch(self, version: int) -> list[int] | None:
        """Return the positions of the batch to train `version` on; None: not all of them are finished."""
        batch = self._by_position() if self._config.rollouts.order == "position" else self._by_arrival(version)
        if batch is None and not (self._ledger.under_way or self._room()):  # `filter.max_rounds` ended the last batch
            return sorted(self._finished, key=lambda position: (position in self._unfit, position))[: self._most]
        return batch

    def _by_position(self) -> list[int] | None:
        size, chosen = self._config.batch.prompts, list[int]()
        for position in self._ledger.next_to_hand_over(len(self._finished)):
            if position not in self._finished:
                return None
            chosen.append(position)
            if len(chosen) - len(self._unfit.intersection(chosen)) == size or len(chosen) == self._most:
                return chosen
        return None

    def _by_arrival(self, version: int) -> list[int] | None:
        """Return a batch of the first finished groups and all that fill no place. It includes enough of the groups due
        soon that the others fit into the remaining batches before their deadline."""
        size, limit = self._config.batch.prompts, self._config.rollouts.max_staleness
        versions = {p: v for p, v in self._admitted.items() if p not in self._unfit}
        finished = [position for position in self._finished if position in versions]
        chosen: list[int] = []
        for admitted in sorted(set(versions.values())):
            due = sum(other <= admitted for other in versions.values())
            needed = due - max(0, admitted + limit - version) * size - len(chosen)
            ready = [p for p in finished if versions[p] <= admitted and p not in chosen]
            if needed > len(ready):
                return None
            chosen += ready[: max(0, needed)]
        chosen += [position for position in finished if position not in chosen]
        return [*chosen[:size], *self._unfit][: self._most] if len(chosen) >= size else None

    def _wait(self, find: Callable[[], T | None], who: str, version: int | None = None) -> T:
        """Wait for a result of `find`. With a `version`, replace failed engines and groups that filled no place. Raises
        a thread's error, and WaitTimeoutError after `cluster.step_timeout_s` without a finished group."""
        # Engines and scorers have their own limits, with better errors, so those must come first.
        limit_s = self._config.cluster.step_limit_s + self._config.reward.timeout_s + 2 * MARGIN_S
        quiet, before, messages = time.monotonic(), -1, 0
        while True:
            with self._changed:
                if self._trouble is not None:
                    raise self._trouble
                lost: list[tuple[object, RlctlError]] = []
                # Engines that sample under these weights only finish before any of them is replaced.
                if version is not None and not (self._waits and self._sampling()):
                    lost, self._lost = self._lost, []
                if not lost and (result := find()) is not None:
                    return result
                more = version is not None and not lost and self._replaces and self._may_admit() and self._room()
                if not (lost or more):
                    self._changed.wait(LOOK_S)
                finished = len(self._finished)
            if version is not None:
                self._replace_all(lost, version)
                if more:
                    self._admit(version)
            if finished != before or lost:
                quiet, before, messages = time.monotonic(), finished, 0
            quiet_s = time.monotonic() - quiet
            if quiet_s > limit_s:
                raise WaitTimeoutError(
                    f"No group of rollouts was finished for {limit_s:.0f} s: {self._whereabouts()}.",
                    "Raise cluster.step_timeout_s, or see the logs of the engines and of the scorer.",
                )
            if quiet_s > (messages + 1) * QUIET_S:
                messages += 1
                self._tell(f"{who} has waited {quiet_s:.0f} s: {self._whereabouts()}")

    def _whereabouts(self) -> str:
        with self._changed:
            parts = [
                f"engine {index} samples {len(self._asked.get(engine, ()))} group(s)"
                for index, engine in enumerate(self._engines.engines)
            ]
            return ", ".join([*parts, f"the scorer has {len(self._sampled)}"])

    def _replace_all(self, lost: Sequence[tuple[object, RlctlError]], version: int) -> None:
        for number, (engine, error) in enumerate(lost):
            try:
                self._replace(engine, error, version)
            except (WorkerError, WaitTimeoutError):  # the policy may be lost too: the next wait replaces the others
                with self._changed:
                    self._lost = [*lost[number:], *self._lost]
                raise

    def _replace(self, engine: object, error: RlctlError, version: int) -> None:
        if engine in self._engines.engines:
            self._sync.recover(error, version)
        with self._changed:
            again = list(self._asked.pop(engine, {}).values())
        self._begin(again)

    def _lose(self, engine: object, error: RlctlError) -> None:
        with self._changed:
            self._lost.append((engine, error))
            self._hand_to_scorer()

    def _hand_to_scorer(self) -> None:
        """Submit sampled groups for scoring, all at once if weights wait for samples, so batch functions do not depend
        on timing."""
        if not (self._waits and self._sampling()):
            self._sampled += self._held
            self._held = []
        self._changed.notify_all()

    # Threads

    def _go_on(self) -> None:
        """Start threads again that an error of a process ended: it is raised again where the process is not back."""
        with self._changed:
            if not isinstance(self._trouble, WorkerError | WaitTimeoutError):
                return
            self._trouble, ended = None, self._ended
        if ended is not None:
            ended.join()
        self._start_threads()

    def _start_threads(self) -> None:
        alive = {thread.name for thread in self._threads if thread.is_alive()}
        works = (("rollouts", self._collect), ("scores", self._score))
        new = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in works
            if name not in alive
        ]
        self._threads = [thread for thread in self._threads if thread.name in alive] + new
        for thread in new:
            thread.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            while not self._closed:
                work()
        except BaseException as error:  # noqa: BLE001 - the waiting loop raises it
            with self._changed:
                if not self._closed:
                    self._trouble, self._ended = error, threading.current_thread()
                self._changed.notify_all()

    def _collect(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closed)
            calls = {id(pending.call): pending for pending in self._calls}
        if self._closed:
            return
        for call in first_done([pending.call for pending in calls.values()], LOOK_S):
            self._take(calls[id(call)])
        with self._changed:
            late = [pending for pending in self._calls if time.monotonic() > pending.until]
            self._calls = [pending for pending in self._calls if pending not in late]
        for pending in late:  # their engines hang
            self._lose(pending.engine, pending.late())

    def _take(self, pending: PendingGroups) -> None:
        """Take the result of a call, which is empty if the engine fell asleep."""
        try:
            results = pending.results()
        except (WorkerError, WaitTimeoutError) as error:
            results, failure = [], error
        else:
            failure = None
        with self._changed:
            left = self._asked.get(pending.engine, {})
            for result in results:
                left.pop(result.group, None)
            self._calls.remove(pending)
            self._held += results
            if left and failure is None:
                try:
                    self._calls.append(self._engines.collect(pending.engine, self._config.cluster.step_limit_s))
                except WorkerError as error:
                    failure = error
            if failure is not None:
                self._lost.append((pending.engine, failure))
            self._hand_to_scorer()

    def _to_score(self) -> list[SampledGroup]:
        """Return the next groups to score: a few of the oldest, since a group waits for the others in its call.
        Compared groups are scored together, once all of them are sampled."""
        waiting = sorted(self._sampled, key=lambda result: result.group)
        if not self._groups.compares:
            return waiting[: -(-len(waiting) // SCORED_IN)]
        whole = (batch for group in waiting if (batch := self._together[group.group]) <= {r.group for r in waiting})
        chosen = next(whole, frozenset())
        return [group for group in waiting if group.group in chosen]

    def _score(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._to_score() or self._closed)
            results = self._to_score()
        if self._closed:
            return
        rows = {result.group: self._groups.row_at(result.group) for result in results}
        groups, failures = self._groups.scored(results, rows)
        with self._changed:
            self._sampled = [group for group in self._sampled if group.group not in rows]
            self._together = {group: part for group, part in self._together.items() if group not in rows}
            self._failures += failures
            self._finished.update({group.position: group for group in groups})
            self._unfit.update(group.position for group in groups if not self._fills(group))
            self._ledger.finish(group.position for group in groups)
            self._changed.notify_all()
