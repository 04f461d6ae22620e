"""Completions outside of training: of a model, or of a run's checkpoint refitted into an engine."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.backends.megatron.weights import megatron_parallel
from rlctl.backends.vllm.args import EngineSpec, engine_spec
from rlctl.backends.vllm.messages import GroupRequest, GroupResult, Sampling
from rlctl.cluster.objects import fetch
from rlctl.cluster.placement import Placement
from rlctl.cluster.session import ray_session
from rlctl.cluster.workers import WorkerGroup, WorkerSpec
from rlctl.config.keys import LAYOUT
from rlctl.config.load import DEFAULT, Resolved, Value, build
from rlctl.config.schema import RlctlConfig
from rlctl.data.chat import PromptEncoder
from rlctl.data.rows import PromptRow
from rlctl.data.tokenizer import load_tokenizer
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.planner.from_config import PROMPT_TOKENS, completions_workload, plan_from_config
from rlctl.planner.plan import Plan, refuse_unrunnable
from rlctl.rl.arguments import EngineArguments
from rlctl.rl.batch import sample_seed
from rlctl.rl.crew import ENGINE_WORKER, CrewSpec, engine_bundles
from rlctl.rl.devices import DeviceTurns
from rlctl.rl.generator import generate_groups
from rlctl.rl.job import planned_crew
from rlctl.rl.planned import NamedModel, Tell, open_model, require_devices
from rlctl.runs.checkpoints import Checkpoint
from rlctl.runs.directory import RunDirectory


@dataclass(frozen=True)
class CompletionJob:
    """What to complete, with what."""

    resolved: Resolved
    model: NamedModel
    samples: int = 1
    checkpoint: Checkpoint | None = None
    """Weights of a run, in place of the model's own."""

    @property
    def config(self) -> RlctlConfig:
        return self.resolved.config

    @property
    def facts(self) -> ModelFacts:
        return self.model.facts

    @property
    def megatron(self) -> Path | None:
        """The Megatron checkpoint with the weights; None: the engine reads them from the model directory itself."""
        return self.checkpoint.policy if self.checkpoint else self.model.source.megatron

    def plan(self, prompt_tokens: list[int], assume: str | None = None) -> Plan:
        """The engines for prompts of these lengths; where the weights are a Megatron checkpoint, the policy that reads
        it too, laid out as for training with the same prompts.

        `assume` is the GPU to plan for where GPUs are asked for and this machine has none to look at. Raises what
        `plan_from_config` raises.
        """
        work = completions_workload(self.config, self.facts, prompt_tokens, self.samples)
        if self.megatron is not None:
            step = self.config.grpo
            prompts, generations = max(work.prompts, step.prompts), max(work.generations, step.generations)
            work = replace(work, trains=True, prompts=prompts, generations=generations)
        return plan_from_config(self.config, self.facts, workload=work, assume=assume)

    def checked_plan(self, prompt_tokens: list[int]) -> Plan:
        """The plan, refused where it cannot be run or this machine lacks its devices."""
        plan = self.plan(prompt_tokens)
        refuse_unrunnable(plan)
        require_devices(plan, self.config)
        return plan

    def engine(self, plan: Plan) -> EngineSpec:
        """The engine of a plan without a policy; the configuration holds the plan's values."""
        return engine_spec(
            self.config,
            self.facts,
            self.model.source.directory,
            device="cpu" if plan.cluster.is_cpu else "cuda",
            tokenizer_dir=self.config.model.tokenizer,
            max_length=plan.workload.max_length,
            colocated=False,
        )

    def crew(self, plan: Plan) -> CrewSpec:
        """Policy and engines of a plan with both."""
        config = self.resolved.with_values({"model.max_length": plan.workload.max_length}).config
        return planned_crew(
            config, self.facts, plan, self.model.source.directory, None, dummy_weights=True, trains=False
        )

    def arguments(self, plan: Plan) -> EngineArguments:
        """What the engines' classes are built from."""
        return EngineArguments.of(self.crew(plan)) if plan.training else EngineArguments.of_engine(self.engine(plan))


