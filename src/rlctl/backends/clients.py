"""The policy and the engines as the driver sees them: one object for all ranks, one for all engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from rlctl.backends.base import EngineWorker, EpisodeWorker, PolicySpec, PolicyWorker, Teaching
from rlctl.backends.batching.batch import (
    AdvantageEstimate,
    BatchShard,
    LogprobColumn,
    LogprobStats,
    MicroBatchLoss,
    MinibatchResult,
    TrainBatch,
)
from rlctl.backends.batching.mixtures import Mixture, Taught
from rlctl.backends.batching.packing import PackingStats, plan_batch
from rlctl.backends.hidden_states import Paths, States
from rlctl.backends.messages import VALUES_A_GROUP, GroupRequest, SampledGroup, Sampling, attached
from rlctl.backends.teacher_endpoint import Endpoint
from rlctl.cluster.ray_session import fetch, keep_here
from rlctl.cluster.workers import SAME_CAUSE_S, PendingCall, WorkerDiedError, WorkerGroup
from rlctl.data.cross_tokens import Projection
from rlctl.errors import RlctlError, WaitTimeoutError, WorkerError
from rlctl.settings.training import TrainingConfig

R = TypeVar("R")
TeacherHandles = dict[int, list[Taught]]
"""For each group the log-probs of each of its teachers."""
# The driver waits longer than an engine's own limit, so that the engine's error, which knows more, comes first.
MARGIN_S = 60.0
ANSWER_TIMEOUT_S = 60.0


class LogprobSource(Protocol):
    """The teachers of a policy, or its reward model."""

    @property
    def mixture(self) -> Mixture:
        """How several teachers of a rollout make one distribution."""
        ...

    def handles(self, batch: TrainBatch) -> TeacherHandles:
        """Return the handles of the log-probs or scores of each group of a batch."""
        ...


class PolicyClient:
    """Client of all ranks of a policy (`PolicyWorker`); calls return when all have answered."""

    def __init__(
        self,
        group: WorkerGroup[PolicyWorker],
        spec: PolicySpec,
        training: TrainingConfig,
        *,
        micro_batch_tokens: int,
        whole_groups: bool = False,
    ) -> None:
        """`micro_batch_tokens`: row limit, at least the longest rollout (with `whole_groups`, the longest group, which
        shares a row)."""
        self.group = group
        self.lay_out(spec, micro_batch_tokens)
        self._reads_others = spec.valued and spec.teaches is not None
        """It has its own tokenizer, so texts may be longer than the policy's."""
        self.teacher: LogprobSource | None = None
        self._loaded: TrainBatch | None = None
        self._shards: tuple[BatchShard, ...] = ()
        # A teacher may be a model that rows cannot be packed for, and the policy another one.
        packs = not spec.facts.unpacked
        self._batching = {
            "packing": training.packing and packs,
            "dynamic": training.dynamic_batching or (training.packing and not packs),
            "share_prompts": training.share_prompts and packs,
            "whole_groups": whole_groups,
        }

    def lay_out(self, spec: PolicySpec, micro_batch_tokens: int) -> None:
        """Give batches to the ranks of such a policy from here on."""
        self.parallel, self._row_multiple, self._own_teacher = spec.parallel, spec.row_multiple, spec.own_teacher
        self._micro_batch_tokens = micro_batch_tokens

    def lost(self) -> list[RlctlError]:
        """Return the faults of lost ranks, dead ones first: a rank is gone or has a broken device. Where all ranks are
        there, those that do not answer are lost; others may only wait for a dead one."""
        answers = self.group.within(ANSWER_TIMEOUT_S).submit(PolicyWorker.device_used)
        try:
            answers.results()
        except (WorkerError, WaitTimeoutError):
            faults = [fault for fault in answers.within(SAME_CAUSE_S).outcomes() if isinstance(fault, RlctlError)]
            gone = [fault for fault in faults if isinstance(fault, WorkerError)]
            return sorted(gone or faults, key=lambda fault: not isinstance(fault, WorkerDiedError))
        return []

    def load_model(self, directory: Path) -> None:
        self.group.call(PolicyWorker.load_model, directory)

    def load_adapter(self, directory: Path) -> None:
        self.group.call(PolicyWorker.load_adapter, directory)

    def hold_reference(self) -> None:
        self.group.call(PolicyWorker.hold_reference)

    def hold_adapters(self, count: int) -> None:
        self.group.call(PolicyWorker.hold_adapters, count)

    def use_adapter(self, number: int) -> None:
        self.group.call(PolicyWorker.use_adapter, number)

    def hold_projections(self, projections: Mapping[int, Projection]) -> None:
        self.group.call(PolicyWorker.hold_projections, projections)

    def load_batch(self, batch: TrainBatch) -> PackingStats:
        """Give each data-parallel rank its rows; the ranks fetch the columns themselves."""
        longest = (
            max((rollout.tokens for part in batch.minibatches for rollout in part), default=0) * self._reads_others
        )
        plan = plan_batch(
            batch.minibatches,
            batch.columns,
            dp=self.parallel.dp,
            micro_batch_tokens=max(self._micro_batch_tokens, longest),
            **self._batching,
            multiple=self._row_multiple,
            micro_batch_multiple=self.parallel.micro_batch_multiple,
        )
        self._loaded = batch
        self._shards = tuple(plan.shards[self.parallel.data_rank(rank)] for rank in range(len(self.group)))
        self.group.call_each(PolicyWorker.load_batch, [(shard, fetch) for shard in self._shards])
        return plan.stats

    def add_logprobs(self, column: LogprobColumn) -> None:
        """Add log-probs to the loaded batch, directly from a teacher's ranks to the policy's."""
        if column != "teacher_logprobs" or self._own_teacher is not None:
            self.group.call(PolicyWorker.add_logprobs, column)
            return
        assert self.teacher is not None  # a run that needs one has one
        assert self._loaded is not None
        handles = self.teacher.handles(self._loaded)
        shard_logprobs = [
            ({position: handles[position] for position in shard.columns}, fetch, self.teacher.mixture)
            for shard in self._shards
        ]
        self.group.call_each(PolicyWorker.import_logprobs, shard_logprobs)

    def refresh_teacher(self, step: int) -> None:
        """Update the policy's own teacher, if it has one that is due after `step` steps."""
        teacher = self._own_teacher
        if teacher is not None and teacher.every is not None and step and step % teacher.every == 0:
            self.group.call(PolicyWorker.update_teacher, teacher.rate)

    def export_logprobs(self) -> dict[int, list[object]]:
        """Return the handles of the log-probs of each group of the loaded batch, as a teacher's ranks compute them."""
        reporting = [self.parallel.reports(rank) for rank in range(len(self.group))]
        counts = [len(shard.columns) * reports for shard, reports in zip(self._shards, reporting, strict=True)]
        pending, handles = self.group.submit_by_handle(PolicyWorker.export_logprobs, [() for _ in counts], counts)
        pending.results()
        by_position: dict[int, list[object]] = {}
        for shard, shard_handles in zip(self._shards, handles, strict=True):
            for position, handle in zip(
                shard.columns, shard_handles, strict=False
            ):  # ranks that do not report have none
                by_position.setdefault(position, []).append(handle)
        return by_position

    def ask_teacher(self, endpoint: Endpoint, places: frozenset[int], top: int) -> dict[int, list[object]]:
        """Have the ranks ask a server for the log-probs of the groups of the loaded batch at `places`, with the `top`
        most likely tokens; return the handles by group."""
        by_rank = [tuple(position for position in shard.columns if position in places) for shard in self._shards]
        counts = [len(positions) * self.parallel.reports(rank) for rank, positions in enumerate(by_rank)]
        calls = [(endpoint, positions, top, fetch) for positions in by_rank]
        pending, handles = self.group.submit_by_handle(PolicyWorker.ask_teacher, calls, counts)
        pending.results()
        by_position: dict[int, list[object]] = {}
        for positions, rank_handles in zip(by_rank, handles, strict=True):
            for position, handle in zip(positions, rank_handles, strict=False):  # ranks that do not report have none
                by_position.setdefault(position, []).append(handle)
        return by_position

    def use_model(self, number: int) -> None:
        """Use another model of a teacher's processes from here on."""
        self.group.call(PolicyWorker.use_model, number)

    def teach(self, task: Teaching) -> None:
        """Have a teacher's processes compute as this teacher from here on."""
        self.group.call(PolicyWorker.teach, task)

    def give_tokens(self, handles: Mapping[int, list[list[object]]]) -> None:
        """Have the next `export_logprobs` return the log-probs of the most likely tokens in several log-probs, whose
        `handles` are given for each group of the loaded batch."""
        self.group.call_each(
            PolicyWorker.take_tokens,
            [({position: handles[position] for position in shard.columns}, fetch) for shard in self._shards],
        )

    def estimate(self, estimate: AdvantageEstimate) -> None:
        """Have the ranks make the advantages of the loaded batch's tokens."""
        self.group.call(PolicyWorker.estimate, estimate)

    def hidden_states(self, paths: Paths) -> list[States]:
        """Return what enters and leaves sub-layers over the loaded batch, of all ranks."""
        return [states for of_rank in self.group.call(PolicyWorker.hidden_states, paths) for states in of_rank]

    def logprob_difference(self, column: LogprobColumn) -> LogprobStats:
        return only_result(self.group.call(PolicyWorker.logprob_difference, column))

    def train(self, minibatches: int, loss: MicroBatchLoss, lr: float, weight_decay: float) -> list[MinibatchResult]:
        """Take one optimizer step on each mini-batch of the loaded batch, in order."""
        return [
            only_result(self.group.call(PolicyWorker.train_minibatch, index, loss, lr, weight_decay))
            for index in range(minibatches)
        ]

    def evaluate(self, minibatches: int, loss: MicroBatchLoss) -> list[MinibatchResult]:
        return [
            only_result(self.group.call(PolicyWorker.evaluate_minibatch, index, loss)) for index in range(minibatches)
        ]

    def sleep(self, keep_weights: bool = False) -> int:
        """Return the bytes that all devices together got back."""
        return sum(self.group.call(PolicyWorker.sleep, keep_weights))

    def wake(self) -> None:
        self.group.call(PolicyWorker.wake)

    def device_used(self) -> tuple[int, int] | None:
        """Return (bytes in use, all bytes) of the GPU with the least left; None without GPUs."""
        measured = [usage for usage in self.group.call(PolicyWorker.device_used) if usage is not None]
        return max(measured, key=lambda usage: usage[0] - usage[1], default=None)

    def parameters_not_finite(self) -> list[str]:
        """List the trained parameters, of any rank, with a value that is not finite."""
        return sorted({name for part in self.group.call(PolicyWorker.parameters_not_finite) for name in part})

    def save_begin(self, directory: Path, in_memory: bool = False) -> None:
        self.group.call(PolicyWorker.save_begin, directory, in_memory)

    def save_written(self, in_memory: bool = False) -> bool:
        return all(self.group.call(PolicyWorker.save_written, in_memory))

    def save_finish(self, in_memory: bool = False) -> dict[str, str]:
        """Wait until the save is complete; return the digest of each file."""
        parts = self.group.call(PolicyWorker.save_finish, in_memory)
        return {name: digest for part in parts for name, digest in part.items()}

    def damaged_files(self, directory: Path, digests: dict[str, str]) -> list[str]:
        damaged = self.group.call(PolicyWorker.damaged_files, directory, digests)
        return [problem for part in damaged for problem in part]

    def load_saved(self, directory: Path) -> None:
        self.group.call(PolicyWorker.load_saved, directory)


