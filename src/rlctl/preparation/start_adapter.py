"""The settings of a run that starts from an adapter of PEFT (`training.lora.adapter`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlctl.checkpoints.hf.hf_files import ADAPTERS
from rlctl.checkpoints.hf.peft_files import (
    PeftConfig,
    modules_in,
    peft_shapes,
    read_peft_config,
    target_of,
    targets_in,
    whole_in,
)
from rlctl.checkpoints.model_files import Tell
from rlctl.config.load import DEFAULT, Resolved
from rlctl.config.sources import Value
from rlctl.errors import ConfigError, InputError, listed
from rlctl.models.facts import ModelFacts
from rlctl.models.families import has_file
from rlctl.settings.training import LoraConfig
from rlctl.weights.adapter_sites import Place, Sites, by_pattern, places, sites
from rlctl.weights.dtensor import module_layout

PREFIX = "training.lora."
SAME = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora"}
"""Keys of `training.lora`, and PEFT's."""


def with_base(resolved: Resolved) -> Resolved:
    """Set an unset `model.name` to the model that `training.lora.adapter` was trained on."""
    config = resolved.config
    if config.training.lora.adapter is None or config.model.name:
        return resolved
    adapter = read_peft_config(Path(config.training.lora.adapter), f"--adapter {config.training.lora.adapter}")
    return resolved.with_values({"model.name": adapter.base} if adapter.base else {}, _origin(adapter))


def with_adapter(resolved: Resolved, facts: ModelFacts, tell: Tell) -> Resolved:
    """Set unset keys of `training.lora` to what the adapter in `training.lora.adapter` has.

    Raises InputError for an adapter that rlctl cannot train or that is of another model, and ConfigError for keys that
    differ.
    """
    directory = resolved.config.training.lora.adapter
    if directory is None:
        return resolved
    adapter = read_peft_config(Path(directory), f"--adapter {directory}")
    dropout = float(adapter.values.get("lora_dropout") or 0.0)
    if dropout and resolved.config.rollout_settings is not None:
        tell(f"{directory} was trained with lora_dropout = {dropout}; with rollouts, rlctl trains without dropout")
        dropout = 0.0
    if not (facts.listed or has_file(facts.family)):
        tell(f"the layers of {directory} are not compared with the model's, whose files are not on this machine")
        numbers = {f"{PREFIX}{key}": value for key, value in {**_numbers(adapter), "dropout": dropout}.items()}
        return resolved.with_values(numbers, _origin(adapter))
    if (
        facts.tied_embeddings
        and adapter.values.get("modules_to_save")
        and not adapter.values.get("ensure_weight_tying")
    ):
        raise InputError(
            f"{adapter.label}: the model's embedding is its output layer, and PEFT has trained them apart "
            f"(modules_to_save without ensure_weight_tying in {ADAPTERS}).",
            "Train the adapter with ensure_weight_tying=True, or without modules_to_save.",
        )
    theirs = LoraConfig.model_validate(
        {"adapter": directory, "dropout": dropout, **_numbers(adapter), **_layers(adapter, facts)}
    )
    given = {key for key, origin in resolved.origin.items() if key.startswith(PREFIX) and origin != DEFAULT}
    _require_same(resolved, adapter, theirs, given, facts)
    values = theirs.model_dump(mode="json", exclude={"adapter", "refit"})
    return resolved.deciding(
        Value(f"{PREFIX}{key}", value, _origin(adapter))
        for key, value in values.items()
        if not any(name == f"{PREFIX}{key}" or name.startswith(f"{PREFIX}{key}.") for name in given)
    )


def _origin(adapter: PeftConfig) -> str:
    return f"{ADAPTERS} of {adapter.directory}"


def _numbers(adapter: PeftConfig) -> dict[str, Any]:
    return {
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "rslora": bool(adapter.values.get("use_rslora")),
        "modules_to_save": tuple(adapter.values.get("modules_to_save") or ()),
    }


def _layers(adapter: PeftConfig, facts: ModelFacts) -> dict[str, Any]:
    """Return targets and patterns for the adapter's layers: PEFT's, where they mean these layers, else all names."""
    stored = targets_in(adapter)
    places_by_module = {place.module: place for place in places(facts)}
    if lost := sorted(stored.keys() - places_by_module.keys()):
        raise InputError(
            f"{adapter.label}: the model has no layer {lost[0]} that rlctl can put an adapter on.", _owner(adapter)
        )
    _require_shapes(adapter, places_by_module, facts)
    modules, parameters = (adapter.values.get(key) or () for key in ("target_modules", "target_parameters"))
    by_config = modules if isinstance(modules, str) else sorted({*modules, *parameters})
    exclude = adapter.values.get("exclude_modules") or ()
    for targets, excluded in ((by_config, exclude), (by_config, ()), (sorted(stored), ())):
        layers = {"targets": targets, "exclude": excluded, **_patterns(adapter, stored)}
        try:
            meant = sites(facts, LoraConfig.model_validate(_numbers(adapter) | layers))
        except ConfigError:
            continue
        if {site.module for site in meant.all} == stored.keys() and _scaled_alike(adapter, meant, stored):
            return layers
    raise InputError(
        f"{adapter.label}: its layers have ranks or alphas that {ADAPTERS} does not give them.",
        "Save it again with PEFT.",
    )


