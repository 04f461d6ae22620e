"""The training loop. It reads as the algorithm; what varies are the parts that it is handed.

    RolloutSource ---- finished groups: scalars here, token columns in the object store
          |                                   |
          |                                   v
          |                 Algorithm: which groups, advantages, token weights, which log-probs
          |                                   |
          | engines                           v
     WeightSync <-- new weights --- Policy: log-probs, loss, gradients, optimizer

A step trains on one batch and makes one new version of the weights. The loop does not know whether a batch is sampled
now, was sampled while the last one was trained on, or is read from a dataset, nor where the engines are, nor what the
loss is. Where nothing is sampled there are no engines, and `sync` and `agreement` are None.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from rlctl.backends.batching.batch import MinibatchResult, TrainBatch, WeightedRollout, equal_up_to_rounding
from rlctl.backends.clients import PolicyClient
from rlctl.data.rollouts import LIMIT_REASONS, Rollout, RolloutGroup
from rlctl.errors import DivergenceError, InputError, RlctlError, first_line
from rlctl.refit.records import RefitReport
from rlctl.refit.sync import WeightSync
from rlctl.rollouts.ledger import ranges
from rlctl.rollouts.source import RolloutBatch, RolloutSource
from rlctl.rollouts.validation import Validated, Validation
from rlctl.runs.interrupt import StopRequest
from rlctl.settings.config import RlctlConfig
from rlctl.telemetry.phases import ASIDE, Phase, StepTimer
from rlctl.training.agreement import Agreement
from rlctl.training.health import Health
from rlctl.training.method import Critic, Method, RunLoss
from rlctl.training.recovery import NoRecovery
from rlctl.training.saving import Saver
from rlctl.training.schedule import learning_rate, weight_decay


class Journal(Protocol):
    """Where a run tells what it does and keeps what it measured."""

    def doing(self, what: str) -> None:
        """Show what the run is busy with."""

    def begin_step(self, step: int) -> None:
        """Show that a step begins (counted from 1); its phases are those of the timer."""

    def say(self, text: str) -> None:
        """Show a message that stays."""

    def refitted(self, report: RefitReport) -> None:
        """Tell about the first refit."""

    def keep_rollouts(self, step: int, batch: RolloutBatch) -> None:
        """Keep some rollouts of a step for people to read."""

    def validated(self, step: int, found: Validated) -> None:
        """Tell about a validation after `step` finished steps, and keep some of its samples."""

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Keep and show the metrics of a finished step."""


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
    """None: there are no engines."""
    agreement: Agreement | None = None
    """None: no engine's log-probs are compared with the trainer's."""
    validation: Validation | None = None
    """None: the run does not validate."""
    critic: Critic | None = None
    """None: the method makes its advantages without a value model."""
    recovery: NoRecovery = field(default_factory=NoRecovery)
    """Brings back a policy that lost ranks."""