def completion_job(
    resolved: Resolved, samples: int, checkpoint: Checkpoint | None, prompts: int, tell: Tell
) -> CompletionJob:
    """The job of completing `prompts` prompts; what can be refused without the weights is refused before they are
    fetched."""
    resolved.require_supported()
    early = CompletionJob(resolved, open_model(resolved.config.model, weights=False), samples, checkpoint)
    early.checked_plan([PROMPT_TOKENS] * prompts)
    return replace(early, model=open_model(resolved.config.model, tell))


def of_run(directory: Path, step: int | None, asked: Resolved) -> tuple[Resolved, Checkpoint]:
    """The configuration a run was made with, under what this command line sets, and the checkpoint wanted of it.

    How the run was laid out over its devices is left out: engines are planned for the devices that are here now.
    """
    run = RunDirectory(directory)
    stored = run.manifest()
    checkpoints = run.checkpoints()
    found = [one for one in checkpoints if step is None or one.step == step]
    if not found:
        have = ", ".join(str(one.step) for one in checkpoints) or "none"
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise InputError(f"--run-dir {directory} has not {wanted} (it has: {have}).", "Choose another with --step.")
    values = {
        key: Value(key, entry["value"], entry["origin"])
        for key, entry in stored["config"].items()
        if entry["origin"] != DEFAULT and key not in LAYOUT
    }
    values |= {
        key: Value(key, value, asked.origin[key]) for key, value in asked.leaves() if asked.origin[key] != DEFAULT
    }
    return build(values), found[-1]


def read_prompts(texts: Sequence[str], file: str | None, field: str) -> list[PromptRow]:
    """Prompts of `--prompt` and `--prompts-file`: a .jsonl file with `field`, or a text file with one prompt a line.

    Raises InputError naming the flag, the file and the line.
    """
    found: list[tuple[str, Any]] = [(f"--prompt number {i + 1}", text) for i, text in enumerate(texts)]
    if file is not None:
        found += _file_prompts(Path(file), field)
    if file is not None and len(found) == len(texts):
        raise InputError(f"--prompts-file {file} holds no prompt.", "Write one on each line.")
    if not found:
        raise InputError("Nothing to complete.", "Give --prompt TEXT, or --prompts-file FILE.")
    return [PromptRow(index, where, prompt, None) for index, (where, prompt) in enumerate(found)]


def _file_prompts(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts-file {path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, 1):
        where = f"{path.name}, line {number}"
        if not line.strip():
            continue
        yield where, (_json_prompt(line, where, field) if path.suffix == ".jsonl" else line)


def _json_prompt(line: str, where: str, field: str) -> Any:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"--prompts-file: {where} is not JSON: {error}.") from error
    if not isinstance(row, dict) or field not in row:
        have = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise InputError(
            f"--prompts-file: {where} has no field `{field}` (it has: {have}).", "Name it with --set data.prompt_field."
        )
    return row[field]


def complete(job: CompletionJob, rows: Sequence[PromptRow], tell: Tell) -> Iterator[dict[str, Any]]:
    """One record a prompt, in order: `prompt` and `completions` [{text, token_ids, logprobs, finish_reason}]."""
    config, directory = job.config, job.model.source.directory
    encoder = PromptEncoder.build(load_tokenizer(directory, config.model), config.model, config.data, directory)
    if encoder.note:
        tell(encoder.note)
    prompts = [encoder.encode(row) for row in rows]
    sampling = Sampling.from_config(config.generation, stop=encoder.stop, stop_token_ids=encoder.stop_token_ids)
    _require_room(job, [len(prompt) for prompt in prompts], rows)
    plan = job.checked_plan([len(prompt) for prompt in prompts])
    job = replace(job, resolved=job.resolved.with_values(plan.config_values()))
    requests = [
        GroupRequest(i, prompt, tuple(sample_seed(config.run.seed, 0, i, s) for s in range(job.samples)))
        for i, prompt in enumerate(prompts)
    ]
    with _engines(job, plan, tell) as engines:
        results = generate_groups(engines, requests, sampling, config.cluster.step_timeout_s)
        for row, result in zip(rows, results, strict=True):
            yield {"prompt": row.prompt, "completions": _completions(result)}


