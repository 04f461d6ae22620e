"""Evaluation: models and checkpoints answer the prompts of tasks, and scorers judge the answers.

    models x tasks ---> prompts without samples in the file ---> engines ---> scorers ---> file of samples ---> metrics

All models get the same prompts, seeds and sampling parameters, so that they can be compared prompt by prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlctl.backends.clients import EngineClient, generate_groups
from rlctl.backends.messages import GroupRequest
from rlctl.checkpoints.model_files import Tell
from rlctl.cluster.ray_session import fetch
from rlctl.data.image_rows import shown_prompt
from rlctl.data.rollouts import Rollout, RolloutGroup
from rlctl.errors import InputError
from rlctl.jobs.candidates import Candidate, at_one_time, leading, on_the_same_sources, with_vision
from rlctl.jobs.completion_engines import started_engines
from rlctl.jobs.encoded_tasks import Encoded, Evaluation
from rlctl.jobs.tasks import Task, open_sources, open_task
from rlctl.rewards.extraction import vote
from rlctl.rewards.reward_worker import GroupScores, RewardWorker, ScoreRequest
from rlctl.rewards.statistics import Estimate, Sampled, metrics_of
from rlctl.rollouts.environment_episodes import episode_request, episode_seed
from rlctl.rollouts.scored_groups import groups_with_scores
from rlctl.rollouts.source import sample_seed
from rlctl.runs.evaluation_file import SampleFile
from rlctl.telemetry.display import WorkProgress

MOST_SAMPLES = 10_000_000
CALLS_AHEAD = 4
"""Samples per call to the engines, as a multiple of their concurrent samples. Larger calls leave engines idle less
often."""
FEWEST_A_CALL = 16
FIRST_EPISODE = 2**49
"""First position for environment seeds, beyond the positions of training and validation."""


@dataclass(frozen=True)
class Result:
    """The metrics of a model on a task."""

    task: str
    model: str
    prompts: int
    samples: int
    metrics: dict[str, Estimate]

    def to_json(self) -> dict[str, Any]:
        """Return the result for `--json` and the Python API."""
        metrics = {name: {"value": metric.value, "stderr": metric.stderr} for name, metric in self.metrics.items()}
        return {"task": self.task, "model": self.model, "samples": self.samples, "metrics": metrics}


def evaluation(
    chosen: tuple[Candidate, ...], names: Sequence[str], samples: int, ks: Sequence[int], limit: int | None
) -> Evaluation:
    """Open the tasks, and return the evaluation of `chosen` on them.

    Raises InputError for a missing or duplicate task, for more than MOST_SAMPLES samples, and for fewer samples than
    pass@k needs."""
    if ks and max(ks) > samples:
        raise InputError(
            f"--k {max(ks)}: pass@{max(ks)} needs at least {max(ks)} samples.", f"Raise --n from {samples}."
        )
    config = leading(chosen).resolved.config
    if not names and not (config.environment.name or config.data.sources):
        raise InputError("There is no task.", "Give --task, for example reasoning-gym:chain_sum or gsm8k, or --env.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"--task {twice[0]} is given twice.", "Give it once; --n sets the samples of each prompt.")
    tasks = tuple(open_task(name, config, limit) for name in names) or open_sources(config, limit)
    chosen = chosen if names else on_the_same_sources(chosen)
    if any(row.images for task in tasks for row in task.prompts):
        chosen = tuple(with_vision(candidate) for candidate in chosen)
    if (count := samples * sum(len(task.rows) for task in tasks) * len(chosen)) > MOST_SAMPLES:
        raise InputError(f"These are {count:,} samples; at most {MOST_SAMPLES:,} can be kept.", "Set --limit or --n.")
    return Evaluation(chosen, tasks, samples, tuple(ks))


def evaluate(job: Evaluation, file: SampleFile, tell: Tell) -> list[Result]:
    """Sample and score the samples that `file` lacks; return the metrics of each task and model, task by task."""
    for note in filter(None, (task.note for task in job.tasks)):
        tell(note)
    encoded = [Encoded.of(job, candidate, tell) for candidate in at_one_time(job.candidates, file)]
    for encoded_tasks in encoded:
        for task in job.tasks:
            file.begin(task.label, encoded_tasks.candidate.label, encoded_tasks.settings(task))
    total = sum(len(task.rows) for task in job.tasks) * job.samples * len(job.candidates)
    there = total - sum(
        len(encoded_tasks.missing(task, file, job.samples)) for encoded_tasks in encoded for task in job.tasks
    )
    if there:
        tell(f"{there} of {total} samples are in {file.path}")
    with WorkProgress("samples", total, there) as progress:
        for encoded_tasks in encoded:
            _sample(encoded_tasks, job, file, tell, progress)
    return [_result(job, task, encoded_tasks.candidate.label, file) for task in job.tasks for encoded_tasks in encoded]


def _sample(encoded: Encoded, job: Evaluation, file: SampleFile, tell: Tell, progress: WorkProgress) -> None:
    missing = {task.label: encoded.missing(task, file, job.samples) for task in job.tasks}
    if not any(missing.values()):
        return
    plan = encoded.job.checked_plan([len(prompt) for prompts in encoded.prompts.values() for prompt in prompts])
    planned = replace(encoded.job, resolved=encoded.job.resolved.with_plan(plan))
    started = started_engines(planned, plan, lambda text: tell(f"{encoded.candidate.label}: {text}"), encoded.play)
    with started as (engines, _, turn), turn:
        at_once = len(engines) * (planned.config.generation.max_concurrent or FEWEST_A_CALL)
        for task in job.tasks:
            with contextlib.ExitStack() as stack:
                scorer = None
                if task.rewards is not None:
                    time = encoded.job.config.model.chat_template_time
                    rewards = replace(task.rewards, opened=encoded.opens_thought(task), time=time)
                    scorer = stack.enter_context(contextlib.closing(RewardWorker(rewards, fetch)))
                whole = task.rewards is not None and task.rewards.compares
                size = len(missing[task.label]) if whole else max(FEWEST_A_CALL, CALLS_AHEAD * at_once)
                for part in _calls(missing[task.label], size):
                    file.add(_scored(encoded, task, part, engines, scorer))
                    progress.advance(f"{encoded.candidate.label}, {task.label}", sum(map(len, part.values())))


def _calls(missing: Sequence[tuple[int, int]], size: int) -> Iterator[dict[int, list[int]]]:
    part: dict[int, list[int]] = {}
    for number, (row, sample) in enumerate(missing):
        part.setdefault(row, []).append(sample)
        last_of_row = number + 1 == len(missing) or missing[number + 1][0] != row
        if last_of_row and sum(map(len, part.values())) >= size:
            yield part
            part = {}
    if part:
        yield part


def _scored(
    encoded: Encoded, task: Task, part: Mapping[int, list[int]], engines: EngineClient, scorer: RewardWorker | None
) -> list[dict[str, Any]]:
    config, places = encoded.job.config, {row: place for place, row in enumerate(task.rows)}
    rows = {row: task.prompts[places[row]] for row in part}
    seed = config.run.seed
    seeds = {row: tuple(sample_seed(seed, row, sample) for sample in samples) for row, samples in part.items()}
    encoder = encoded.encoders[task.label]
    if encoded.play_of(task) is None:
        prompts_shown = {row: encoder.fitted(rows[row], encoded.prompts[task.label][places[row]]) for row in part}
        requests = [
            GroupRequest(row, prompts_shown[row].tokens, seeds[row], media=prompts_shown[row].media) for row in part
        ]
    else:
        of_episode = {row: episode_seed(seed, FIRST_EPISODE + row) for row in part}
        played = {row: replace(rows[row], source=task.label) for row in part}
        requests = [episode_request(row, played[row], encoder, seeds[row], of_episode[row]) for row in part]
    results = generate_groups(engines, requests, encoded.sampling(task), config.cluster.step_limit_s)
    answers: list[GroupScores | None] = [None] * len(results)
    if scorer is not None:
        to_score = [ScoreRequest(rows[r.group], r.texts, r.transcripts if r.episodes else None) for r in results]
        answers = [*scorer.score(to_score)]
    groups, _ = groups_with_scores(
        results, rows, seeds, answers, "zero" if config.reward.on_error == "zero" else "stop"
    )
    return [
        _record(encoded, task, group, rollout, sample)
        for group in groups
        for rollout, sample in zip(group.rollouts, part[group.position], strict=True)
    ]


def _record(encoded: Encoded, task: Task, group: RolloutGroup, rollout: Rollout, sample: int) -> dict[str, Any]:
    text = fetch(group.texts)[rollout.sample]
    turns = fetch(group.transcripts)[rollout.sample] if group.transcripts else None
    return {
        "task": task.label,
        "model": encoded.candidate.label,
        "row": group.position,
        "sample": sample,
        "prompt": shown_prompt(group.prompt.prompt),
        "answer": group.prompt.answer,
        "completion": text,
        **({"turns": [turn.record() for turn in turns]} if turns else {}),
        "answer_given": vote(
            text, task.rewards.extraction if task.rewards else "full", opened=encoded.opens_thought(task)
        ),
        # Without a scorer that compares with reference answers, a sample with the full reward counts as right.
        "right": ((rollout.reward if rollout.accuracy is None else rollout.accuracy) or 0.0) >= 1,
        "score": rollout.reward or 0.0,
        "tokens": rollout.response_tokens,
        "finish_reason": rollout.stop_reason,
        "seed": rollout.seed,
    }


def _result(job: Evaluation, task: Task, model: str, file: SampleFile) -> Result:
    there = file.samples(task.label, model)
    groups = [[there[row, sample] for sample in range(job.samples)] for row in task.rows]
    prompts = [
        [Sampled(sampled["right"], sampled["score"], sampled["answer_given"]) for sampled in group] for group in groups
    ]
    judged = task.rewards is not None and task.rewards.accuracy_by is not None
    metrics = metrics_of(prompts, job.ks, judged=judged)
    return Result(task.label, model, len(prompts), len(prompts) * job.samples, metrics)
