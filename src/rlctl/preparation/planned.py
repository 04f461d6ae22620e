"""Third stage of preparing a run: its plan for short prompts, before weights, data or tokenizer are opened."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from rlctl.backends.lookup import engine_backend, require_backends
from rlctl.config.facts import FOR_A_MACHINE
from rlctl.config.load import Resolved
from rlctl.config.passthrough import without_effect
from rlctl.errors import ConfigError, InputError, MachineError, NoPlanError
from rlctl.models.facts import ModelFacts
from rlctl.models.families import has_file
from rlctl.planner.from_config import local_gpus
from rlctl.planner.make_plan import refuse_unrunnable
from rlctl.planner.result import Plan
from rlctl.preparation.located import Located
from rlctl.preparation.step_plan import step_plan
from rlctl.preparation.worker_specs import device_of, planned_policy, planned_teacher
from rlctl.settings.config import RlctlConfig
from rlctl.training.capabilities import Refuses
from rlctl.training.method import Method
from rlctl.transport.available import storing, transport_facts


@dataclass(frozen=True)
class Planned(Located):
    """A run with a plan for short prompts. The configuration does not contain the plan's values, since the real prompt
    lengths may change them."""

    early: Plan


def plan_run(located: Located) -> Planned:
    """Plan for short prompts, which needs neither weights nor data nor tokenizer. If no plan fits short prompts, no
    plan fits the data's prompts.

    If no plan has a recipe's optional layout keys, drop the keys and add a note to the configuration. Raises
    InputError, ConfigError and NoPlanError.
    """
    resolved, facts = located.resolved, located.facts
    try:
        return _planned(located, resolved)
    except (ConfigError, NoPlanError) as error:
        for dropped in droppable_layouts(resolved, facts):
            note = f"runs differently: rlctl decides {', '.join(dropped)} by itself, because {error.message}"
            looser = replace(resolved.deciding((), dropped), notes=(*resolved.notes, note))
            with suppress(ConfigError, NoPlanError):
                return _planned(located, looser)
        raise


def droppable_layouts(resolved: Resolved, facts: ModelFacts) -> list[list[str]]:
    """Return the layout keys that rlctl drops from a recipe if no plan fits, in the order of the attempts: the
    engines' keys, the other models' keys, and both."""
    layout = [key for key in resolved.schema.with_fact(FOR_A_MACHINE) if key in resolved.optional]
    engines = [key for key in layout if key.startswith("generation.")]
    models = [key for key in layout if key not in engines]
    passed: list[str] = []
    if not has_file(facts.family):  # Megatron-Core's fields do not apply to transformers' modules
        passed = [key for key in resolved.optional if key.startswith(("megatron.", "ddp."))]
    sides = [keys for keys in (engines, [*models, *passed]) if keys]
    return [*sides, [*layout, *passed]] if len(sides) > 1 else sides


def _planned(located: Located, resolved: Resolved) -> Planned:
    facts, method, assume, teacher = located.facts, located.method, located.assume, located.teacher_facts
    early = _checked_plan(resolved, facts, method, assume, teacher, located.held_adapters)
    return Planned(resolved, method, facts, teacher, assume, early, held_adapters=located.held_adapters)


def _checked_plan(
    resolved: Resolved,
    facts: ModelFacts,
    method: Method,
    assume: str | None,
    teachers: Sequence[ModelFacts],
    held_adapters: int,
) -> Plan:
    new, length = resolved.config.turn_tokens, resolved.config.model.max_length
    if length is not None and length > facts.max_length:
        hint = "Lower it, or set model.extend_positions=true."
        raise InputError(f"--max-length {length} is more than the model's {facts.max_length}.", hint)
    if new >= (length or facts.max_length):
        raise no_room(new, length or facts.max_length)
    engines = resolved.config.engine_settings
    stop_ids = engines.generation.stop_token_ids if engines else ()
    if beyond := [token for token in stop_ids if token >= facts.vocab]:
        raise InputError(
            f"generation.stop_token_ids names {beyond[0]}, and the model has {facts.vocab:,} tokens.",
            "Leave them out (--set generation.stop_token_ids=[]): the model's own end tokens always end a completion.",
        )
    if isinstance(method, Refuses):
        method.refuse(resolved.config)
    planned, plan = runnable_plan(resolved, facts, method, assume, teachers=teachers, held_adapters=held_adapters)
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
    if teachers:
        planned_teacher(config, facts, teachers, plan, method)
    if engines and plan.generation is not None:
        engine_backend(engines.generation.backend).refuse(engines, facts, device_of(plan))
    return plan


def no_room(new: int, length: int) -> InputError:
    message = f"--max-new-tokens {new} leaves no room for a prompt in {length} tokens."
    return InputError(message, "Lower it, or raise --max-length as far as the model takes it.")


def runnable_plan(
    resolved: Resolved,
    facts: ModelFacts,
    method: Method,
    assume: str | None = None,
    *,
    teachers: Sequence[ModelFacts] = (),
    held_adapters: int = 1,
) -> tuple[Resolved, Plan]:
    """Plan, and return the configuration with the plan's values. Raises ConfigError for keys without effect and for
    values that rlctl cannot run yet."""
    refuse_without_effect(resolved, facts)
    require_backends(resolved.config)
    plan = step_plan(resolved.config, facts, method, None, teachers, assume, held_adapters=held_adapters)
    refuse_unrunnable(plan)
    return resolved.with_plan(plan), plan


def idle_fields(config: RlctlConfig, facts: ModelFacts) -> dict[str, str]:
    """Return the keys of the `megatron` section without effect in this model, and the reasons."""
    parts = {"experts": facts.moe is not None, "latent_attention": facts.mla is not None}
    idle = {f"megatron.{name}": without_effect(name, **parts) for name in config.megatron.passed}
    return {key: reason for key, reason in idle.items() if reason}


def refuse_without_effect(resolved: Resolved, facts: ModelFacts) -> None:
    """Raise ConfigError for a required field of the `megatron` section without effect in this model."""
    for key, reason in idle_fields(resolved.config, facts).items():
        if key not in resolved.optional:
            value = resolved.config.megatron.passed[key.removeprefix("megatron.")]
            raise ConfigError(f"`{key}` = {value!r} ({resolved.origin[key]}) has no effect: {reason}.", "Remove it.")


def require_devices(plan: Plan, config: RlctlConfig) -> None:
    """Raise MachineError if the plan needs more GPUs than this machine has and the run joins no cluster."""
    sides = (plan.training.parallel.world_size if plan.training else 0, plan.generation.gpus if plan.generation else 0)
    need, have = max(sides) if plan.colocated else sum(sides), len(local_gpus())
    if plan.cluster.is_cpu or config.cluster.ray_address or have >= need:
        return
    raise MachineError(
        f"The plan needs {need} GPU{'s' * (need > 1)}, and this machine has {have or 'none'}.",
        "Use `--preset laptop` or `--gpu cpu` here, ask for fewer with --nodes and --gpus-per-node, or join a cluster "
        "with --ray-address; --dry-run shows the plan without running it.",
    )


def require_refit_directory(config: RlctlConfig) -> None:
    """Raise InputError if the transport cannot store files in `refit.directory`."""
    refit = config.engine_settings.refit if config.engine_settings else None
    if refit is not None and refit.directory is not None and refit.mover in storing():
        transport_facts(refit.mover).check_directory(refit.directory)
