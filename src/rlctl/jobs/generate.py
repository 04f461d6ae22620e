"""Completions outside of training, sampled from a model or from a run's checkpoint refitted into an engine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.backends.clients import EngineClient, PolicyClient, generate_groups
from rlctl.backends.lookup import engine_backend
from rlctl.backends.messages import GroupRequest, SampledGroup, Sampling
from rlctl.checkpoints.conversion.prepared_model import require_seen
from rlctl.checkpoints.model_source import Tell
from rlctl.cluster.ray_session import fetch, ray_session
from rlctl.config.facts import LAYOUT
from rlctl.config.files import read_text, temporary_folder
from rlctl.config.load import Resolved, stored_values
from rlctl.config.sources import Source
from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.image_rows import shown_prompt, with_images
from rlctl.data.image_sources import IMAGES
from rlctl.data.prompt_records import checked_prompt, prompt_field_in, row_from_record
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.records import is_file_name, read_records, suffix_of
from rlctl.errors import InputError
from rlctl.jobs.backend_arguments import BackendArguments
from rlctl.methods.available import method_class
from rlctl.methods.configuration import from_sources
from rlctl.models.facts import ModelFacts
from rlctl.planner.from_config import PROMPT_TOKENS, completions_workload, plan_from_config
from rlctl.planner.make_plan import refuse_unrunnable
from rlctl.planner.result import Plan
from rlctl.preparation.open_model import NamedModel, open_model
from rlctl.preparation.prepare import require_devices
from rlctl.preparation.run_workers import (
    EnginesSpec,
    RunWorkersSpec,
    device_of,
    planned_engines,
    planned_workers,
    start_engines,
    start_run_workers,
)
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes
from rlctl.rollouts.source import sample_seed
from rlctl.runs.directory import Checkpoint, RunDirectory
from rlctl.settings.config import RolloutConfig
from rlctl.settings.data import DataConfig
from rlctl.training.agreement import error_limit
from rlctl.training.capabilities import ScalarHead


@dataclass(frozen=True)
class CompletionJob:
    """The model, or the checkpoint of a run, that completes prompts, and how many samples each gets."""

    resolved: Resolved
    model: NamedModel
    samples: int = 1
    checkpoint: Checkpoint | None = None
    """Weights of a run, in place of the model's own."""
    compares: bool = False
    """A policy computes the log-probs of what the engines sample, too."""

    @property
    def config(self) -> RolloutConfig:
        return self.resolved.config

    @property
    def facts(self) -> ModelFacts:
        return self.model.facts

    def plan(self, prompt_tokens: list[int], assume: str | None = None) -> Plan:
        """The engines for prompts of these lengths; where the weights are a Megatron checkpoint, the policy that reads
        it too, laid out as for training with the same prompts.

        `assume` is the GPU to plan for where GPUs are asked for and this machine has none to look at. Raises what
        `plan_from_config` raises.
        """
        work = completions_workload(self.config, self.facts, prompt_tokens, self.samples)
        if self.checkpoint or self.model.source.megatron or self.compares:
            step = self.config.batch
            prompts, generations = max(work.prompts, step.prompts), max(work.generations, step.generations)
            work = replace(work, trains=True, prompts=prompts, generations=generations)
        return plan_from_config(self.config, self.facts, work, assume=assume)

    def checked_plan(self, prompt_tokens: list[int]) -> Plan:
        """The plan, refused where it cannot be run, this machine lacks its devices, or nodes may not see the model."""
        plan = self.plan(prompt_tokens)
        refuse_unrunnable(plan)
        engine_backend(self.config.generation.backend).refuse(self.config, self.facts, device_of(plan))
        require_devices(plan, self.config)
        require_seen(self.model.source, plan.cluster.nodes)
        return plan

    def engines(self, plan: Plan) -> EnginesSpec:
        """The engines of a plan; the configuration holds the plan's values."""
        if plan.training is not None:
            engines = self.workers(plan).engines
            assert engines is not None  # a plan of completions has them
            return engines
        directory = self.model.source.directory
        return planned_engines(self.config, self.facts, plan, directory, plan.workload.max_length, colocated=False)

    def workers(self, plan: Plan) -> RunWorkersSpec:
        """Policy and engines of a plan with both."""
        directory, length = self.model.source.directory, plan.workload.max_length
        return planned_workers(self.config, self.facts, plan, directory, None, max_length=length, dummy_weights=True)

    def arguments(self, plan: Plan) -> BackendArguments:
        """The arguments of the classes that are built for a plan."""
        return BackendArguments.of(self.workers(plan) if plan.training else self.engines(plan))


