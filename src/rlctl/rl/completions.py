"""Completions outside of training: of a model, or of a run's checkpoint refitted into an engine."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.backends.vllm.args import Device, engine_spec
from rlctl.backends.vllm.messages import GroupRequest, GroupResult, Sampling
from rlctl.checkpoints.source import ModelSource
from rlctl.cluster.objects import fetch, put
from rlctl.cluster.placement import Placement
from rlctl.cluster.session import ray_session
from rlctl.cluster.workers import WorkerGroup, WorkerSpec
from rlctl.config.schema import RlctlConfig
from rlctl.data.chat import PromptEncoder
from rlctl.data.prompts import PromptRow
from rlctl.data.tokenizer import load_tokenizer
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.rl.batch import sample_seed
from rlctl.rl.crew import ENGINE_WORKER
from rlctl.runs.checkpoints import Checkpoint

Tell = Callable[[str], None]


@dataclass(frozen=True)
class CompletionJob:
    """What to complete, with what."""

    config: RlctlConfig
    source: ModelSource
    facts: ModelFacts
    device: Device
    samples: int = 1
    checkpoint: Checkpoint | None = None
    """Weights of a run, in place of the model's own."""

    @property
    def megatron(self) -> Path | None:
        """The Megatron checkpoint with the weights; None: the engine reads them from the model directory itself."""
        return self.checkpoint.policy if self.checkpoint else self.source.megatron


def read_prompts(texts: Sequence[str], file: str | None, field: str) -> list[PromptRow]:
    """Prompts of `--prompt` and `--prompts-file`: a .jsonl file with `field`, or a text file with one prompt a line.

    Raises InputError naming the flag, the file and the line.
    """
    found: list[tuple[str, Any]] = [(f"--prompt number {i + 1}", text) for i, text in enumerate(texts)]
    if file is not None:
        found += _file_prompts(Path(file), field)
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
    config = job.config
    tokenizer = load_tokenizer(job.source.directory, config.model)
    encoder = PromptEncoder.build(tokenizer, config.model, config.data, job.source.directory)
    if encoder.note:
        tell(encoder.note)
    prompts = [encoder.encode(row) for row in rows]
    sampling = Sampling.from_config(config.generation, stop=encoder.stop, stop_token_ids=encoder.stop_token_ids)
    length = _length(job, [len(prompt) for prompt in prompts], rows)
    requests = [
        GroupRequest(i, prompt, tuple(sample_seed(config.run.seed, 0, i, s) for s in range(job.samples)))
        for i, prompt in enumerate(prompts)
    ]
    with _engines(job, length, tell) as engines:
        timeout = config.cluster.step_timeout_s
        results: list[GroupResult] = engines.call("generate", requests, sampling, timeout, timeout_s=timeout + 60)[0]
        for row, result in zip(rows, results, strict=True):
            yield {"prompt": row.prompt, "completions": _completions(result)}


def _length(job: CompletionJob, prompt_tokens: list[int], rows: Sequence[PromptRow]) -> int:
    """Length of the longest prompt with its completion, within what the model takes."""
    limit = min(job.config.model.max_length or job.facts.max_length, job.facts.max_length)
    longest = max(range(len(prompt_tokens)), key=lambda i: prompt_tokens[i])
    if prompt_tokens[longest] >= limit:
        raise InputError(
            f"The prompt of {rows[longest].where} has {prompt_tokens[longest]} tokens; the limit is {limit}.",
            "Shorten it, or raise --max-length up to what the model takes.",
        )
    return min(limit, prompt_tokens[longest] + job.config.generation.max_new_tokens)


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
def _engines(job: CompletionJob, length: int, tell: Tell) -> Iterator[WorkerGroup]:
    """One engine with the weights asked for."""
    with tempfile.TemporaryDirectory(prefix="rlctl-generate-") as logs, ray_session(job.config.cluster.ray_address):
        tell("starting the engine")
        start = _refitted if job.megatron is not None else _plain
        with start(job, length, Path(logs)) as engines:
            yield engines


@contextlib.contextmanager
def _plain(job: CompletionJob, length: int, logs: Path) -> Iterator[WorkerGroup]:
    """An engine of the model directory."""
    limits, tp = job.config.cluster, job.config.generation.tp or 1
    placement = Placement(tp, gpus=job.device == "cuda", timeout_s=limits.start_timeout_s)
    spec = _engine(job, length, colocated=False)
    worker = WorkerSpec({"spec": spec, "put": put}, placement.bundles, spec.environment)
    try:
        engines = WorkerGroup(
            "engine",
            ENGINE_WORKER,
            [worker],
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
def _refitted(job: CompletionJob, length: int, logs: Path) -> Iterator[WorkerGroup]:
    """An engine refitted from a Megatron checkpoint, which is loaded into a policy of one process."""
    from rlctl.backends.base import PolicySpec
    from rlctl.refit.session import RefitSession
    from rlctl.rl.crew import CrewSpec, start_crew
    from rlctl.weights.megatron_parallel import MegatronParallel

    engine, config = _engine(job, length, colocated=True), job.config
    limits = config.cluster
    policy = PolicySpec(
        facts=job.facts,
        dtype=engine.arguments["dtype"],
        device=job.device,
        threads=config.training.threads,
        lora=config.training.lora,
        optimizer=config.optimizer,
        megatron=config.megatron.passed,
        ddp=config.ddp.passed,
    )
    tp = config.generation.tp or 1
    spec = CrewSpec(policy, engine, 1, tp, None, limits.start_timeout_s, limits.step_timeout_s)
    with start_crew(spec, logs) as crew:
        if job.checkpoint and config.training.lora.rank:  # the checkpoint holds the adapters alone
            crew.policy.call("load_hf", job.source.weights)
            crew.policy.call("load", job.checkpoint.policy)
        else:
            crew.policy.call("load_hf", job.megatron)
        session = RefitSession(
            crew.policy,
            crew.engines,
            job.facts,
            parallel=MegatronParallel(),
            settings=config.refit,
            dtype=engine.arguments["dtype"],
        )
        session.open()
        try:
            session.refit(job.checkpoint.step if job.checkpoint else 0)
            yield crew.engines
        finally:
            session.close()


def _engine(job: CompletionJob, length: int, *, colocated: bool) -> Any:
    return engine_spec(
        job.config,
        job.facts,
        job.source.directory,
        device=job.device,
        tokenizer_dir=job.config.model.tokenizer,
        max_length=length,
        colocated=colocated,
        dummy_weights=job.megatron is not None,
    )
