"""The metrics of a step: facts of its batch, of its selection and of its optimizer steps, by name in metrics.jsonl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import numpy as np

from rlctl.backends.batching.batch import MinibatchResult, TrainBatch, WeightedRollout, equal_up_to_rounding
from rlctl.backends.batching.packing import PackingStats
from rlctl.data.rollouts import LIMIT_REASONS, Rollout
from rlctl.rollouts.ledger import ranges
from rlctl.rollouts.source import RolloutBatch
from rlctl.telemetry.phases import ASIDE, StepTimer


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


def packing_metrics(packing: PackingStats) -> dict[str, Any]:
    """Return how tightly the rows of a batch are packed."""
    return {
        "padding_fraction": packing.padding_fraction,
        "trained_tokens": packing.tokens,
        "unshared_tokens": packing.unshared_tokens,
        "micro_batches": packing.micro_batches,
        "imbalance": packing.imbalance,
    }


def timed(metrics: dict[str, Any], timer: StepTimer) -> dict[str, Any]:
    """Return metrics with the seconds of the step's phases and its tokens per second; checkpoints and validations
    (`ASIDE`) do not count."""
    seconds = timer.seconds()
    working = seconds["total"] - sum(seconds[phase.value] for phase in ASIDE)
    return {**metrics, "tokens_per_s": metrics["tokens"] / working, "seconds": seconds}
