"""NeMo-RL recipes as rlctl configuration: every key is mapped, reported with the reason, or refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlctl.config.nemo_rl_file import read_recipe
from rlctl.config.nemo_rl_import import Entry, Import, Rule
from rlctl.config.nemo_rl_table import RENAMED, RULES, finish
from rlctl.errors import ConfigError


def import_recipe(path: Path) -> Import:
    """Reads and maps a recipe. Raises ConfigError for what cannot be read, and for all keys that nobody knows."""
    recipe = read_recipe(path)
    result = Import(path)
    leaves = dict(_leaves(recipe))
    leaves = {_renamed(key, RENAMED, result, value): value for key, value in leaves.items()}
    unknown = []
    for key, value in leaves.items():
        rule = find_rule(key, RULES)
        if rule is None:
            unknown.append(key)
            continue
        rule(result, key, value, leaves)
    if unknown:
        raise ConfigError("\n".join(_unknown(key, RULES) for key in unknown), f"in the NeMo-RL recipe {path}.")
    finish(result, leaves)
    result.entries.sort(key=lambda entry: list(leaves).index(entry.key) if entry.key in leaves else len(leaves))
    return result


def find_rule(key: str, rules: Mapping[str, Rule]) -> Rule | None:
    """The rule of a key: its own, else that of the nearest section written with `.*`."""
    if key in rules:
        return rules[key]
    parts = key.split(".")
    for count in range(len(parts) - 1, 0, -1):
        rule = rules.get(".".join(parts[:count]) + ".*")
        if rule is not None:
            return rule
    return None


def _renamed(key: str, renamed: Mapping[str, str], result: Import, value: Any) -> str:
    for old, new in renamed.items():
        if key == old or key.startswith(f"{old}."):
            now = new + key.removeprefix(old)
            result.entries.append(Entry(key, value, "mapped", f"read as {now}, its name today"))
            return now
    return key


def _unknown(key: str, rules: Mapping[str, Rule]) -> str:
    named = [rule for rule in rules if not rule.endswith("*")]
    close = difflib.get_close_matches(key, named, 1, 0.6)
    return f"unknown key `{key}`" + (f"; did you mean `{close[0]}`?" if close else ".")


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key; an empty mapping is a leaf."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value
