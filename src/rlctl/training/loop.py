"""The training loop: sample, train, refit, validate, save, log. Runs differ in the parts that it is given.

    RolloutSource ---- finished groups: scalars here, token columns in the object store
          |                                   |
          |                                   v
          |                 Method: which groups, advantages, token weights, which log-probs
          |                                   |
          | engines                           v
     WeightSync <-- new weights --- Policy: log-probs, loss, gradients, optimizer

A step trains on one batch and makes one new version of the weights. The loop does not know whether a batch is sampled
now, was sampled during the previous step, or is read from a dataset, nor where the engines are, nor which loss is
computed. A run that samples nothing has no engines: `sync` and `agreement` are None.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlctl.backends.batching.batch import MinibatchResult
from rlctl.backends.clients import PolicyClient
from rlctl.errors import DivergenceError
from rlctl.garbage import rare_garbage_collection
from rlctl.refit.sync import WeightSync
from rlctl.rollouts.source import Batch, RolloutSource
from rlctl.rollouts.validation import Validation
from rlctl.runs.interrupt import StopRequest
from rlctl.settings.config import RlctlConfig
from rlctl.telemetry.phases import Phase, StepTimer
from rlctl.training.agreement import Agreement
from rlctl.training.health import Health
from rlctl.training.journal import Journal
from rlctl.training.method import Method
from rlctl.training.recovery import NoRecovery
from rlctl.training.run_loss import RunLoss
from rlctl.training.running_parts import Critic
from rlctl.training.saving import Saver, saved_if_it_fails
from rlctl.training.schedule import learning_rate, weight_decay
from rlctl.training.step_metrics import optimizer_metrics, packing_metrics, selection_metrics, timed
from rlctl.training.train_batch import run_pass_before


@dataclass(frozen=True)
class Parts:
    """The parts of a run."""

    source: RolloutSource
    method: Method
    policy: PolicyClient
    saver: Saver
    journal: Journal
    health: Health
    timer: StepTimer
    """Shared with the source, which counts its own phases."""
    sync: WeightSync | None = None
    """None without engines."""
    agreement: Agreement | None = None
    """None: engine and trainer log-probs are not compared."""
    validation: Validation | None = None
    critic: Critic | None = None
    recovery: NoRecovery = field(default_factory=NoRecovery)
    """Restarts a policy that lost ranks."""


class Loop:
    """The steps of a run. `step` counts batches trained on and `version` weights; a new run begins with none of
    either, and its first step is step 1. A loop of your own derives from it and replaces `sample`, `train_on` or
    `refit`."""

    def __init__(self, config: RlctlConfig, parts: Parts, *, step: int = 0, version: int = 0) -> None:
        self.config, self.parts = config, parts
        self.step, self.version = step, version
        self.loss = RunLoss(parts.method)
        self._trained: dict[str, Any] | None = None
        """The metrics of the last step; None: this process has taken none."""

    def run(self, stop: StopRequest) -> bool:
        """Take every step up to the last one or a stop request; return whether the run was stopped."""
        self.begin()
        with stop.between_steps(), rare_garbage_collection():
            while not self.ended and not stop.requested:
                self.advance(stop)
        self.end()
        return stop.requested

    def begin(self) -> None:
        """Refit the engines, if the run has any, before the first step of this process."""
        journal = self.parts.journal
        if self.parts.sync is not None:
            journal.doing("first refit, every tensor compared")
            journal.refitted(self.parts.recovery.run(partial(self.parts.sync.refit, self.version), self))

    def advance(self, stop: StopRequest) -> None:
        """Take one step, which is saved if a stop is requested meanwhile."""
        metrics, ended = self._step(stop)
        if stop.requested and not ended:  # it was asked for while the step was saved or logged
            self._save(self.step, metrics, ending=True)

    def end(self) -> None:
        """Tell why the run ends before its last step, if it does."""
        if self._plateau:
            self.parts.journal.say(self._plateau)

    @property
    def ended(self) -> bool:
        """Whether the last step is taken, or validation shows no further improvement."""
        return self.step >= self.config.run.steps or bool(self._plateau)

    def _step(self, stop: StopRequest) -> tuple[dict[str, Any], bool]:
        """Take one step; return its metrics and whether it was saved as the last one."""
        parts, step = self.parts, self.step + 1
        parts.timer.restart()
        survive = parts.recovery.run
        at_start = {} if self.step else survive(partial(self._validate, "validation_at_start"), self)
        parts.journal.begin_step(step)
        version = self.version
        with self._saved_if_it_fails():
            batch = survive(self.sample, self)
        metrics = parts.method.batch_metrics(batch, version)
        metrics |= survive(partial(self.train_on, batch), self, trains=True)
        parts.recovery.trained(version, batch, self)
        metrics |= {**survive(self.refit, self), **batch.metrics, **at_start}
        self.step, self._trained = step, metrics
        with self._saved_if_it_fails():
            metrics |= survive(partial(self._validate, "validation"), self)
        parts.journal.keep_rollouts(step, batch)
        try:
            for text in parts.health.check(step, metrics):
                parts.journal.say(text)
            if parts.agreement is not None and (warning := parts.agreement.check(step, metrics)):
                parts.journal.say(warning)
            ending = self.step == self.config.run.steps or stop.requested or bool(self._plateau)
            with parts.timer(Phase.CHECKPOINT):
                survive(partial(self._save, step, metrics, ending=ending), self)
            metrics |= parts.recovery.metrics()
        except DivergenceError:
            parts.journal.log(step, timed(metrics, parts.timer))  # shown in the report, but not saved
            raise
        parts.journal.log(step, timed(metrics, parts.timer))
        return metrics, ending

    def sample(self) -> Batch:
        """Return the batch of the next step."""
        return self.parts.source.next(self.version)

    def train_on(self, batch: Batch) -> dict[str, Any]:
        """Train on the groups that the method keeps, if any; the policy then has its next version."""
        policy, method, timer, config = self.parts.policy, self.parts.method, self.parts.timer, self.config
        train_batch = method.train_batch(batch.groups, config.batch.optimizer_steps)
        lr = learning_rate(self.step, config.run.steps, config.optimizer.lr, config.scheduler)
        decay = weight_decay(self.step, config.run.steps, config.optimizer.weight_decay, config.scheduler)
        self.version += 1
        metrics = {"lr": lr, "skipped_steps": 0, **selection_metrics(batch, train_batch)}
        if not train_batch.minibatches:
            return metrics
        with timer(Phase.LOGPROBS):
            run_pass_before(policy, method, train_batch, self.step)
        with timer(Phase.TRAINING):
            packing = policy.load_batch(train_batch)
        with timer(Phase.LOGPROBS):
            for column in sorted(method.needs):
                policy.add_logprobs(column)
            if train_batch.estimate is not None:
                policy.estimate(train_batch.estimate)
        critic, results = self.parts.critic, list[MinibatchResult]()
        if critic is not None:
            with timer(Phase.CRITIC):
                metrics |= critic.train(self.step, len(train_batch.minibatches))
        if critic is None or not critic.alone(self.step):
            with timer(Phase.TRAINING):
                for _ in range(config.batch.epochs):
                    results += policy.train(len(train_batch.minibatches), self.loss, lr, decay)
        return metrics | self.loss.metrics(results) | optimizer_metrics(results) | packing_metrics(packing)

    def refit(self) -> dict[str, Any]:
        """Copy the policy's weights to the engines, if the run has any."""
        if self.parts.sync is None:
            return {}
        with self.parts.timer(Phase.REFIT):
            report = self.parts.sync.refit(self.version)
        seconds = {phase.value: value for phase, value in report.seconds.items()}
        return {"refit_seconds": seconds, "refit_bytes": report.sent_bytes, "refit_verified": report.verified}

    def _validate(self, name: str) -> dict[str, Any]:
        validation, journal = self.parts.validation, self.parts.journal
        if validation is None or not validation.due(self.step):
            return {}
        journal.doing(f"validation after step {self.step}" if self.step else "validation before step 1")
        with self.parts.timer(Phase.VALIDATION):
            result = validation.measure(self.version)
        journal.validated(self.step, result)
        return {name: result.metrics}

    @property
    def _plateau(self) -> str | None:
        return self.parts.validation.plateau if self.parts.validation is not None else None

    def _save(self, step: int, metrics: dict[str, Any], *, ending: bool) -> None:
        """Begin a save when one is due; the last one is waited for."""
        parts, saver = self.parts, self.parts.saver
        if saver.due(step, ending):
            parts.journal.doing("saving")
            with saver.measured():
                if parts.sync is not None:
                    parts.sync.to_policy()  # the refit left the optimizer aside
                state = {"version": self.version, "source": parts.source.state(),
                         "metrics": timed(metrics, parts.timer)}  # fmt: skip
                if parts.validation is not None:
                    state["validation"] = parts.validation.state()
                saver.begin(step, state, parts.source.write)
        saver.finish() if ending else saver.finish_if_written()

    def _saved_if_it_fails(self) -> AbstractContextManager[None]:
        """Save the last step of this process, whose weights are whole, if the block fails."""
        trained = self._trained
        save = None if trained is None else partial(self._save, self.step, trained, ending=True)
        return saved_if_it_fails(save, self.step, self.parts.journal.say)
