"""The metrics of a batch of rollouts: rewards, lengths, and the weights that sampled them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlctl.data.rollouts import LIMIT_REASONS, EpisodeFacts, Rollout, RolloutGroup
from rlctl.methods.rl.advantages import nearly_equal
from rlctl.rollouts.source import RolloutBatch
from rlctl.training.step_metrics import column, length_metrics


def rollout_metrics(batch: RolloutBatch, version: int, *, compares: bool) -> dict[str, Any]:
    """Return rewards, lengths and versions of a batch that the weights of `version` train on. `compares`: the rewards
    of a group are compared with each other. Suffix N: the rollouts of the batch."""
    rollouts = batch.rollouts
    rewards_N = np.array([reward for rollout in rollouts if (reward := rollout.reward) is not None], dtype=np.float64)
    rewards = {}
    if len(rewards_N):
        rewards = {
            "reward_mean": float(rewards_N.mean()),
            "reward_std": float(rewards_N.std()),
            **reward_parts(batch),
        }
        if compares:
            by_group = [group.rewards_G for group in batch.groups]
            without_signal = [len(rewards_G) > 1 and nearly_equal(rewards_G) for rewards_G in by_group]
            rewards["groups_without_signal"] = float(np.mean(without_signal))
    if any(group.prompt.source for group in batch.groups):
        rewards["sources"] = source_metrics(batch.groups)
    accuracy_N = [accuracy for rollout in rollouts if (accuracy := rollout.accuracy) is not None]
    accuracy = {"accuracy": float(np.mean(accuracy_N))} if 0 < len(accuracy_N) == len(rollouts) else {}
    answered_N = [answered for rollout in rollouts if (answered := rollout.answered) is not None]
    sampled = [rollout for rollout in rollouts if rollout.versions]
    return {
        **rewards,
        **accuracy,
        **({"answered_fraction": float(np.mean(answered_N))} if answered_N else {}),
        **length_metrics(batch.groups),
        **episode_seconds(batch.groups),
        **(sampling_metrics(sampled, version) if sampled else {}),
    }


def sampling_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, Any]:
    """Return how rollouts ended, and which weights sampled them."""
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
    """Return the turns of episodes with an environment, and the means of their counts."""
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    if not episodes:
        return {}
    names = sorted({name for episode in episodes for name in episode.counts})
    turns = [episode.turns for episode in episodes]
    counts = {name: float(np.mean([episode.counts.get(name, 0.0) for episode in episodes])) for name in names}
    return {"turns_mean": float(np.mean(turns)), "turns_max": max(turns), "environment": counts}


def episode_seconds(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Return the mean seconds of an episode in the engine and in its environment, of all and by source."""
    by_source: dict[str, list[EpisodeFacts]] = {}
    for group in groups:
        episodes = [rollout.episode for rollout in group.rollouts if rollout.episode is not None]
        if episodes:
            by_source.setdefault(group.prompt.source, []).extend(episodes)
    if not by_source:
        return {}
    seconds = _seconds_of([episode for episodes in by_source.values() for episode in episodes])
    of_sources = {source: _seconds_of(episodes) for source, episodes in sorted(by_source.items()) if source}
    return {"episode_seconds": {**seconds, **({"sources": of_sources} if of_sources else {})}}


def _seconds_of(episodes: Sequence[EpisodeFacts]) -> dict[str, float]:
    return {
        "model": float(np.mean([episode.model_s for episode in episodes])),
        "environment": float(np.mean([episode.environment_s for episode in episodes])),
    }


def source_metrics(groups: Sequence[RolloutGroup]) -> dict[str, dict[str, float]]:
    """Return, by source, rewards, lengths, turns and failed episodes of its rollouts."""
    by_source: dict[str, list[RolloutGroup]] = {}
    for group in groups:
        by_source.setdefault(group.prompt.source, []).append(group)
    return {source: _of_source(part) for source, part in sorted(by_source.items())}


def _of_source(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    values = {
        "reward_mean": [rollout.reward for rollout in rollouts],
        "accuracy": [rollout.accuracy for rollout in rollouts],
        "response_tokens_mean": [rollout.response_tokens for rollout in rollouts],
        "turns_mean": [rollout.episode and rollout.episode.turns for rollout in rollouts],
    }
    measured = {name: [value for value in column if value is not None] for name, column in values.items()}
    counts = {"rollouts": len(rollouts), "failed_episodes": sum(len(group.failed) for group in groups)}
    return {**counts, **{name: float(np.mean(column)) for name, column in measured.items() if column}}


def tokens_by_version(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """Return [version, response tokens that its weights chose] of each version, the oldest first."""
    total: Counter[int] = Counter()
    for rollout in rollouts:
        for version, tokens in rollout.versions:
            total[version] += tokens
    return [[version, total[version]] for version in sorted(total)]


def reward_parts(batch: RolloutBatch) -> dict[str, dict[str, float]]:
    """Return the mean of each reward term over the rollouts that it applies to, and the mean reward of each source of
    prompts, if they have names."""
    all_terms = [rollout.terms for rollout in batch.rollouts]
    names = {name for terms in all_terms for name in terms}
    by_term = {name: [score for terms in all_terms if (score := terms.get(name)) is not None] for name in names}
    by_source: dict[str, list[float]] = {}
    for group in batch.groups:
        if group.prompt.source:
            by_source.setdefault(group.prompt.source, []).extend([rollout.reward or 0.0 for rollout in group.rollouts])
    means = {"reward_terms": by_term, "reward_by_source": by_source}
    return {
        kind: {name: float(np.mean(values)) for name, values in sorted(by_name.items()) if values}
        for kind, by_name in means.items()
        if by_name or kind == "reward_terms"
    }
