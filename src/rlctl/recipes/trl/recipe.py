"""TRL's YAML files as rlctl configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.config.recipes import Entry, Import, override_key
from rlctl.config.yaml_values import parse_value, read_mapping
from rlctl.errors import ConfigError, suggest
from rlctl.recipes.rules import Leaf, apply_rule
from rlctl.recipes.trl.mapping import DEFAULTS, METHODS, TABLES, trainer_of

BATCH = "per_device_train_batch_size"


def import_recipe(path: Path | None, overrides: Sequence[str] = (), method: str | None = None) -> Import:
    """Read and map a file with overrides, or overrides alone. `method`: the command's method. Raises ConfigError for
    unreadable files and unknown overrides."""
    result = Import(path or Path("recipe.yaml"), trainer="TRL")
    values: dict[str, Any] = {}
    if path is not None:
        result.files.append(path.resolve())
        values = read_mapping(path, "TRL's configuration")
    overridden = {override_key(text): parse_value(text.partition("=")[2]) for text in overrides}
    result.overridden = frozenset(overridden)
    values |= overridden
    variables = values.pop("env", None) or {}
    trainer = trainer_of(values, method)
    table = TABLES[trainer]
    for key in overridden:
        if key not in table:
            raise ConfigError(f"unknown key `{key}`: `trl {trainer}` has none.", suggest(key, table))
    result.set("run.algorithm", METHODS[trainer], "trl")
    defaults = {} if path is None else DEFAULTS.get(trainer, DEFAULTS["sft"])
    unwritten = {key: value for key, value in defaults.items() if key not in values}
    constants = values | unwritten
    for key, value in constants.items():
        if key in table:
            apply_rule(table[key], Leaf(result, key, value, constants))
        else:
            meant = suggest(key, dict.fromkeys(name for keys in TABLES.values() for name in keys))
            reason = f"`trl {trainer}` has no such key"
            result.entries.append(Entry(key, value, "not known", f"{reason}. {meant}" if meant else reason))
    for name, value in variables.items():
        result.set(f"training.env.{name}", str(value), f"env.{name}")
        result.entries.append(Entry(f"env.{name}", value, "mapped", f"training.env.{name}"))
    if path is not None and result.source.get("batch.prompts") == BATCH:
        rows, prompts = constants[BATCH] or 8, result.values["batch.prompts"]
        batch_line = (
            f"the file has no {BATCH}, which is {rows} by default" if BATCH in unwritten else f"{BATCH} is {rows}"
        )
        result.notes.append(
            f"batch.prompts is {prompts}, the batch of one process of TRL's ({batch_line}): TRL on N GPUs has N times "
            "as many; give --prompts"
        )
    result.entries = [entry for entry in result.entries if entry.key not in unwritten]
    if trainer == "grpo" and path is not None and "reward.terms" not in result.values:
        result.notes.append(
            "no reward is named: give --reward NAME or path/to/file.py:function, which TRL has in Python"
        )
    if method is None and path is not None:
        result.notes.append(f"read as a file of `trl {trainer}`; the command `rlctl train METHOD` says another")
    result.optional = {"run.loggers"}
    return result