def completion_job(
    resolved: Resolved, samples: int, checkpoint: Checkpoint | None, prompts: int, tell: Tell
) -> CompletionJob:
    """The job of completing `prompts` prompts; what can be refused without the weights is refused before they are
    fetched."""
    resolved.require_supported()
    run = RunDirectory(checkpoint.path.parents[1]) if checkpoint else None
    with run.opened_from_here() if run else contextlib.nullcontext():
        model = open_model(resolved.config.model, weights=False, engines_alone=True)
    early = CompletionJob(resolved, model, samples, checkpoint)
    early.checked_plan([PROMPT_TOKENS] * prompts)
    return replace(early, model=open_model(resolved.config.model, tell, engines_alone=True))


def of_run(directory: Path, step: int | None, asked: Resolved) -> tuple[Resolved, Checkpoint]:
    """The configuration a run was made with, under what this command line sets, and the checkpoint wanted of it. How
    the run was laid out over its devices, and which cluster it joined, is left out: engines are planned for the devices
    that are here now."""
    run = RunDirectory(directory)
    stored = run.manifest()
    checkpoints = run.checkpoints()
    found = [one for one in checkpoints if step is None or one.step == step]
    if not found:
        have = ", ".join(str(one.step) for one in checkpoints) or "none"
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise InputError(
            f"--run-dir {directory} does not have {wanted} (it has: {have}).", "Choose another with --step."
        )
    left_out = {*asked.schema.with_fact(LAYOUT), "cluster.ray_address"}
    values = [value for value in stored_values(stored["config"]) if value.key not in left_out]
    resolved = from_sources([Source(values, shared=True), Source(asked.given(), shared=True)], RolloutConfig)
    method = method_class(resolved.config.run.algorithm)
    if method is not None and issubclass(method, ScalarHead):
        raise InputError(
            f"--run-dir {directory} holds a reward model, which scores texts and writes none.",
            f"Export it (rlctl convert megatron-to-hf {directory} DIR), and score with --reward model:DIR.",
        )
    return resolved, found[-1]


def read_prompts(
    texts: Sequence[str], file: str | None, data: DataConfig, images: Sequence[str] = ()
) -> list[PromptRow]:
    """Return the prompts of `--prompt`, each with the `images`, and of `--prompts-file`: a data file with
    `data.prompt_field`, or a text with one prompt a line in a file or (`-`) on stdin. Raises InputError naming the
    flag, the file and the line."""
    if images and not texts:
        raise InputError("--image applies to --prompt.", 'Give --prompt TEXT; a data file has a field "image".')
    found = [
        with_images(
            PromptRow(i, f"--prompt number {i + 1}", text, None),
            {IMAGES: list(images)},
            data.model_copy(update={"name": None}),
        )
        for i, text in enumerate(texts)
    ]
    for image in (one for row in found[:1] for one in row.images):
        image.size()  # a missing file is told before the model is opened
    if file is not None:
        found += _file_prompts(Path(file), data)
    if file is not None and len(found) == len(texts):
        raise InputError(f"--prompts-file {file} holds no prompt.", "Write one on each line.")
    if not found:
        raise InputError("Nothing to complete.", "Give --prompt TEXT, or --prompts-file FILE.")
    return [replace(row, index=index) for index, row in enumerate(found)]


def _file_prompts(path: Path, data: DataConfig) -> Iterator[PromptRow]:
    if suffix_of(path) and is_file_name(str(path)):
        for where, record in read_records(path):
            yield _row(record, where, data.model_copy(update={"name": str(path)}))
        return
    text = _stdin() if str(path) == "-" else read_text(path, "--prompts-file")
    for number, line in enumerate(text.split("\n"), 1):  # other ends of lines may be in a prompt
        where = f"{'stdin' if str(path) == '-' else path.name}, line {number}"
        if line.strip():
            yield PromptRow(0, where, checked_prompt(line, "prompt", where), None)


