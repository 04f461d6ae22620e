"""What every command that starts engines begins with: the model it is for, and the devices that its plan needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlctl.checkpoints.source import ModelSource, read_object, resolve_model
from rlctl.config.load import Resolved
from rlctl.config.passthrough import without_effect
from rlctl.config.paths import user_path
from rlctl.config.schema import ModelConfig, RlctlConfig
from rlctl.errors import ConfigError, InputError, MachineError
from rlctl.models.catalog import lookup, near
from rlctl.models.facts import ModelFacts
from rlctl.models.registry import facts_from_hf_config
from rlctl.planner.from_config import local_gpus
from rlctl.planner.plan import Plan

Tell = Callable[[str], None]
RECIPE = "policy.megatron_cfg"
"""In the origin of what an imported recipe sets."""
ASSUMED_GPU = "h100"
"""What is planned for, where nothing is started, if the configuration asks for GPUs and this machine has none to look
at."""


@dataclass(frozen=True)
class NamedModel:
    """The model that `model.name` names: its files, and what is known of it."""

    source: ModelSource
    facts: ModelFacts


def open_model(model: ModelConfig, tell: Tell = lambda _: None, *, weights: bool = True) -> NamedModel:
    """Find or fetch the model; without `weights` only its configuration and tokenizer.

    Raises InputError where there is none, or none that rlctl knows the family of.
    """
    if not model.name:
        raise InputError("No model: model.name is not set.", "Give --model, or start from --preset laptop.")
    source = resolve_model(
        model.name, model.revision, weights=weights, trust_remote_code=model.trust_remote_code, tell=tell
    )
    return NamedModel(source, facts_from_hf_config(read_object(source.directory, "config.json", "")))


def published_facts(model: ModelConfig, tell: Tell = lambda _: None) -> ModelFacts:
    """What is known of a model without its weights: from a local directory's configuration, the catalog, or the hub's
    configuration, in this order.

    Raises InputError, with near names of the catalog, for a model that none of them has.
    """
    if not model.name:
        raise InputError("No model: model.name is not set.", "Give --model, or a preset that names one.")
    if not user_path(model.name).is_dir() and (known := lookup(model.name)) is not None:
        return known
    try:
        directory = resolve_model(model.name, model.revision, weights=False, tell=tell).directory
    except InputError as error:
        close = near(model.name)
        raise InputError(
            error.message, f"Known without a download: {', '.join(close)}." if close else error.hint
        ) from error
    return facts_from_hf_config(read_object(directory, "config.json", ""))


def idle_fields(config: RlctlConfig, facts: ModelFacts) -> dict[str, str]:
    """Keys of the `megatron` section that do nothing in this model, and why."""
    parts = {"experts": facts.moe is not None, "latent_attention": facts.mla is not None}
    found = {f"megatron.{name}": without_effect(name, **parts) for name in config.megatron.passed}
    return {key: why for key, why in found.items() if why}


def refuse_without_effect(resolved: Resolved, facts: ModelFacts) -> None:
    """Raises ConfigError for a field of the `megatron` section that does nothing in this model.

    Those of an imported recipe are let through: recipes of dense models carry the fields of experts, too.
    """
    for key, why in idle_fields(resolved.config, facts).items():
        origin = resolved.origin.get(key, "")
        if RECIPE not in origin:
            value = resolved.config.megatron.passed[key.removeprefix("megatron.")]
            raise ConfigError(f"`{key}` = {value!r} ({origin}) has no effect: {why}.", "Remove it.")


def require_devices(plan: Plan, config: RlctlConfig) -> None:
    """Raise MachineError when a plan for GPUs is to run on this machine alone and it has fewer."""
    policy = plan.training.world_size if plan.training else 0
    need, have = max(policy, plan.generation.gpus if plan.generation else 0), len(local_gpus())
    if plan.cluster.is_cpu or config.cluster.ray_address or have >= need:
        return
    raise MachineError(
        f"The plan needs {need} GPU{'s' * (need > 1)}, and this machine has {have or 'none'}.",
        "Use `--preset laptop` or `--gpu cpu` here, ask for fewer with --nodes and --gpus-per-node, or join a cluster "
        "with --ray-address; --dry-run shows the plan without running it.",
    )
