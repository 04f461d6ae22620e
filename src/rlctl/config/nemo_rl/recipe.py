"""NeMo-RL recipes as rlctl configuration.

A recipe is read as NeMo-RL reads it, with its chain of `defaults`, `${...}` references and arithmetic resolvers. Then
every key is mapped, reported with the reason, or refused.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlctl.config.nemo_rl.mapping_rules import Entry, Found, Import, Rule
from rlctl.config.nemo_rl.mapping_table import RENAMED, RULES, finish
from rlctl.config.yaml_values import TEXT_LIMIT, VALUE_LIMIT, parse_value, read_mapping
from rlctl.errors import MOST_LINES, ConfigError, lines_of

MARKS = ("policy", "defaults")
"""Top-level keys that a NeMo-RL file has and an rlctl file never does."""


def is_nemo_rl(values: Mapping[str, Any]) -> bool:
    """Return whether the top level of a YAML file is that of a NeMo-RL recipe."""
    return any(mark in values for mark in MARKS)


def import_recipe(path: Path) -> Import:
    """Read and map a recipe. Raises ConfigError for what cannot be read, and for all keys that nobody knows."""
    result = Import(path)
    leaves = {_renamed(key, result, value): value for key, value in _leaves(read_recipe(path))}
    rules = {key: find_rule(key, RULES) for key in leaves}
    if unknown := [key for key, rule in rules.items() if rule is None]:
        raise ConfigError(
            lines_of([*map(_unknown, unknown[:MOST_LINES]), *unknown[MOST_LINES:]]), f"in the NeMo-RL recipe {path}."
        )
    for key, rule in rules.items():
        if rule is not None:
            rule(Found(result, key, leaves[key], leaves))
    finish(result, leaves)
    order = list(leaves)
    result.entries.sort(key=lambda entry: order.index(entry.key) if entry.key in leaves else len(order))
    return result


def find_rule(key: str, rules: Mapping[str, Rule]) -> Rule | None:
    """Return the rule of a key: its own, else that of the nearest section written with `.*`."""
    parts = key.split(".")
    sections = (".".join(parts[:count]) + ".*" for count in range(len(parts) - 1, 0, -1))
    return next((rules[name] for name in (key, *sections) if name in rules), None)


def _renamed(key: str, result: Import, value: Any) -> str:
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            now = new + key.removeprefix(old)
            result.entries.append(Entry(key, value, "mapped", f"read as {now}, its name today"))
            return now
    return key


def _unknown(key: str) -> str:
    close = difflib.get_close_matches(key, [rule for rule in RULES if not rule.endswith("*")], 1, 0.6)
    return f"unknown key `{key}`" + (f"; did you mean `{close[0]}`?" if close else ".")


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield leaves by dotted key; an empty mapping is a leaf."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the recipe with its defaults merged and every reference resolved. Raises ConfigError for a missing
    default, a chain that closes on itself, and an unknown reference or resolver."""
    merged = _Root(_with_defaults(path, ()))
    return {key: _resolved(value, merged, (key,)) for key, value in merged.items()}