def _require_room(job: CompletionJob, prompt_tokens: list[int], rows: Sequence[PromptRow]) -> None:
    """Raises InputError naming the prompt that leaves no room for a token within what the model takes."""
    limit = min(job.config.model.max_length or job.facts.max_length, job.facts.max_length)
    longest = max(range(len(prompt_tokens)), key=lambda i: prompt_tokens[i])
    if prompt_tokens[longest] >= limit:
        raise InputError(
            f"The prompt of {rows[longest].where} has {prompt_tokens[longest]} tokens; the limit is {limit}.",
            "Shorten it, or raise --max-length up to what the model takes.",
        )


def _completions(result: GroupResult) -> list[dict[str, Any]]:
    columns, texts = fetch(result.columns), fetch(result.texts)
    found = []
    for row, text in enumerate(texts):
        chosen = columns.slice(row)
        mask = columns.loss_mask_T[chosen]
        found.append(
            {
                "text": text,
                "token_ids": columns.tokens_T[chosen][mask].tolist(),
                "logprobs": columns.logprobs_T[chosen][mask].tolist(),
                "finish_reason": result.finish_reasons[row],
            }
        )
    return found


@contextlib.contextmanager
def _engines(job: CompletionJob, plan: Plan, tell: Tell) -> Iterator[WorkerGroup]:
    """Engines with the weights asked for."""
    with tempfile.TemporaryDirectory(prefix="rlctl-generate-") as logs, ray_session(job.config.cluster.ray_address):
        tell("starting the engine" if plan.generation.engines == 1 else f"starting {plan.generation.engines} engines")
        refitted = job.megatron is not None
        with _refitted(job, plan, Path(logs), tell) if refitted else _plain(job, plan, Path(logs)) as engines:
            yield engines


@contextlib.contextmanager
def _plain(job: CompletionJob, plan: Plan, logs: Path) -> Iterator[WorkerGroup]:
    """Engines of the model directory."""
    limits, spec = job.config.cluster, job.engine(plan)
    placement = Placement(plan.generation.gpus, gpus=spec.device == "cuda", timeout_s=limits.start_timeout_s)
    workers = [
        WorkerSpec({"spec": spec, "index": i}, bundles, spec.environment)
        for i, bundles in enumerate(engine_bundles(placement.bundles, plan.generation.engines, plan.generation.tp))
    ]
    try:
        engines = WorkerGroup(
            "engine",
            ENGINE_WORKER,
            workers,
            placement,
            logs,
            start_timeout_s=limits.start_timeout_s,
            call_timeout_s=limits.step_timeout_s,
        )
        try:
            engines.call("start", timeout_s=limits.start_timeout_s)
            yield engines
        finally:
            engines.stop()
    finally:
        placement.release()


@contextlib.contextmanager
def _refitted(job: CompletionJob, plan: Plan, logs: Path, tell: Tell) -> Iterator[WorkerGroup]:
    """Engines refitted from a Megatron checkpoint, which a policy on the same devices reads."""
    from rlctl.checkpoints.converted import fingerprints_of
    from rlctl.refit.session import RefitSession
    from rlctl.rl.crew import start_crew

    spec = job.crew(plan)
    with start_crew(spec, logs) as crew:
        if job.checkpoint and job.config.training.lora.rank:  # the checkpoint holds the adapters alone
            crew.policy.call("load_hf", job.model.source.weights)
            crew.policy.call("load", job.checkpoint.policy)
        else:
            crew.policy.call("load_hf", job.megatron)
        dtype = spec.engine.arguments["dtype"]
        session = RefitSession(
            crew.policy,
            crew.engines,
            job.facts,
            parallel=megatron_parallel(spec.policy.parallel),
            settings=job.config.refit,
            dtype=dtype,
            converted={} if job.checkpoint else fingerprints_of(job.model.source, dtype),
            converted_at=job.megatron and job.megatron.parent,
        )
        sleeps = spec.engine.sleeps
        turns = DeviceTurns(crew.policy, crew.engines, offload=sleeps, engines_sleep=sleeps)
        turns.to_weights()
        session.open()
        try:
            for share in session.refit(job.checkpoint.step if job.checkpoint else 0).shares:
                tell(f"weights: {share}")
            with turns.generating():
                yield crew.engines
        finally:
            session.close()