def _stdin() -> str:
    if sys.stdin.isatty():
        raise InputError("--prompts-file -: stdin is a terminal.", "Pipe the prompts in, one on each line.")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(f"--prompts-file -: stdin is not UTF-8 text: {error}.") from error


def _row(record: Mapping[str, Any], where: str, data: DataConfig) -> PromptRow:
    if prompt_field_in(record, data.prompt_field) not in record:
        raise InputError(
            f"--prompts-file: {where} has no field `{data.prompt_field}` (it has: {', '.join(record)}).",
            "Name it with --set data.prompt_field.",
        )
    own = {"name", "prompt_field", "image_folder", "image_pixels", "image_bytes"}
    read = DataConfig.model_validate(data.model_dump(include=own))
    made = row_from_record(record, 0, f"--prompts-file: {where}", read)
    return replace(made, where=where, answer=None)


def complete(job: CompletionJob, rows: Sequence[PromptRow], tell: Tell) -> Iterator[dict[str, Any]]:
    """One record a prompt, in order: `prompt` and `completions` [{text, token_ids, logprobs, finish_reason}]."""
    config, directory = job.config, job.model.source.directory
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
        for i, prompt in enumerate(encoder.fitted(*one) for one in zip(rows, prompts, strict=True))
    ]
    with started_engines(job, plan, tell) as (engines, _, turn), turn:
        results = generate_groups(engines, requests, sampling, config.cluster.step_limit_s)
        for row, result in zip(rows, results, strict=True):
            yield {"prompt": shown_prompt(row.prompt), "completions": _completions(result)}


def with_room(
    job: CompletionJob, prompts: Sequence[tuple[int, ...]], rows: Sequence[PromptRow], tell: Tell
) -> list[tuple[int, ...]]:
    """Return the tokens of prompts, those cut from the left that leave no room for a token within what the model takes.
    Raises InputError naming such a prompt unless `data.too_long` cuts it."""
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
    found = []
    for sample, text in enumerate(texts):
        chosen = columns.slice(sample)
        mask = columns.loss_mask_T[chosen]
        found.append(
            {
                "text": text,
                "token_ids": columns.tokens_T[chosen][mask].tolist(),
                "logprobs": columns.logprobs_T[chosen][mask].tolist(),
                "finish_reason": result.finish_reasons[sample],
            }
        )
    return found


@contextlib.contextmanager
def started_engines(
    job: CompletionJob, plan: Plan, tell: Tell, play: EnvironmentEpisodes | None = None
) -> Iterator[tuple[EngineClient, PolicyClient | None, contextlib.AbstractContextManager[Any]]]:
    """Engines with the weights asked for, which play episodes as `play` says (None: of one answer), the policy on the
    same devices that they are refitted from if there is one, and the engines' turn on these devices."""
    spec, address = job.engines(plan), job.config.cluster.ray_address
    if play is not None:
        spec = replace(spec, episode=replace(play, max_length=spec.engine.max_length))
    with temporary_folder("generate", tell) as logs, ray_session(address, logs=logs, tell=tell):
        tell("starting the engine" if spec.count == 1 else f"starting {spec.count} engines")
        if plan.training is None:
            with start_engines(spec, job.config.cluster, logs) as engines:
                yield engines, None, contextlib.nullcontext()
            return
        with start_run_workers(replace(job.workers(plan), engines=spec), logs) as workers:
            saved, adapters = job.checkpoint, job.config.training.lora.rank > 0
            if saved is None or adapters:  # a checkpoint of adapters holds these alone
                workers.policy.load_model(job.model.source.weights)
            if saved is not None:
                (workers.policy.load_saved if adapters else workers.policy.load_model)(saved.policy)
            source, limit = None if saved else job.model.source, error_limit(job.config, workers.spec.policy.dtype)
            with workers.weight_sync(job.config.refit, source, decode_limit=limit) as sync:
                for share in sync.refit(saved.step if saved else 0).shares:
                    tell(f"weights: {share}")
                yield sync.engines, workers.policy, sync.generating()