@dataclass(frozen=True)
class PendingGroups:
    """Groups that one engine was asked for."""

    engine: object
    call: PendingCall[list[SampledGroup]]
    handles: list[object]
    keeps: bool
    """Copy columns and texts to this node: the engine's may be lost."""
    until: float
    """Latest time for its answer, of time.monotonic."""

    def results(self) -> list[SampledGroup]:
        """Return the finished groups with handles of columns and texts. Raises PendingCall's errors, and WorkerError
        for lost data."""
        (answer,) = self.call.results()
        if self.keeps:
            keep_here(self.handles)
        return attached(answer, self.handles)

    def late(self) -> WaitTimeoutError:
        """The error of a call that has not ended by `until`."""
        return self.call.late()


class EngineClient:
    """Client of all generation engines. Engines are independent; calls that tolerate the loss of an engine say so."""

    def __init__(self, group: WorkerGroup[EpisodeWorker], *, keeps: bool = False) -> None:
        """`keeps`: copy results to this node, because the engines' nodes may be lost."""
        self.group, self._keeps = group, keeps
        self._aside: list[WorkerGroup[EpisodeWorker]] = []
        """Engines that are waiting for a host."""

    def __len__(self) -> int:
        return len(self.group)

    @property
    def receivers(self) -> WorkerGroup[EngineWorker]:
        """The engines that there are now, as what loads weights and has memory."""
        return self.group.held(EpisodeWorker.engine)

    def divided(self, parts: int) -> list[EngineClient]:
        """Return clients of consecutive engines, as many for each."""
        size = len(self) // parts
        return [
            EngineClient(self.group.part(range(first, first + size)), keeps=self._keeps)
            for first in range(0, parts * size, size)
        ]

    def generate(
        self, shares: Sequence[Sequence[GroupRequest]], sampling: Sampling, timeout_s: float
    ) -> list[list[SampledGroup] | WorkerError | WaitTimeoutError]:
        """Generate each engine's share; return its results with handles of columns and texts, or its error after
        `timeout_s`."""
        pending, handles = self.group.within(timeout_s + MARGIN_S).submit_by_handle(
            EpisodeWorker.generate_by_handle,
            [(share, sampling, timeout_s) for share in shares],
            [VALUES_A_GROUP * len(share) for share in shares],
        )
        return [
            self._joined(outcome, values) if isinstance(outcome, list) else outcome
            for outcome, values in zip(pending.outcomes(), handles, strict=True)
        ]

    def _joined(self, groups: list[SampledGroup], values: list[object]) -> list[SampledGroup] | WorkerError:
        try:
            if self._keeps:
                keep_here(values)
        except WorkerError as error:
            return error
        return attached(groups, values)

    def submit(self, engine: object, requests: Sequence[GroupRequest], sampling: Sampling) -> None:
        """Have one of `engines` begin `requests`; `collect` gives them back one by one."""
        self._alone(engine, ANSWER_TIMEOUT_S).call(EpisodeWorker.submit, requests, sampling)

    def collect(self, engine: object, timeout_s: float) -> PendingGroups:
        """Ask one of `engines` for the next of the groups that were submitted to it."""
        pending, (values,) = self._alone(engine, timeout_s).submit_by_handle(
            EpisodeWorker.collect_by_handle, [(timeout_s,)], [VALUES_A_GROUP]
        )
        return PendingGroups(engine, pending, values, self._keeps, time.monotonic() + timeout_s + MARGIN_S)

    @property
    def engines(self) -> list[object]:
        """The engines that there are now. One that takes another's place is another engine."""
        return list(self.group.hosts)

    def _alone(self, engine: object, timeout_s: float) -> WorkerGroup[EpisodeWorker]:
        if engine not in self.group.hosts:
            raise WorkerError("An engine was replaced while groups were asked of it.")
        return self.group.part([self.group.hosts.index(engine)]).within(timeout_s + MARGIN_S)

    def forget_prompts(self) -> None:
        """Make engines drop cached prompts; skip dead ones."""
        _require_of_the_living(self.receivers.submit(EngineWorker.forget_prompts))

    def sleep(self, refit_next: bool = False) -> None:
        """Let the engines give their devices' memory back; `refit_next`: they need not keep their weights. One whose
        process is gone holds none, and is passed over."""
        _require_of_the_living(self.receivers.submit(EngineWorker.sleep, refit_next))

    def wake(self) -> None:
        """Let the engines take their memory again. One whose process is gone is missed when it is to answer."""
        _require_of_the_living(self.receivers.submit(EngineWorker.wake))

    def lost(self) -> list[int]:
        """The ranks of engines with a process that is gone or does not answer."""
        outcomes = self.receivers.within(ANSWER_TIMEOUT_S).submit(EngineWorker.require_alive).outcomes()
        return [rank for rank, outcome in enumerate(outcomes) if outcome is not None]

    def replace(self, ranks: Sequence[int]) -> None:
        """Start new processes for `ranks`, and load their models."""
        _start_again(self.group, ranks)

    def set_aside(self, ranks: Sequence[int]) -> None:
        """Go on without `ranks`, which cannot be started where they were."""
        self._aside += [self.group.drop([rank]) for rank in sorted(ranks, reverse=True)]

    def take_back(self, tell: Callable[[str], None]) -> bool:
        """Restart set-aside engines that have a place now; return whether there are any. `tell` receives failures."""
        back = [engine for engine in self._aside if engine.moved()]
        self._aside = [engine for engine in self._aside if engine not in back]
        taken = False
        for engines in back:
            try:
                _start_again(engines, range(len(engines)))
            except (WorkerError, WaitTimeoutError) as error:
                tell(f"An engine whose host came back did not start and is given up: {error.message}")
                continue
            self.group.join(engines)
            taken = True
        return taken


