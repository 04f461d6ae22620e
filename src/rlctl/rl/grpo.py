"""The GRPO loop: generate, score, log-probabilities, advantages, train, refit.

It reads as the algorithm; what varies (engines, rewards, losses) are parts handed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlctl.backends.base import MinibatchResult, TokenLoss
from rlctl.config.schema import RlctlConfig
from rlctl.data.rollouts import Rollout
from rlctl.refit.records import RefitReport
from rlctl.rl.batch import make_batch
from rlctl.rl.devices import DeviceTurns
from rlctl.rl.policy import Policy
from rlctl.rl.run_loss import loss_metrics
from rlctl.rl.schedule import learning_rate, weight_decay
from rlctl.telemetry.phases import Phase
from rlctl.telemetry.timers import StepTimer


@dataclass(frozen=True)
class Scores:
    """What the rewards say of a step's rollouts, in their order. Suffix N: one entry a rollout."""

    rewards_N: np.ndarray  # float64
    accuracy_N: np.ndarray  # float64, 1 where the reference scorer calls the answer right; NaN: nothing says so
    terms_N: dict[str, np.ndarray]  # float64, score of each reward term before its weight
    failures: int
    """Completions on which a built-in scorer failed, and which count as wrong for it."""


class Generator(Protocol):
    """Samples the rollouts of a step, ordered by group and sample."""

    def generate(self, step: int) -> list[Rollout]: ...


class Rewards(Protocol):
    """Scores the rollouts of a step."""

    def score(self, step: int, rollouts: Sequence[Rollout]) -> Scores: ...


@dataclass(frozen=True)
class GrpoParts:
    """What the loop is made of."""

    generator: Generator
    rewards: Rewards
    policy: Policy
    refit: Callable[[int], RefitReport]
    """Bring the policy's weights into the engines, as the given version."""
    loss: TokenLoss
    turns: DeviceTurns
    """Who of policy and engines has the devices that both share."""


@dataclass(frozen=True)
class StepResult:
    """A finished step: its metrics, without the times, and the rollouts with their scores."""

    metrics: dict[str, Any]
    rollouts: Sequence[Rollout]
    scores: Scores


def train_step(parts: GrpoParts, config: RlctlConfig, step: int, timer: StepTimer) -> StepResult:
    """One step on weights of version `step`; leaves weights of version `step + 1` in policy and engines."""
    with timer(Phase.GENERATION), parts.turns.generating() as freed_bytes:
        rollouts = parts.generator.generate(step)
    with timer(Phase.REWARD):
        scores = parts.rewards.score(step, rollouts)
    batch = make_batch(rollouts, scores.rewards_N, config.grpo)
    with timer(Phase.TRAINING):
        packing = parts.policy.load_batch(batch)
    with timer(Phase.LOGPROBS):
        if config.grpo.recomputes_old_logprobs:
            parts.policy.logprobs("old_logprobs")
        if config.grpo.holds_reference:
            parts.policy.logprobs("reference_logprobs")
    with timer(Phase.TRAINING):
        lr = learning_rate(step, config.grpo.steps, config.optimizer.lr, config.scheduler)
        decay = weight_decay(step, config.grpo.steps, config.optimizer.weight_decay, config.scheduler)
        results = parts.policy.train(len(batch.minibatches), parts.loss, lr, decay)
    with timer(Phase.REFIT):
        refit = parts.refit(step + 1)
    metrics = {
        **_score_metrics(rollouts, scores),
        **_training_metrics(results),
        "lr": lr,
        "padding_fraction": packing.padding_fraction,
        "trained_tokens": packing.tokens,
        "unshared_tokens": packing.unshared_tokens,
        "micro_batches": packing.micro_batches,
        "imbalance": packing.imbalance,
        "offloaded_bytes": freed_bytes,
        "refit_seconds": {phase.value: value for phase, value in refit.seconds.items()},
        "refit_verified": refit.verified,
    }
    return StepResult(metrics, rollouts, scores)


def _score_metrics(rollouts: Sequence[Rollout], scores: Scores) -> dict[str, Any]:
    responses_N = np.array([rollout.response_tokens for rollout in rollouts])
    groups_N = np.array([rollout.group for rollout in rollouts])
    spread = [np.ptp(scores.rewards_N[groups_N == group]) for group in np.unique(groups_N)]
    return {
        "reward_mean": float(scores.rewards_N.mean()),
        "reward_std": float(scores.rewards_N.std()),
        "accuracy": None if np.isnan(scores.accuracy_N).any() else float(scores.accuracy_N.mean()),
        "reward_terms": {name: float(term_N.mean()) for name, term_N in scores.terms_N.items()},
        "scorer_failures": scores.failures,
        "groups_without_signal": float(np.mean([value == 0 for value in spread])),
        "response_tokens_mean": float(responses_N.mean()),
        "response_tokens_max": int(responses_N.max()),
        "truncated_fraction": float(np.mean([rollout.truncated for rollout in rollouts])),
        "prompt_tokens_mean": float(np.mean([rollout.prompt_tokens for rollout in rollouts])),
        "rollout_tokens": int(sum(rollout.tokens for rollout in rollouts)),
        "weight_version": min(rollout.weight_version for rollout in rollouts),
    }


def _training_metrics(results: Sequence[MinibatchResult]) -> dict[str, Any]:
    """Metrics over all optimizer steps of the batch; the gradient norm is that of the last step taken."""
    sums = {name: sum(result.sums[name] for result in results) for name in results[0].sums}
    maxima = {name: max(result.maxima[name] for result in results) for name in results[0].maxima}
    taken = [result for result in results if not result.skipped] or results[-1:]
    return {
        "loss": sum(result.loss for result in results) / len(results),
        **loss_metrics(sums, maxima),
        "grad_norm": taken[-1].grad_norm,
        "skipped_steps": sum(result.skipped for result in results),
    }
