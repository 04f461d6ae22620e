"""`rlctl rollout`: a model plays a few episodes without training.

data or environment ---> engines play ---> rewards ---> one record per episode
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlctl.backends.batching.batch import LogprobStats
from rlctl.backends.clients import generate_groups
from rlctl.backends.messages import SampledGroup, Sampling
from rlctl.checkpoints.model_files import Tell
from rlctl.cluster.ray_session import fetch
from rlctl.data.image_rows import IN_TEXT
from rlctl.data.image_sources import MARK
from rlctl.data.rollouts import Rollout, RolloutGroup, Turn
from rlctl.jobs.completion_engines import started_engines
from rlctl.jobs.episodes_job import EpisodesJob
from rlctl.refit.decoding import policy_difference
from rlctl.rewards.reward_plan import Rewards
from rlctl.rewards.reward_worker import GroupScores, RewardWorker, ScoreRequest
from rlctl.rollouts.scored_groups import groups_with_scores
from rlctl.rollouts.source import sample_seed


def play(job: EpisodesJob, tell: Tell) -> Iterator[dict[str, Any]]:
    """Yield a record per episode: `turns` [{role, text, tokens, reward}], `reward`, `stop_reason`, `counts`, and with a
    comparison to the policy `logprob_diff` {mean, max}."""
    config, prompts = job.completions.config, job.prompts
    rows = {position: prompts.prompt_at(position) for position in range(job.count)}
    plan = job.completions.checked_plan([len(prompts.tokens(row)) for row in rows.values()])
    resolved = job.completions.resolved.with_plan(plan)
    job = replace(job, completions=replace(job.completions, resolved=resolved))
    seeds = {position: (sample_seed(config.run.seed, position, 0),) for position in rows}
    requests = [prompts.group_request(place, row, seeds[place], config.run.seed) for place, row in rows.items()]
    encoder = prompts.encoder
    sampling = Sampling.from_config(
        config.generation, stop=encoder.stop, stop_token_ids=encoder.stop_token_ids, never=encoder.never_sampled
    )
    with started_engines(job.completions, plan, tell, prompts.environment) as (engines, policy, turn):
        with turn:
            results = generate_groups(engines, requests, sampling, config.cluster.step_limit_s)
        differences = [
            policy_difference(policy, [result]) if policy and job.completions.compares else None for result in results
        ]
        answers = _scores(job.rewards, results, [rows[result.group] for result in results])
        groups, _ = groups_with_scores(results, rows, seeds, answers, "drop")
        for group, difference in zip(groups, differences, strict=True):
            yield _record(group, difference)


def _scores(rewards: Rewards | None, results: Sequence[SampledGroup], rows: Sequence[Any]) -> list[GroupScores | None]:
    if rewards is None:
        return [None] * len(results)
    with contextlib.closing(RewardWorker(rewards, fetch)) as worker:
        requests = [
            ScoreRequest(row, result.texts, result.transcripts if result.episodes else None)
            for row, result in zip(rows, results, strict=True)
        ]
        return list(worker.score(requests))


def _record(group: RolloutGroup, difference: LogprobStats | None) -> dict[str, Any]:
    """Return an episode as plain data. If the environment failed, it has an `error` and no reward."""
    texts: list[str] = fetch(group.texts)
    turns: list[Turn] = fetch(group.transcripts)[0] if group.transcripts else []
    rollout: Rollout | None = next(iter(group.rollouts), None)
    if not turns:
        prompt = group.prompt.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        turns = [Turn(message["role"], message["content"].replace(MARK, IN_TEXT), 0, None) for message in messages]
        turns.append(Turn("assistant", texts[0], rollout.response_tokens if rollout else 0, rollout and rollout.reward))
    return {
        "episode": group.position,
        "turns": [turn.record() for turn in turns],
        "reward": rollout and rollout.reward,
        **({"terms": dict(rollout.terms)} if rollout and rollout.terms else {}),
        "stop_reason": rollout.stop_reason if rollout else "environment",
        **({"error": group.dropped[0]} if group.dropped else {}),
        **({"counts": dict(rollout.episode.counts)} if rollout and rollout.episode else {}),
        **({"logprob_diff": {"mean": difference.mean_abs, "max": difference.max_abs}} if difference else {}),
    }