class Loop:
    """The steps of a run. `step` counts batches trained on and `version` weights; a new run begins with none of
    either, and its first step is step 1.

    A loop of your own derives from it and replaces `sample`, `train_on` or `refit`.
    """

    def __init__(self, config: RlctlConfig, parts: Parts, *, step: int = 0, version: int = 0) -> None:
        self.config, self.parts = config, parts
        self.step, self.version = step, version
        self.loss = RunLoss(parts.method)
        self._trained: dict[str, Any] | None = None
        """The metrics of the last step; None: this process has taken none."""

    def run(self, stop: StopRequest) -> bool:
        """Take every step up to the last one or a stop request; return whether the run was stopped."""
        journal = self.parts.journal
        if self.parts.sync is not None:
            journal.doing("first refit, every tensor compared")
            journal.refitted(self.parts.recovery.run(partial(self.parts.sync.refit, self.version), self))
        with stop.between_steps(), rare_garbage_collection():
            while self.step < self.config.run.steps and not stop.requested and not self._plateau:
                metrics, ended = self._step(stop)
                if stop.requested and not ended:  # it was asked for while the step was saved or logged
                    self._save(self.step, metrics, ending=True)
        if self._plateau:
            journal.say(self._plateau)
        return stop.requested

    def _step(self, stop: StopRequest) -> tuple[dict[str, Any], bool]:
        """Take one step; return its metrics and whether it was saved as the last one."""
        parts, step = self.parts, self.step + 1
        parts.timer.restart()
        survive = parts.recovery.run
        at_start = {} if self.step else survive(partial(self._validate, "validation_at_start"), self)
        parts.journal.begin_step(step)
        version = self.version
        with self._saving_what_is_trained():
            batch = survive(self.sample, self)
        metrics = batch_metrics(batch, version, compares=self.parts.method.compares_rewards)
        metrics |= survive(partial(self.train_on, batch), self, trains=True)
        parts.recovery.trained(self.step, version, batch)
        metrics |= {**survive(self.refit, self), **batch.metrics, **at_start}
        self.step, self._trained = step, metrics
        with self._saving_what_is_trained():
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
            parts.journal.log(step, self._timed(metrics))  # the report shows what it came to; no checkpoint does
            raise
        parts.journal.log(step, self._timed(metrics))
        return metrics, ending

    def sample(self) -> RolloutBatch:
        """Return the batch of the next step."""
        return self.parts.source.next(self.version)

    def train_on(self, batch: RolloutBatch) -> dict[str, Any]:
        """Train on a batch, where the algorithm keeps any of it; the policy has its next version afterwards."""
        policy, method, timer, config = self.parts.policy, self.parts.method, self.parts.timer, self.config
        train_batch = make_batch(batch.groups, method, config.batch.optimizer_steps)
        lr = learning_rate(self.step, config.run.steps, config.optimizer.lr, config.scheduler)
        decay = weight_decay(self.step, config.run.steps, config.optimizer.weight_decay, config.scheduler)
        self.version += 1
        metrics = {"lr": lr, "skipped_steps": 0, **selection_metrics(batch, train_batch)}
        metrics |= method.step_metrics(batch.groups)
        if not train_batch.minibatches:
            return metrics
        with timer(Phase.LOGPROBS):
            estimate_first(policy, method, train_batch)
        with timer(Phase.TRAINING):
            packing = policy.load_batch(train_batch)
        with timer(Phase.LOGPROBS):
            for column in sorted(method.needs):
                policy.add_logprobs(column)
            if (estimate := method.token_advantages) is not None:
                policy.estimate(estimate)
        critic, results = self.parts.critic, list[MinibatchResult]()
        if critic is not None:
            with timer(Phase.CRITIC):
                metrics |= critic.train(self.step, len(train_batch.minibatches))
        if critic is None or not critic.alone(self.step):
            with timer(Phase.TRAINING):
                for _ in range(config.batch.epochs):
                    results += policy.train(len(train_batch.minibatches), self.loss, lr, decay)
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
        """Bring the policy's weights into the engines, where there are some."""
        if self.parts.sync is None:
            return {}
        with self.parts.timer(Phase.REFIT):
            report = self.parts.sync.refit(self.version)
        seconds = {phase.value: value for phase, value in report.seconds.items()}
        return {"refit_seconds": seconds, "refit_verified": report.verified}

    def _validate(self, name: str) -> dict[str, Any]:
        validation, journal = self.parts.validation, self.parts.journal
        if validation is None or not validation.due(self.step):
            return {}
        journal.doing(f"validation after step {self.step}" if self.step else "validation before step 1")
        with self.parts.timer(Phase.VALIDATION):
            found = validation.measure(self.version)
        journal.validated(self.step, found)
        return {name: found.metrics}

    @property
    def _plateau(self) -> str | None:
        return self.parts.validation.plateau if self.parts.validation is not None else None

    def _save(self, step: int, metrics: dict[str, Any], *, ending: bool) -> None:
        """Begin a save when one is due; the last one is waited for."""
        saver = self.parts.saver
        if saver.due(step, ending):
            self.parts.journal.doing("saving")
            with saver.measured():
                if self.parts.sync is not None:
                    self.parts.sync.to_policy()  # the refit left the optimizer aside
                state = {"version": self.version, "source": self.parts.source.state(), "metrics": self._timed(metrics)}
                if self.parts.validation is not None:
                    state["validation"] = self.parts.validation.state()
                saver.begin(step, state, self.parts.source.write)
        saver.finish() if ending else saver.finish_if_written()

    @contextmanager
    def _saving_what_is_trained(self) -> Iterator[None]:
        """Save the last step where sampling or scoring fails; its weights are whole. What is wrong with a user's code
        after a step is an error at run time."""
        try:
            yield
        except RlctlError as error:
            if self._trained is None:
                raise
            try:
                self._save(self.step, self._trained, ending=True)
            except (RlctlError, OSError) as failure:
                self.parts.journal.say(f"Step {self.step} could not be saved: {first_line(failure)}")
            if isinstance(error, InputError):
                raise RlctlError(error.message, error.hint or "Fix it and continue with --allow-changes.") from error
            raise

    def _timed(self, metrics: dict[str, Any]) -> dict[str, Any]:
        seconds = self.parts.timer.seconds()
        working = seconds["total"] - sum(seconds[phase.value] for phase in ASIDE)
        return {**metrics, "tokens_per_s": metrics["tokens"] / working, "seconds": seconds}


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Let Python look for reference cycles after 200,000 new objects in place of 700: a step makes several objects for
    each rollout, none of them in a cycle, and most of the driver's time would go into looking at them again and
    again."""
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def estimate_first(policy: PolicyClient, method: Method, batch: TrainBatch) -> None:
    """Compute what an algorithm wants to know before it trains on a batch."""
    asked = method.before_training(batch)
    if asked is None:
        return
    other, loss, take = asked
    policy.load_batch(other)
    for column in sorted(method.needs):
        policy.add_logprobs(column)
    take(policy.evaluate(len(other.minibatches), loss))


def make_batch(groups: Sequence[RolloutGroup], method: Method, optimizer_steps: int) -> TrainBatch:
    """Return the rollouts of the groups that the algorithm keeps, with advantages and token weights.

    There are `optimizer_steps` mini-batches of about equal numbers of rollouts, or fewer where rollouts do not suffice.
    Rollouts without a gradient are taken out of them afterwards, unless `filter.skip` is off.
    """
    kept = [group for group in groups if method.trains_on(group)]
    rollouts = [rollout for group in kept for rollout in group.rollouts]
    advantages_N = np.concatenate([np.zeros(0), *method.batch_advantages(kept)])
    imitated_N = np.zeros(len(rollouts), bool)
    if method.nll_weight and kept:
        imitated_N = np.concatenate([method.imitated(group) for group in kept])
    parts = np.array_split(np.arange(len(rollouts)).reshape(-1, method.sequences), optimizer_steps)
    spans = [slice(int(part[0, 0]), int(part[-1, -1]) + 1) for part in parts if len(part)]
    minibatches = [_minibatch(rollouts[span], advantages_N[span], imitated_N[span], method) for span in spans]

    needs_advantage = not method.learns_without_advantage
    trained: list[tuple[WeightedRollout, ...]] = []
    skipped: list[WeightedRollout] = []
    for minibatch in minibatches:
        idle_N = [one.token_weight == 0 or (needs_advantage and one.advantage == 0) for one in minibatch]
        if not method.skips_idle or True not in idle_N:
            trained.append(minibatch)
            continue
        skipped += compress(minibatch, idle_N)
        trained.append(tuple([one for one, idle in zip(minibatch, idle_N, strict=True) if not idle]))
    read_by_teacher = {group.position: group.for_teacher for group in kept if group.for_teacher is not None}
    return TrainBatch(
        tuple(trained),
        {group.position: group.columns for group in kept},
        tuple(skipped),
        tuple(
            tuple(_as_teacher_reads(read_by_teacher[rollout.position], rollout) for rollout in one) for one in trained
        )
        if read_by_teacher
        else (),
    )


def _as_teacher_reads(theirs: Rollout, ours: WeightedRollout) -> WeightedRollout:
    """Return the text of a rollout as a teacher's own tokenizer writes it."""
    return ours._replace(sample=theirs.sample, prompt_tokens=theirs.prompt_tokens, tokens=theirs.tokens)