def _require_shapes(adapter: PeftConfig, places_by_module: Mapping[str, Place], facts: ModelFacts) -> None:
    """Raise InputError for tensors of another shape than the model and the ranks take, by the file's header."""
    stored = modules_in(adapter, whole_modules=True)
    for module, pair in stored.items():
        target = target_of(module, stored, adapter)
        place, rank = places_by_module[target.removesuffix(".weight")], adapter.rank_of(target)
        shapes = pair["A"].shape, pair["B"].shape
        if shapes != (wanted := peft_shapes(place, rank)):
            raise InputError(
                f"{adapter.label}: {target} has A {list(shapes[0])} and B {list(shapes[1])}; the model and rank {rank} "
                f"take {list(wanted[0])} and {list(wanted[1])}.",
                _owner(adapter),
            )
    params = module_layout(facts, "float32").params
    for module, tensor in whole_in(adapter).items():
        spec = params.get(f"{module}.weight")
        if spec is not None and tensor.shape != spec.shape:
            raise InputError(
                f"{adapter.label}: {module} (modules_to_save) has shape {list(tensor.shape)}, and the model's has "
                f"{list(spec.shape)}.",
                _owner(adapter),
            )


def _owner(adapter: PeftConfig) -> str:
    return f"They are adapters of {adapter.base}." if adapter.base else "Name the model that they were trained on."


def _patterns(adapter: PeftConfig, stored: Mapping[str, str]) -> dict[str, Any]:
    """Return the patterns that match a layer; PEFT ignores others."""
    return {
        key: {
            pattern: value
            for pattern, value in (adapter.values.get(key) or {}).items()
            if any(by_pattern({pattern: True}, (target,), False) for target in stored.values())
        }
        for key in ("rank_pattern", "alpha_pattern")
    }


def _scaled_alike(adapter: PeftConfig, meant: Sites, stored: Mapping[str, str]) -> bool:
    numbers = {target: (adapter.rank_of(target), adapter.scale_of(target)) for target in stored.values()}
    return all((site.rank, site.scale) == numbers[stored[site.module]] for site in meant.all)


def _require_same(
    resolved: Resolved, adapter: PeftConfig, theirs: LoraConfig, given: set[str], facts: ModelFacts
) -> None:
    ours = resolved.config.training.lora
    differing = list(_differences(resolved, adapter, theirs, given))
    merged = theirs.model_copy(
        update={key: getattr(ours, key) for key in ("targets", "exclude") if f"{PREFIX}{key}" in given}
    )
    mine, stored = ({site.module for site in sites(facts, lora).all} for lora in (merged, theirs))
    if mine != stored:
        more, less = sorted(mine - stored), sorted(stored - mine)
        parts = [f"it has none on {listed(more)}"] * bool(more) + [f"it also has {listed(less)}"] * bool(less)
        differing.append(f"training.lora.targets names other layers than the adapter has: {', and '.join(parts)}")
    if differing:
        raise ConfigError(
            f"{adapter.label} is another adapter than the run's: {'; '.join(differing)}.",
            "Leave these keys out: the adapter sets them.",
        )


def _differences(resolved: Resolved, adapter: PeftConfig, theirs: LoraConfig, given: set[str]) -> Iterator[str]:
    ours = resolved.config.training.lora
    for key, name in SAME.items():
        if f"{PREFIX}{key}" in given and getattr(ours, key) != getattr(theirs, key):
            yield (
                f"training.lora.{key} = {getattr(ours, key)} ({resolved.origin[PREFIX + key]}) and "
                f"{name} = {getattr(theirs, key)}"
            )
    if f"{PREFIX}modules_to_save" in given and set(ours.modules_to_save) != set(theirs.modules_to_save):
        yield f"training.lora.modules_to_save = {ours.modules_to_save} and modules_to_save = {theirs.modules_to_save}"
    for key in ("rank_pattern", "alpha_pattern"):
        mine: Mapping[str, Any] = getattr(ours, key)
        if any(name.startswith(f"{PREFIX}{key}") for name in given) and mine != getattr(theirs, key):
            yield f"training.lora.{key} = {mine} and {key} = {adapter.values.get(key) or {}}"
