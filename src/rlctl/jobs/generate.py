"""Completions outside training, sampled from a model or from a run's checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlctl.backends.clients import generate_groups
from rlctl.backends.messages import GroupRequest, SampledGroup, Sampling
from rlctl.checkpoints.model_files import Tell
from rlctl.cluster.ray_session import fetch
from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.image_rows import shown_prompt
from rlctl.data.prompt_rows import PromptRow
from rlctl.errors import InputError
from rlctl.jobs.completion_engines import started_engines
from rlctl.jobs.completion_job import CompletionJob
from rlctl.rollouts.source import sample_seed


def complete(job: CompletionJob, rows: Sequence[PromptRow], tell: Tell) -> Iterator[dict[str, Any]]:
    """Yield one record per prompt, in order: `prompt`, `completions` [{text, token_ids, logprobs, finish_reason}]."""
    config, directory = job.config, job.model.files.directory
    encoder = PromptEncoder.build(load_tokenizer(directory, config.model), config.model, config.data, directory)
    if encoder.note:
        tell(encoder.note)
    for note in encoder.notes_on(rows):
        tell(note)
    prompts = with_room(job, [encoder.encode(row) for row in rows], rows, tell)
    sampling = Sampling.from_config(
        config.generation, stop=encoder.stop, stop_token_ids=encoder.stop_token_ids, never=encoder.never_sampled
    )
    plan = job.checked_plan([len(prompt) for prompt in prompts])
    job = replace(job, resolved=job.resolved.with_plan(plan))
    requests = [
        GroupRequest(
            i, prompt.tokens, tuple(sample_seed(config.run.seed, i, s) for s in range(job.samples)), media=prompt.media
        )
        for i, prompt in enumerate(encoder.fitted(*pair) for pair in zip(rows, prompts, strict=True))
    ]
    with started_engines(job, plan, tell) as (engines, _, turn), turn:
        results = generate_groups(engines, requests, sampling, config.cluster.step_limit_s)
        for row, result in zip(rows, results, strict=True):
            yield {"prompt": shown_prompt(row.prompt), "completions": _completions(result)}


def with_room(
    job: CompletionJob, prompts: Sequence[tuple[int, ...]], rows: Sequence[PromptRow], tell: Tell
) -> list[tuple[int, ...]]:
    """Return the tokens of prompts. A prompt that leaves no room for a new token is cut from the left with
    `data.too_long = cut`, and raises InputError otherwise."""
    config = job.config
    limit = min(config.model.max_length or job.facts.max_length, job.facts.max_length)
    long = [place for place, prompt in enumerate(prompts) if len(prompt) >= limit]
    if long and config.data.too_long != "cut":
        longest = max(long, key=lambda place: len(prompts[place]))
        raise InputError(
            f"The prompt of {rows[longest].where} has {len(prompts[longest])} tokens; the limit is {limit}.",
            "Shorten it, raise --max-length up to what the model takes, or cut its beginning with --set "
            "data.too_long=cut. Prompts are never left out here.",
        )
    kept = limit - config.generation.max_new_tokens
    kept = kept if kept > 0 else limit - 1
    if long:
        tell(f"{len(long):,} prompts keep their last {kept:,} tokens (data.too_long=cut), the first in "
             f"{rows[long[0]].where}")  # fmt: skip
    return [prompt[-kept:] if len(prompt) >= limit else prompt for prompt in prompts]


def _completions(result: SampledGroup) -> list[dict[str, Any]]:
    columns, texts = fetch(result.columns), fetch(result.texts)
    completions = []
    for sample, text in enumerate(texts):
        chosen = columns.slice(sample)
        mask = columns.loss_mask_T[chosen]
        completions.append(
            {
                "text": text,
                "token_ids": columns.tokens_T[chosen][mask].tolist(),
                "logprobs": columns.logprobs_T[chosen][mask].tolist(),
                "finish_reason": result.finish_reasons[sample],
            }
        )
    return completions