def _minibatch(
    rollouts: Sequence[Rollout], advantages_N: np.ndarray, imitated_N: np.ndarray, method: Method
) -> tuple[WeightedRollout, ...]:
    """Return the rollouts of an optimizer step; those in `imitated_N` also have a weight of their likelihood."""
    tokens_N = np.array([method.learned_tokens(rollout) for rollout in rollouts])
    weights_N = method.token_weights(tokens_N)
    nll_weight = method.nll_weight / max(1, int(tokens_N[imitated_N].sum()))
    nll_weights_N = np.where(imitated_N & (weights_N != 0), nll_weight, 0.0)
    scalars_N = (advantages_N.tolist(), weights_N.tolist(), nll_weights_N.tolist())
    return tuple([
        WeightedRollout(r.position, r.sample, r.prompt_tokens, tokens, advantage, weight, begin, nll_weight)
        for r, advantage, weight, nll_weight in zip(rollouts, *scalars_N, strict=True)
        for begin, tokens in (((0, r.tokens),) if r.episode is None else r.contexts())
    ])  # fmt: skip


def selection_metrics(batch: RolloutBatch, trained: TrainBatch) -> dict[str, Any]:
    """Return the groups that are not trained on, and the rollouts that are not computed for lack of a gradient."""
    computed = sum(int(column(one, "tokens").sum()) for one in trained.minibatches)
    skipped = int(column(trained.skipped, "tokens").sum())
    return {
        "dropped_groups": len(batch.groups) - len(trained.columns),
        "skipped_rollouts": len(trained.skipped),
        "skipped_fraction": skipped / max(1, skipped + computed),
    }


