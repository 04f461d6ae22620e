"""The training loop. It reads as the algorithm; what varies are the parts that it is handed.

    RolloutSource ---- finished groups: scalars here, token columns in the object store
          |                                   |
          |                                   v
          |                 Algorithm: which groups, advantages, token weights, which log-probs
          |                                   |
          | engines                           v
     WeightSync <-- new weights --- Policy: log-probs, loss, gradients, optimizer

A step trains on one batch and makes one new version of the weights. The loop does not know whether a batch is sampled
now or was sampled while the last one was trained on, nor where the engines are, nor what the loss is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlctl.backends.batch import MinibatchResult, TrainBatch, WeightedRollout
from rlctl.backends.clients import PolicyClient
from rlctl.config.schema import RlctlConfig
from rlctl.data.rollouts import Rollout, RolloutGroup
from rlctl.errors import DivergenceError
from rlctl.refit.records import RefitReport
from rlctl.refit.sync import WeightSync
from rlctl.rl.agreement import Agreement
from rlctl.rl.algorithms.algorithm import Algorithm, RunLoss
from rlctl.rl.health import Health
from rlctl.rl.saving import Saver
from rlctl.rl.schedule import learning_rate, weight_decay
from rlctl.rollouts.source import RolloutBatch, RolloutSource
from rlctl.runs.interrupt import StopRequest
from rlctl.telemetry.phases import Phase, StepTimer


class Journal(Protocol):
    """Where a run tells what it does and keeps what it measured."""

    def doing(self, what: str) -> None:
        """Show what the run is busy with."""

    def say(self, text: str) -> None:
        """Show a message that stays."""

    def refitted(self, report: RefitReport) -> None:
        """Tell about the first refit."""

    def keep_rollouts(self, step: int, batch: RolloutBatch) -> None:
        """Keep some rollouts of a step for people to read."""

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Keep and show the metrics of a finished step."""


@dataclass(frozen=True)
class Parts:
    """The parts of a run."""

    source: RolloutSource
    algorithm: Algorithm
    policy: PolicyClient
    sync: WeightSync
    saver: Saver
    journal: Journal
    agreement: Agreement
    health: Health
    timer: StepTimer
    """Shared with the source, which counts its own phases."""


class Loop:
    """The steps of a run. `step` counts batches trained on and `version` weights; both begin at 0 in a new run.

    A loop of your own derives from it and replaces `sample`, `train_on` or `refit`.
    """

    def __init__(self, config: RlctlConfig, parts: Parts, *, step: int = 0, version: int = 0) -> None:
        self.config, self.parts = config, parts
        self.step, self.version = step, version
        self.loss = RunLoss(parts.algorithm)

    def run(self, stop: StopRequest) -> bool:
        """Take every step up to the last one or a stop request; return whether the run was stopped."""
        journal = self.parts.journal
        if self.parts.agreement.note:
            journal.say(self.parts.agreement.note)
        journal.doing("first refit, every tensor compared")
        journal.refitted(self.parts.sync.refit(self.version))
        with stop.between_steps():
            while self.step < self.config.run.steps and not stop.requested:
                metrics, ended = self._step(stop)
                if stop.requested and not ended:  # it was asked for while the step was saved or logged
                    self._save(self.step - 1, metrics, ending=True)
        return stop.requested

    def _step(self, stop: StopRequest) -> tuple[dict[str, Any], bool]:
        """Take one step; return its metrics and whether it was saved as the last one."""
        parts, step = self.parts, self.step
        parts.timer.restart()
        parts.journal.doing(f"step {step + 1}")
        batch = self.sample()
        metrics = {**batch_metrics(batch), **self.train_on(batch), **self.refit(), **batch.metrics}
        self.step += 1
        parts.journal.keep_rollouts(step, batch)
        try:
            self._tell_troubles(step, metrics)
            ending = self.step == self.config.run.steps or stop.requested
            with parts.timer(Phase.CHECKPOINT):
                self._save(step, metrics, ending=ending)
        except DivergenceError:
            parts.journal.log(step, self._timed(metrics))  # the report shows what it came to; no checkpoint does
            raise
        parts.journal.log(step, self._timed(metrics))
        return metrics, ending

    def sample(self) -> RolloutBatch:
        """Return the batch of the next step."""
        return self.parts.source.next(self.version)

    def train_on(self, batch: RolloutBatch) -> dict[str, Any]:
        """Train on a batch, where the algorithm keeps any of it; the policy has its next version afterwards."""
        policy, algorithm, timer, config = self.parts.policy, self.parts.algorithm, self.parts.timer, self.config
        train_batch = make_batch(batch.groups, algorithm, config.batch.optimizer_steps)
        lr = learning_rate(self.step, config.run.steps, config.optimizer.lr, config.scheduler)
        decay = weight_decay(self.step, config.run.steps, config.optimizer.weight_decay, config.scheduler)
        self.version += 1
        metrics = {"lr": lr, "dropped_groups": len(batch.groups) - len(train_batch.columns), "skipped_steps": 0}
        if not train_batch.minibatches:
            return metrics
        with timer(Phase.TRAINING):
            packing = policy.load_batch(train_batch)
        with timer(Phase.LOGPROBS):
            for column in sorted(algorithm.needs):
                policy.logprobs(column)
        with timer(Phase.TRAINING):
            results = policy.train(len(train_batch.minibatches), self.loss, lr, decay)
        return {
            **metrics,
            **self.loss.metrics(results),
            **optimizer_metrics(results),
            "padding_fraction": packing.padding_fraction,
            "trained_tokens": packing.tokens,
            "unshared_tokens": packing.unshared_tokens,
            "micro_batches": packing.micro_batches,
            "imbalance": packing.imbalance,
        }

    def refit(self) -> dict[str, Any]:
        """Bring the policy's weights into the engines."""
        with self.parts.timer(Phase.REFIT):
            report = self.parts.sync.refit(self.version)
        seconds = {phase.value: value for phase, value in report.seconds.items()}
        return {"refit_seconds": seconds, "refit_verified": report.verified}

    def _tell_troubles(self, step: int, metrics: dict[str, Any]) -> None:
        """Say what a reader of the numbers should not miss; DivergenceError where going on makes no sense."""
        for text in self.parts.health.check(step, metrics):
            self.parts.journal.say(text)
        if warning := self.parts.agreement.check(step, metrics):
            self.parts.journal.say(warning)

    def _save(self, step: int, metrics: dict[str, Any], *, ending: bool) -> None:
        """Begin a save when one is due; the last one is waited for."""
        saver = self.parts.saver
        if saver.due(step, ending):
            self.parts.journal.doing(f"saving step {step + 1}")
            self.parts.sync.to_policy()  # the refit left the optimizer aside
            state = {"version": self.version, "source": self.parts.source.state(), "metrics": self._timed(metrics)}
            saver.begin(step, state)
        saver.finish() if ending else saver.finish_if_written()

    def _timed(self, metrics: dict[str, Any]) -> dict[str, Any]:
        seconds = self.parts.timer.seconds()
        return {**metrics, "tokens_per_s": metrics["rollout_tokens"] / seconds["total"], "seconds": seconds}