def _start_again(group: WorkerGroup[EpisodeWorker], ranks: Sequence[int]) -> None:
    group.restart(ranks)
    group.part(ranks).within(group.start_timeout_s).call(EpisodeWorker.start)


def only_result(results: Sequence[R | None]) -> R:
    """Return the only result among the policy ranks' answers."""
    [answer] = [result for result in results if result is not None]
    return answer


def _require_of_the_living(call: PendingCall[None]) -> None:
    for outcome in call.outcomes():
        if isinstance(outcome, RlctlError) and not isinstance(outcome, WorkerDiedError):
            raise outcome


def generate_groups(
    engines: EngineClient,
    requests: Sequence[GroupRequest],
    sampling: Sampling,
    timeout_s: float,
    recover: Callable[[RlctlError], object] | None = None,
) -> list[SampledGroup]:
    """Return the results of all requests by group, with handles of columns and texts. Requests are dealt to engines in
    turn. `recover(error)` restores the engines after a failure, or raises; the failed engine's requests are then
    repeated."""
    results: list[SampledGroup] = []
    left = list(requests)
    while left:
        shares = [left[index :: len(engines)] for index in range(len(engines))]
        left, error = [], None
        for share, outcome in zip(shares, engines.generate(shares, sampling, timeout_s), strict=True):
            if isinstance(outcome, list):
                results += outcome
            else:
                left, error = left + share, error or outcome
        if error is not None:
            if recover is None:
                raise error
            recover(error)
    return sorted(results, key=lambda result: result.group)