def batch_metrics(batch: RolloutBatch, version: int, *, compares: bool) -> dict[str, Any]:
    """Return what the scalars of a batch say that is trained on by the weights of `version`; `compares`: the rewards of
    a group are compared with each other. Suffix N: its rollouts."""
    rollouts = batch.rollouts
    rewards_N = np.array([reward for one in rollouts if (reward := one.reward) is not None], dtype=np.float64)
    response_N, tokens_N = column(rollouts, "response_tokens"), column(rollouts, "tokens")
    rewards = {}
    if len(rewards_N):
        rewards = {
            "reward_mean": float(rewards_N.mean()),
            "reward_std": float(rewards_N.std()),
            **reward_parts(batch),
        }
        if compares:
            without_signal = [_compares_equal([one.reward or 0.0 for one in group.rollouts]) for group in batch.groups]
            rewards["groups_without_signal"] = float(np.mean(without_signal))
    accuracy_N = [accuracy for one in rollouts if (accuracy := one.accuracy) is not None]
    accuracy = {"accuracy": float(np.mean(accuracy_N))} if len(accuracy_N) == len(rollouts) else {}
    answered_N = [answered for one in rollouts if (answered := one.answered) is not None]
    sampled = [rollout for rollout in rollouts if rollout.versions]
    return {
        **rewards,
        **accuracy,
        **({"answered_fraction": float(np.mean(answered_N))} if answered_N else {}),
        "response_tokens_mean": float(response_N.mean()),
        "response_tokens_max": int(response_N.max()),
        "prompt_tokens_mean": float(column(rollouts, "prompt_tokens").mean()),
        **image_metrics(batch, rollouts),
        "tokens": int(tokens_N.sum()),
        "positions": ranges(group.position for group in batch.groups),
        **(sampling_metrics(sampled, version) if sampled else {}),
    }


