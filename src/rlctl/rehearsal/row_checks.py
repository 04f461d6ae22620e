"""Problems in data and rewards that raise no error in a rehearsal: failing rows, long prompts, constant rewards, and
stop texts that never occur."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from rlctl.data.prompt_rows import PromptRow, answer_text
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.preparation.job import Job
from rlctl.rewards.reward_plan import RewardPlan
from rlctl.rewards.scoring_process import ScoringProcess, Work
from rlctl.rollouts.prompt_order import OpenedDataset
from rlctl.runs.directory import RunDirectory
from rlctl.runs.samples import read_samples
from rlctl.settings.config import RlctlConfig
from rlctl.telemetry.conversation import conversation
from rlctl.telemetry.metrics import read_metrics

MOST_ROWS, MOST_S = 2000, 30.0
"""Maximum number of rows checked per dataset, and the time limit in seconds."""
SCORED = 8
"""Number of rows whose reference answers are scored."""


def look_at_rows(job: Job, config: RlctlConfig, facts: ModelFacts, generated: Container[str]) -> list[str]:
    """Return notices about rows that a run of `config` would read, except rows of `generated` files. `job`: the
    rehearsal's."""
    user_datasets = [dataset for dataset in job.prompts.datasets if dataset.prompts.label not in generated]
    return [notice for dataset in user_datasets for notice in _notices_of_rows(job, dataset, config, facts)]


def _notices_of_rows(job: Job, dataset: OpenedDataset, config: RlctlConfig, facts: ModelFacts) -> Iterator[str]:
    length = config.model.max_length or facts.max_length
    new = config.turn_tokens
    limit, job.prompts.limit = job.prompts.limit, None
    name, kind, deadline = dataset.label or dataset.prompts.label, job.prompts.kind, time.monotonic() + MOST_S
    failed: list[str] = []
    lengths: list[int] = []
    for index in range(min(len(dataset.prompts), MOST_ROWS)):
        if time.monotonic() > deadline:
            break
        try:
            row = replace(dataset.prompts[index], source=dataset.label)
            lengths.append(len(job.prompts.tokens(row)))
        except InputError as error:
            failed.append(error.message)
    job.prompts.limit = limit
    looked = f"of the first {len(lengths) + len(failed):,} rows of {name}"
    if failed:
        yield f"{len(failed):,} {looked} fail, and the run would stop at the first: {failed[0]}"
    if long := [tokens for tokens in lengths if tokens > (length - 1 if new else length)]:
        action = {"drop": "leave them out", "cut": "cut them"}.get(config.data.too_long, "stop at the first")
        yield (
            f"{len(long):,} {looked} are {kind}s of more than {length:,} tokens, the longest of {max(long):,}: the run "
            f"would {action} (model.max_length)."
        )
    if new and (tight := sum(length - new < tokens < length for tokens in lengths)):
        yield (
            f"{tight:,} {looked} leave less than generation.max_new_tokens = {new:,}: their completions end at "
            f"model.max_length = {length:,}."
        )


def reference_scores(plan: RewardPlan, rows: Sequence[PromptRow]) -> dict[str, list[float]]:
    """Return the scores of the rows' reference answers by the scorer's label."""
    answered = [row for row in rows if row.answer is not None]
    texts = [plan.reference(row.answer) for row in answered]
    work = [
        Work(number, text, row)
        for text, row in zip(texts, answered, strict=True)
        for number in range(len(plan.scorers))
    ]
    scores_found = defaultdict[str, list[float]](list)
    with closing(ScoringProcess(plan)) as process:
        for pair, score in zip(work, process.score(work), strict=True):
            if score.value is not None:
                scores_found[plan.labels[pair.scorer]].append(score.value)
    return scores_found


def look_at_run(job: Job, run: RunDirectory, config: RlctlConfig, own_stop: str) -> list[str]:
    """Return notices about rewards, stop texts and gradients of the rehearsed steps."""
    lines = read_metrics(run.metrics)
    notices = []
    if not any(line.get("grad_norm") for line in lines):
        notices.append("No step had a gradient: nothing that was sampled or read was learned from.")
    if dropped := sum(line.get("dropped_rollouts", 0) for line in lines):
        notices.append(f"{dropped} rollouts were left out: a reward function or an environment failed on them.")
    if (rollouts := config.rollout_settings) is None:
        return notices
    samples = read_samples(run.path)
    for dataset in job.prompts.datasets:
        rows = [dataset.prompts[index] for index in range(min(SCORED, len(dataset.prompts)))]
        if (plan := job.rewards.of(dataset.label) if job.rewards else None) is not None:
            notices += _of_rewards(plan, rows, samples, dataset.label)
        texts = [sample.get("rendered", "") for sample in samples]
        texts += [turn.text for sample in samples for turn in conversation(sample)]
        texts += [answer_text(row.answer) for row in rows]
        notices += [
            f"The stop text {stop!r} (generation.stop) is in no prompt, answer or completion that was looked at."
            for stop in rollouts.generation.stop
            if stop != own_stop and not any(stop in text for text in texts)
        ]
    return list(dict.fromkeys(notices))


def _of_rewards(plan: RewardPlan, rows: Sequence[PromptRow], samples: Sequence[dict], label: str) -> Iterator[str]:
    own_plan = replace(plan, terms=plan.terms[:-1])  # the last term is the rehearsal's varying scorer
    right = reference_scores(own_plan, rows) if own_plan.terms else {}
    for scorer in own_plan.labels:
        sampled = [sample["terms"].get(scorer) for sample in samples if sample.get("source", "") == label]
        sampled = [score for score in sampled if score is not None]
        rewards = {*sampled, *right.get(scorer, ())}
        if len(rewards) == 1 and len(sampled) > 1:
            also = f", and {len(right[scorer])} reference answers" if right.get(scorer) else ""
            yield (
                f"The reward {scorer} gave all {len(sampled)} completions{also} {rewards.pop():g}: nothing is learned "
                "from a reward that never varies."
            )
