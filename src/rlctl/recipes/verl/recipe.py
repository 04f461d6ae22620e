"""verl's command lines, scripts and YAML files as rlctl configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.config.files import read_text
from rlctl.config.recipes import Entry, Import
from rlctl.config.schema import Schema
from rlctl.config.yaml_values import FILE_LIMIT_BYTES, explain
from rlctl.errors import ConfigError
from rlctl.recipes.hydra import Override, sentence
from rlctl.recipes.rules import Leaf, Rule, apply_rule, rule_of
from rlctl.recipes.verl import mapping, texts
from rlctl.recipes.verl.script import command_line
from rlctl.settings.config import RolloutConfig

TRAINER = "verl"
SFT = "sft_trainer"
"""The module whose configuration a YAML file of texts is for."""


@dataclass(frozen=True)
class RecipeKind:
    """What a trainer of verl's trains, with the table of its keys."""

    method: str | None
    """rlctl's method; None: the keys determine it."""
    rules: Mapping[str, Rule]
    left_out: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Returns verl's values of keys that are not given."""


POLICY = RecipeKind(None, mapping.RULES, mapping.left_out)


def kind_of(module: str) -> RecipeKind:
    """Return the kind of training of a verl module."""
    if "sft" not in module:
        return POLICY
    return RecipeKind("sft", texts.RULES, lambda leaves: texts.left_out(leaves, module))


def import_recipe(path: Path | None, overrides: Sequence[str] = (), method: str | None = None) -> Import:
    """Read and map a script or a YAML file with command-line overrides, or overrides alone. `method`: the command's
    method, if any. Raises ConfigError for unreadable input, and for an override that verl lacks."""
    result = Import(path or Path("recipe.yaml"), trainer=TRAINER)
    base, lines, module = {}, [], SFT if method == "sft" else ""
    if path is not None:
        result.files.append(path.resolve())
        base, lines, module = _read_script(path) if path.suffix == ".sh" else _read_yaml_kind(path)
    kind = kind_of(module)
    for text in overrides:
        require_known(Override.parse(text).key, kind.rules)
    values = _merged(base, [*lines, *overrides], texts.CHOICES if kind.method else ())
    result.overridden = frozenset(Override.parse(text).key for text in overrides)
    leaves = dict(leaves_of(values))
    unwritten = {} if path is None else kind.left_out(leaves)
    constants = leaves | unwritten
    if kind.method:
        result.set("run.algorithm", kind.method, module)
    _map(result, constants, kind.rules)
    if path is not None and not kind.method:
        mapping.finish(result)
    result.entries = [entry for entry in result.entries if entry.key not in unwritten]
    result.optional = {key for key in result.values if key.startswith(("megatron.", "ddp."))} | {"run.loggers"}
    return result


def _map(result: Import, leaves: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    for key, value in leaves.items():
        rule = rule_of(key, rules)
        if value == "":  # a variable of a script that is unset
            result.entries.append(Entry(key, value, "not applicable", "it is empty"))
        elif rule is None:
            result.entries.append(Entry(key, value, "not known", "rlctl does not know this key"))
        else:
            apply_rule(rule, Leaf(result, key, value, leaves))


def _read_script(path: Path) -> tuple[dict[str, Any], list[str], str]:
    line = command_line(path)
    name, folder = line.option("--config-name", "-cn") or "", line.option("--config-path", "-cp", "--config-dir") or ""
    file = next((candidate for candidate in _places(path, folder, name) if candidate.is_file()), None)
    base = _read_yaml(file) if file else {}
    if "megatron" in name:
        base.setdefault("model_engine", "megatron")
    return base, line.overrides, line.module


def _read_yaml_kind(path: Path) -> tuple[dict[str, Any], list[str], str]:
    values = _read_yaml(path)
    if "actor_rollout_ref" in values:
        return values, [], ""
    return values, [], "fsdp_sft_trainer" if "partial_pretrain" in (values.get("model") or {}) else SFT


def _places(script: Path, folder: str, name: str) -> Iterator[Path]:
    file = name if name.endswith(".yaml") else f"{name}.yaml"
    for base in (Path(), script.parent, *script.parent.parents[:3]):
        yield base / folder / file


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config: Any = OmegaConf.create(read_text(path, "verl's configuration", FILE_LIMIT_BYTES))
        container: Any = OmegaConf.to_container(config, resolve=False)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {explain(error)}.") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path} cannot be read: {sentence(error)}.") from error
    for name in ("defaults", "hydra"):
        container.pop(name, None)
    return {str(key): value for key, value in container.items()}


def _merged(base: Mapping[str, Any], overrides: Sequence[str], choices: Collection[str]) -> dict[str, Any]:
    """Return sections with Hydra overrides applied and resolvable references resolved. `choices`: sections that an
    override may take from verl's files; `engine=megatron` names the trainer."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = OmegaConf.create(dict(base))
    for text in overrides:
        override = Override.parse(text)
        if "@" in override.key or "/" in override.key:  # a choice of verl's files
            continue
        if override.key in choices and isinstance(override.value, str):
            if override.key == "engine":
                OmegaConf.update(config, "model_engine", override.value, force_add=True)
            continue
        try:
            if override.remove:
                section, _, name = override.key.rpartition(".")
                holder = OmegaConf.select(config, section) if section else config
                if holder is not None:
                    holder.pop(name, None)
            else:
                OmegaConf.update(config, override.key, override.value, merge=True, force_add=True)
        except (OmegaConfBaseException, ValueError, AttributeError) as error:
            raise ConfigError(f"the override of `{override.key}` cannot be applied: {sentence(error)}.") from error
    return dict(_resolved(config))


def _resolved(config: Any) -> Iterator[tuple[str, Any]]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for key in config:
        try:
            value = config[key]
        except OmegaConfBaseException:  # a reference into verl's defaults, which are not read
            continue
        if OmegaConf.is_dict(value):
            yield str(key), dict(_resolved(value))
        else:
            yield str(key), OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def leaves_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, f"{prefix}{name}.")
        elif name not in ("_target_", "defaults"):
            yield f"{prefix}{name}", value


def require_known(key: str, rules: Mapping[str, Rule]) -> None:
    """Raise ConfigError for a key of the command line that verl does not have."""
    if rule_of(key, rules) is None and key not in texts.CHOICES:
        meant = Schema((RolloutConfig,)).nearest(key)
        raise ConfigError(f"unknown key `{key}`: verl has none.", f"Did you mean `{meant}`?" if meant else None)