def _with_defaults(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    place = path.resolve()
    if place in chain:
        raise ConfigError(f"{path}: its chain of `defaults` comes back to itself.")
    values = read_mapping(path, "NeMo-RL recipe" if not chain else f"`defaults` of {chain[-1].name}:")
    parents = values.pop("defaults", None) or []
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        if not isinstance(parent, str):
            raise ConfigError(f"{path}: `defaults` names {parent!r}, which is no file.")
        merged = _merge(merged, _with_defaults(path.parent / parent, (*chain, place)))
    return _merge(merged, values)


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge deeply; a mapping with `_override_: true` replaces the one below instead."""
    if over.get("_override_") is True:
        return {key: value for key, value in over.items() if key != "_override_"}
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping):
            value = _merge(below if isinstance(below, Mapping) else {}, value)
        result[key] = value
    return result


def _number(name: str, fold: Callable[[list[float]], float]) -> Callable[[list[Any]], Any]:
    def run(arguments: list[Any]) -> Any:
        if not all(isinstance(a, int | float) and not isinstance(a, bool) for a in arguments):
            raise ConfigError(f"${{{name}:...}}: {arguments} are not numbers.")
        try:
            value = fold(list(arguments))
        except (ArithmeticError, ValueError, IndexError) as error:
            raise ConfigError(f"${{{name}:...}} of {arguments}: {error}.") from error
        if abs(value) > sys.float_info.max:
            raise ConfigError(f"${{{name}:...}} gives a number that is too large.")
        whole = all(isinstance(a, int) for a in arguments) and value == value // 1
        return int(value) if whole else value

    return run


RESOLVERS: dict[str, Callable[[list[Any]], Any]] = {
    "mul": _number("mul", math.prod),
    "add": _number("add", sum),
    "sub": _number("sub", lambda a: a[0] - sum(a[1:])),
    "div": _number("div", lambda a: a[0] / a[1]),
    "max": _number("max", max),
    "min": _number("min", min),
    "oc.env": lambda a: os.environ.get(str(a[0]), a[1] if len(a) > 1 else None),
}


class _Root(dict[str, Any]):
    """The top level of a recipe, in which references are looked up."""

    followed = 0
    """Number of references that were followed so far: each may lead to several others."""


def _resolved(value: Any, root: _Root, at: tuple[str, ...], depth: int = 0) -> Any:
    if depth > 50:
        raise ConfigError(f"`{'.'.join(at)}` refers back to itself.")
    if isinstance(value, Mapping):
        return {key: _resolved(item, root, (*at, str(key)), depth) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, root, at, depth) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    end = _closing(value, 0) if value.startswith("${") else -1
    if end == len(value) - 1:
        return _evaluate(value[2:-1], root, at, depth + 1)
    return _interpolated(value, root, at, depth)


def _interpolated(text: str, root: _Root, at: tuple[str, ...], depth: int) -> str:
    start = text.find("${")
    while start >= 0:
        if len(text) > TEXT_LIMIT:
            raise ConfigError(f"`{'.'.join(at)}`: its references stand for more than {TEXT_LIMIT:,} characters.")
        end = _closing(text, start)
        inner = str(_evaluate(text[start + 2 : end], root, at, depth + 1))
        text = text[:start] + inner + text[end + 1 :]
        start = text.find("${", start + len(inner))
    return text


def _closing(text: str, start: int) -> int:
    """Return the index of the brace that closes the `${` at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += text.startswith("${", index)
        if text[index] == "}":
            depth -= 1
            if depth == 0:
                return index
    raise ConfigError(f"{text!r}: a `${{` is never closed.")


def _evaluate(inner: str, root: _Root, at: tuple[str, ...], depth: int) -> Any:
    """Return the value of a reference, or of a resolver with its arguments, that stands between `${` and `}`."""
    root.followed += 1
    if root.followed > VALUE_LIMIT:
        raise ConfigError(f"`{'.'.join(at)}`: the references of the recipe lead to more than {VALUE_LIMIT:,} others.")
    match = re.match(r"([A-Za-z_][\w.]*):(.*)", inner, re.DOTALL)
    if match is None:
        return _lookup(inner.strip(), root, at, depth)
    name, arguments = match.group(1), [part.strip() for part in _split(match.group(2))]
    if name not in RESOLVERS:
        raise ConfigError(f"`{'.'.join(at)}`: unknown resolver `{name}`.", f"Known: {', '.join(RESOLVERS)}.")
    return RESOLVERS[name]([_resolved(parse_value(a) if "${" not in a else a, root, at, depth) for a in arguments])


def _split(text: str) -> list[str]:
    """Split arguments at the commas outside of nested braces."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _lookup(path: str, root: _Root, at: tuple[str, ...], depth: int) -> Any:
    """Look up `a.b.c` from the top, or `.c` / `..c` from where the reference stands."""
    dots = len(path) - len(path.lstrip("."))
    base = list(at[: len(at) - dots]) if dots else []
    keys = [*base, *(part for part in path.lstrip(".").split(".") if part)]
    value: Any = root
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            raise ConfigError(f"`{'.'.join(at)}` refers to `{path}`, which the recipe does not have.")
        value = value[key]
    return _resolved(value, root, tuple(keys), depth)