def make_batch(groups: Sequence[RolloutGroup], algorithm: Algorithm, optimizer_steps: int) -> TrainBatch:
    """Return the rows of the groups that the algorithm keeps, with advantages and token weights.

    There are `optimizer_steps` mini-batches of about equal numbers of rollouts, or fewer where rollouts do not suffice.
    """
    kept = [group for group in groups if algorithm.keeps(group.rewards_G)]
    pairs = [
        (rollout, float(advantage))
        for group in kept
        for rollout, advantage in zip(group.rollouts, algorithm.advantages(group.rewards_G), strict=True)
    ]
    parts = np.array_split(np.arange(len(pairs)), optimizer_steps)
    minibatches = tuple(_minibatch([pairs[i] for i in part], algorithm) for part in parts if len(part))
    return TrainBatch(minibatches, {group.position: group.columns for group in kept})


def _minibatch(pairs: Sequence[tuple[Rollout, float]], algorithm: Algorithm) -> tuple[WeightedRollout, ...]:
    weights_N = algorithm.token_weights(np.array([rollout.response_tokens for rollout, _ in pairs]))
    return tuple(
        WeightedRollout(r.position, r.sample, r.prompt_tokens, r.tokens, advantage, float(weight))
        for (r, advantage), weight in zip(pairs, weights_N, strict=True)
    )


def batch_metrics(batch: RolloutBatch) -> dict[str, Any]:
    """Return what the scalars of a batch say. Suffix N: its rollouts."""
    rollouts = batch.rollouts
    rewards_N = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
    accuracy_N = [rollout.accuracy for rollout in rollouts if rollout.accuracy is not None]
    terms = list(rollouts[0].terms)
    return {
        "reward_mean": float(rewards_N.mean()),
        "reward_std": float(rewards_N.std()),
        "accuracy": float(np.mean(accuracy_N)) if len(accuracy_N) == len(rollouts) else None,
        "reward_terms": {name: float(np.mean([rollout.terms[name] for rollout in rollouts])) for name in terms},
        "groups_without_signal": float(np.mean([np.ptp(group.rewards_G) == 0 for group in batch.groups])),
        "response_tokens_mean": float(np.mean([rollout.response_tokens for rollout in rollouts])),
        "response_tokens_max": max(rollout.response_tokens for rollout in rollouts),
        "truncated_fraction": float(np.mean([rollout.truncated for rollout in rollouts])),
        "prompt_tokens_mean": float(np.mean([rollout.prompt_tokens for rollout in rollouts])),
        "rollout_tokens": sum(rollout.tokens for rollout in rollouts),
        "weight_version": min(rollout.first_version for rollout in rollouts),
    }


def optimizer_metrics(results: Sequence[MinibatchResult]) -> dict[str, Any]:
    """Return the metrics of a batch's optimizer steps: mean loss of those taken, gradient norm of the last of them."""
    taken = [result for result in results if not result.skipped] or results[-1:]
    return {
        "loss": sum(result.loss for result in taken) / len(taken),
        "grad_norm": taken[-1].grad_norm,
        "skipped_steps": sum(result.skipped for result in results),
        "optimizer_steps": len(results),
    }
