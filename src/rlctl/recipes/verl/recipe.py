"""verl's command lines, scripts and YAML files as rlctl configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.config.files import read_text
from rlctl.config.keys import nearest
from rlctl.config.recipes import Entry, Import
from rlctl.config.yaml_values import FILE_LIMIT_BYTES, explain
from rlctl.errors import ConfigError
from rlctl.recipes.hydra import Override, sentence
from rlctl.recipes.rules import Found, apply_rule, leave_out_invalid, rule_of
from rlctl.recipes.verl.mapping import RULES, finish, left_out
from rlctl.recipes.verl.script import command_line

TRAINER = "verl"
OF_TEXTS = (
    "verl's trainer of texts (SFT) has other keys: `rlctl train sft` with --data, --model and --lr does the same."
)


def import_recipe(path: Path | None, overrides: Sequence[str] = ()) -> Import:
    """Read and map a script or YAML file with overrides, or overrides alone. Raises ConfigError if unreadable."""
    result = Import(path or Path("recipe.yaml"), trainer=TRAINER)
    base, texts = {}, []
    if path is not None:
        result.files.append(path.resolve())
        base, texts = _read_script(path, result) if path.suffix == ".sh" else (_read_yaml(path), [])
    values = _merged(base, [*texts, *overrides])
    result.overridden = frozenset(Override.parse(text).key for text in overrides)
    leaves = dict(leaves_of(values))
    unwritten = {} if path is None else left_out(leaves)
    known = leaves | unwritten
    if result.foreign is None:
        _map(result, known)
        if path is not None:
            finish(result)
    else:
        result.entries += [Entry(key, value, "not applicable", OF_TEXTS) for key, value in leaves.items()]
    result.entries = [entry for entry in result.entries if entry.key not in unwritten]
    leave_out_invalid(result, known)
    result.optional = {key for key in result.values if key.startswith(("megatron.", "ddp."))} | {"run.loggers"}
    return result


def _map(result: Import, leaves: Mapping[str, Any]) -> None:
    for key, value in leaves.items():
        rule = rule_of(key, RULES)
        if value == "":  # a variable of a script that is unset
            result.entries.append(Entry(key, value, "not applicable", "it is empty"))
        elif rule is None:
            result.entries.append(Entry(key, value, "not known", "rlctl does not know this key"))
        else:
            apply_rule(rule, Found(result, key, value, leaves))


def _read_script(path: Path, result: Import) -> tuple[dict[str, Any], list[str]]:
    line = command_line(path)
    if "sft" in line.module:
        result.foreign = OF_TEXTS
    name, folder = line.option("--config-name", "-cn") or "", line.option("--config-path", "-cp", "--config-dir") or ""
    file = next((one for one in _places(path, folder, name) if one.is_file()), None)
    base = _read_yaml(file) if file else {}
    if "megatron" in name:
        base.setdefault("model_engine", "megatron")
    return base, line.overrides


def _places(script: Path, folder: str, name: str) -> Iterator[Path]:
    """Yield where a configuration file of the user's may be; verl's own are in its package."""
    file = name if name.endswith(".yaml") else f"{name}.yaml"
    for base in (Path(), script.parent, *script.parent.parents[:3]):
        yield base / folder / file


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config: Any = OmegaConf.create(read_text(path, "verl's configuration", FILE_LIMIT_BYTES))
        found: Any = OmegaConf.to_container(config, resolve=False)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {explain(error)}.") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path} cannot be read: {sentence(error)}.") from error
    for name in ("defaults", "hydra"):
        found.pop(name, None)
    return {str(key): value for key, value in found.items()}


def _merged(base: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Return sections with overrides in Hydra's form, and references resolved where they lead somewhere."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = OmegaConf.create(dict(base))
    for text in texts:
        override = Override.parse(text)
        if "@" in override.key or "/" in override.key:  # the choice of one of verl's own files
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
        except OmegaConfBaseException:  # a reference into verl's own defaults, which are not read
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


def require_known(key: str) -> None:
    """Raise ConfigError for a key of the command line that verl does not have."""
    if rule_of(key, RULES) is None:
        meant = nearest(key)
        raise ConfigError(f"unknown key `{key}`: verl has none.", f"Did you mean `{meant}`?" if meant else None)