def column(rollouts: Sequence[Rollout | WeightedRollout], name: str) -> np.ndarray:
    """Return the integers that rollouts have as `name`; int64 [N]."""
    return np.fromiter(map(attrgetter(name), rollouts), np.int64, len(rollouts))


def image_metrics(batch: RolloutBatch, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the images of a batch's prompts, counted once for a group, and the mean of a rollout's image tokens; empty
    where there are none."""
    if not column(rollouts, "images").any():
        return {}
    images = sum(max((one.images for one in group.rollouts), default=0) for group in batch.groups)
    return {"images": images, "image_tokens_mean": float(column(rollouts, "image_tokens").mean())}


def sampling_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, Any]:
    """Return how rollouts ended that engines have sampled, and which weights sampled them."""
    first_N = np.array([rollout.versions[0][0] for rollout in rollouts])
    reasons = Counter([rollout.stop_reason for rollout in rollouts])
    return {
        "truncated_fraction": sum(reasons[reason] for reason in LIMIT_REASONS) / len(rollouts),
        "sampled_rollouts": len(rollouts),
        "rollout_tokens": int(column(rollouts, "tokens").sum()),
        **episode_metrics(rollouts),
        "stop_reasons": dict(sorted(reasons.items())),
        "weight_version": int(first_N.min()),
        "staleness": {"mean": float((version - first_N).mean()), "max": int((version - first_N).max())},
        "tokens_by_version": tokens_by_version(rollouts),
    }


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the turns of episodes with an environment, and the means of what is counted in them."""
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    if not episodes:
        return {}
    names = sorted({name for one in episodes for name in one.counts})
    turns = [one.turns for one in episodes]
    counts = {name: float(np.mean([one.counts.get(name, 0.0) for one in episodes])) for name in names}
    return {"turns_mean": float(np.mean(turns)), "turns_max": max(turns), "environment": counts}


def tokens_by_version(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """Return [version, response tokens that its weights chose] of each version, the oldest first."""
    found: Counter[int] = Counter()
    for rollout in rollouts:
        for version, tokens in rollout.versions:
            found[version] += tokens
    return [[version, found[version]] for version in sorted(found)]


def _compares_equal(rewards_G: list[float]) -> bool:
    return len(rewards_G) > 1 and equal_up_to_rounding(min(rewards_G), max(rewards_G))


def reward_parts(batch: RolloutBatch) -> dict[str, dict[str, float]]:
    """Return the mean of each reward term over the rollouts that it applies to, and where there are several sources of
    prompts the mean reward of each."""
    all_terms = [rollout.terms for rollout in batch.rollouts]
    names = {name for terms in all_terms for name in terms}
    by_term = {name: [score for terms in all_terms if (score := terms.get(name)) is not None] for name in names}
    by_source: dict[str, list[float]] = {}
    for group in batch.groups:
        if group.prompt.source:
            by_source.setdefault(group.prompt.source, []).extend([one.reward or 0.0 for one in group.rollouts])
    means = {"reward_terms": by_term, "reward_by_source": by_source}
    return {
        kind: {name: float(np.mean(values)) for name, values in sorted(found.items()) if values}
        for kind, found in means.items()
        if found or kind == "reward_terms"
    }


def optimizer_metrics(results: Sequence[MinibatchResult]) -> dict[str, Any]:
    """Return the metrics of a batch's optimizer steps, if any: mean loss of those taken, gradient norm of the last of
    them."""
    if not results:
        return {}
    taken = [result for result in results if not result.skipped] or results[-1:]
    return {
        "loss": sum(result.loss for result in taken) / len(taken),
        "grad_norm": taken[-1].grad_norm,
        "skipped_steps": sum(result.skipped for result in results),
        "optimizer_steps": len(results),
        **({"loss_scale": results[-1].loss_scale} if results[-1].loss_scale is not None else {}),
        **({"rounding": asdict(taken[-1].rounded)} if taken[-1].rounded is not None else {}),
        **({"routers": asdict(taken[-1].routers)} if taken[-1].routers is not None else {}),
    }
