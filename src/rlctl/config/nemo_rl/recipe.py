"""NeMo-RL recipes as rlctl configuration.

A recipe is read as NeMo-RL reads it, with its chain of `defaults`, `${...}` references and arithmetic resolvers. Then
every key is mapped or reported with the reason.
"""

from __future__ import annotations

import copy
import difflib
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.config.files import problem_with
from rlctl.config.keys import is_section, nearest
from rlctl.config.nemo_rl.mapping_rules import (
    ALGORITHMS,
    HANDED_ON,
    Entry,
    Found,
    Import,
    Rule,
    disagreement,
    foreign_kind,
    is_field,
    misfit,
    of_other_backend,
    overruled,
)
from rlctl.config.nemo_rl.mapping_table import RENAMED, RULES, finish
from rlctl.config.other_trainers import KEYS as OTHER_TRAINERS
from rlctl.config.passthrough import TARGETS
from rlctl.config.schema import RlctlConfig
from rlctl.config.yaml_values import TEXT_LIMIT, VALUE_LIMIT, OldBooleans, parse_value, read_mapping
from rlctl.errors import ConfigError, InputError

OWN = RlctlConfig.model_fields.keys()
MARKS = ("policy", "defaults", "grpo", "loss_fn", "checkpointing", "eval", *(ALGORITHMS.keys() - OWN))
"""Top-level keys that a NeMo-RL file has and an rlctl file never does (which has a section `distillation` too)."""


OF_THE_ALGORITHM = ("loss_fn", "data", "env", "teacher", "teachers", "value")
"""Sections whose keys depend on the algorithm."""


ONLY_LOGS = ("logger.", "checkpointing.", "data.validation.")
"""Sections that a run goes on without where they refer to what is not there."""


ONE_VALUE = RULES.keys() - {
    ".".join(parts[:count]) for key in RULES for parts in (key.split("."),) for count in range(1, len(parts))
}
"""Keys that have one value in NeMo-RL, and nothing below."""


HYDRA_PAIR = re.compile(r"""("[^"]*"|'[^']*')|([{,]\s*[\w.]+):(?!\s|//)""")
"""A text in quotes, or a key of a mapping in Hydra's form, which has no space behind the colon: `{a:1}`."""

ALIKE = {"teacher": "policy", "value": "policy", "generation": "policy.generation", "tokenizer": "policy.tokenizer"}
"""Sections that have the keys of another one."""

OPEN = frozenset((
    "automodel_kwargs", "chat_template_kwargs", "default_chat_template_kwargs", "dynamo_cfg", "env_vars",
    "hf_config_overrides", "mcore_generation_config", "nemo_gym", "on_policy_distillation", "refit_cfg", "sglang_cfg",
    "sglang_kwargs", "trtllm_cfg", "trtllm_kwargs", "video",
))  # fmt: skip
"""Sections that hold any names: variables, arguments of other libraries, and what belongs to engines without rules."""

BOOLEAN_TEXTS = ("true", "false", "yes", "no", "on", "off")


@dataclass(frozen=True)
class Override:
    """A `key=value` of the command line in Hydra's form: `+` and `++` may stand in front, and `~key` removes a key."""

    key: str
    value: Any
    remove: bool = False

    @classmethod
    def parse(cls, text: str) -> Override:
        """Raises ConfigError where there is no value."""
        key, equals, value = text.partition("=")
        remove, key = key.startswith("~"), key.lstrip("+~").strip()
        if not key or not (equals or remove):
            raise ConfigError(f"{text}: there is no value.", "Write key=value, for example policy.model_name=NAME.")
        if value.startswith("{"):
            value = HYDRA_PAIR.sub(lambda found: found[1] or f"{found[2]}: ", value)
        return cls(key, parse_value(value), remove)

    def leaves(self) -> list[str]:
        """Return the keys that are given a value: those inside of a mapping one by one."""
        inside = isinstance(self.value, Mapping) and self.value
        return [key for key, _ in _leaves(self.value, f"{self.key}.")] if inside else [self.key]


@dataclass(frozen=True)
class Unresolved:
    """A value that refers to what is not there."""

    text: Any
    why: str

    def __str__(self) -> str:
        return str(self.text)


def is_nemo_rl(values: Mapping[str, Any]) -> bool:
    """Return whether the top level of a YAML file is that of a NeMo-RL recipe."""
    return any(mark in values for mark in MARKS)


def knows(key: str) -> bool:
    """Return whether NeMo-RL has a key or a section of this name, or hands it on to Megatron or vLLM, which has it."""
    key = renamed(key)
    section = next((section for section in ALIKE if key.startswith(f"{section}.")), None)
    if key in RULES or key in other_keys() or is_field(key) or not OPEN.isdisjoint(key.split(".")[:-1]):
        return True
    if key.startswith("policy.scheduler."):  # a list, whose rule looks at torch's arguments
        return True
    if section is not None:
        return knows(ALIKE[section] + key.removeprefix(section))
    return any(name.startswith(f"{key}.") for name in (*RULES, *other_keys()))


@functools.cache
def other_keys() -> frozenset[str]:
    """Return the keys of NeMo-RL that the table has no rule for but that of their section."""
    text = (Path(__file__).parent / "other_keys.txt").read_text()
    sections = (line.split() for line in text.replace("\n  ", " ").splitlines())
    return frozenset(f"{section}{name}" for section, *names in sections for name in names)


def import_recipe(path: Path | None, overrides: Sequence[Override] = ()) -> Import:
    """Read and map a recipe with overrides of the command line, or these alone.

    Raises ConfigError for a file that cannot be read, and for an override of a key that neither the recipe nor rlctl
    knows. A key of the file that nobody knows is an entry of the result.
    """
    result = Import(path or Path("recipe.yaml"))
    before = read_recipe(path) if overrides else {}
    result.before = {renamed(key): value for key, value in _leaves(before)}
    found = dict(_leaves(read_recipe(path, overrides, result.files)))
    given = {key for override in overrides for key in override.leaves()}
    result.overridden = frozenset(map(renamed, given))
    for key in found:
        if (now := renamed(key)) != key:
            result.entries.append(Entry(key, found[key], "mapped", f"read as {now}, its name today"))
    leaves = {renamed(key): value for key, value in found.items()}
    known = {key: value for key, value in leaves.items() if not isinstance(value, Unresolved)}
    result.foreign, algorithm = foreign_kind(known)
    if algorithm is not None and result.foreign is None:
        result.set("run.algorithm", algorithm, algorithm)
    other = Import(result.path)
    # What the backend that trains says itself comes last, and holds.
    for key, value in sorted(leaves.items(), key=lambda leaf: not of_other_backend(leaf[0], known)):
        rule = find_rule(key, RULES)
        if isinstance(value, Unresolved) and rule is not None:
            status = "logging" if key.startswith(ONLY_LOGS) else "not yet"
            result.entries.append(Entry(key, value.text, status, value.why))
        elif rule is None and value in ({}, None) and any(known_key.startswith(f"{key}.") for known_key in RULES):
            result.entries.append(Entry(key, value, "not applicable", "the section is empty"))
        elif rule is None and result.foreign and key.partition(".")[0] in OF_THE_ALGORITHM:
            result.entries.append(Entry(key, value, "not applicable", "it belongs to what rlctl does not run yet"))
        elif rule is None:
            written = value.text if isinstance(value, Unresolved) else value
            result.entries.append(Entry(key, written, "not known", "rlctl does not know this key"))
        elif isinstance(value, Mapping) and value and key in ONE_VALUE:
            status = "logging" if key.startswith(ONLY_LOGS) else "not yet"
            result.entries.append(Entry(key, value, status, "it is a section, and NeMo-RL has one value there"))
        elif isinstance(value, str) and value.lower() in BOOLEAN_TEXTS and not _takes_any_text(key):
            why = "it is a text, and NeMo-RL takes every text for true: write true or false without quotes"
            result.entries.append(Entry(key, value, "not yet", f"{why}, or ${{oc.decode:...}} around a variable"))
        elif overruled(key, known):
            _apply_rule(rule, Found(other, key, value, known))
            result.entries.append(Entry(key, value, "not applicable", "the backend that trains has its own"))
        else:
            _apply_rule(rule, Found(result, key, value, known))
    finish(result, known)
    if line := disagreement(result, other, known):
        result.notes.append(line)
    _leave_out_misfits(result, known)
    for index, entry in enumerate(result.entries):
        if entry.status == "not known" and entry.key in given - set(_paths(before)):
            raise _unknown(entry.key, (), entry.note)
        if entry.status == "not known" and (close := _close(entry.key, 0.75)):
            result.entries[index] = replace(entry, note=f"{entry.note}; did you mean {close[0]}?")
    order = {key: index for index, key in enumerate(leaves)}
    result.entries.sort(key=lambda entry: order.get(entry.key, len(order)))
    return result


def _takes_any_text(key: str) -> bool:
    """Return whether a text such as `on` may be meant as a text: a variable's value, a name in a logger."""
    return ".env_vars." in key or key.startswith("logger.")


def _apply_rule(rule: Rule, found: Found) -> None:
    """Map a key. Where its rule cannot work with what the recipe has, a value of another type perhaps, nothing of the
    key is kept, and an entry of the report says so."""
    result = found.result
    values, source, told = dict(result.values), dict(result.source), len(result.entries)
    try:
        rule(found)
    except InputError:  # a ValueError too, with a sentence of its own
        raise
    except (TypeError, ValueError, AttributeError, KeyError):
        result.values, result.source = values, source
        del result.entries[told:]
        found.say("not yet", "rlctl cannot read such a value, or not with the values of the keys next to it")


def _leave_out_misfits(result: Import, leaves: Mapping[str, Any]) -> None:
    """Make what rlctl's own keys cannot hold entries of the report."""
    for key, value in list(result.values.items()):
        if (why := misfit(key, value)) is None:
            continue
        source = result.source[key]
        del result.values[key], result.source[key]
        result.entries[:] = [e for e in result.entries if e.key != source or e.status != "mapped"]
        note = f"{key} cannot be {value!r}: {why}"
        result.entries.append(Entry(source, leaves.get(source), "not yet", note, key))


def find_rule(key: str, rules: Mapping[str, Rule]) -> Rule | None:
    """Return the rule of a key: its own, else that of the nearest section written with `.*`."""
    parts = key.split(".")
    sections = (".".join(parts[:count]) + ".*" for count in range(len(parts) - 1, 0, -1))
    return next((rules[name] for name in (key, *sections) if name in rules), None)


def renamed(key: str) -> str:
    """Return the name that a key has in NeMo-RL today."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return key


def _close(key: str, cutoff: float, names: Iterable[str] = ()) -> list[str]:
    """Return the name that is most like `key` among those of NeMo-RL, Megatron's and vLLM's fields, and `names`."""
    known = {*names, *other_keys(), *(rule for rule in RULES if not rule.endswith("*"))}
    for section, target in HANDED_ON.items():
        if key.startswith(f"{section}."):
            known.update(f"{section}.{field}" for field in TARGETS[target].fields() or ())
    return difflib.get_close_matches(key, sorted(known), 1, cutoff)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield leaves by dotted key; an empty mapping is a leaf, and so is a section where NeMo-RL has one value."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and renamed(key) not in ONE_VALUE:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def read_recipe(
    path: Path | None, overrides: Sequence[Override] = (), files: list[Path] | None = None
) -> dict[str, Any]:
    """Return the recipe with its defaults merged, then overrides, then every reference resolved; a value whose
    reference leads nowhere is `Unresolved`. Raises ConfigError for a missing default, a chain that closes on itself,
    and an override of a key that does not exist. `files` gets the files that were read."""
    merged = _Root(_with_defaults(path, (), [] if files is None else files) if path is not None else {})
    for override in overrides:
        _apply(override, merged)
    return {key: _tolerant(value, merged, (key,)) for key, value in merged.items()}


def _apply(override: Override, merged: dict[str, Any]) -> None:
    present = set(_paths(merged))
    for key in override.leaves():
        if key not in present and not knows(key):
            raise _unknown(key, present)
    _change(merged, override.key.split("."), override)


def _unknown(key: str, present: Iterable[str], why: str = "neither the recipe nor NeMo-RL has it") -> ConfigError:
    ours = key in OTHER_TRAINERS or is_section(key.partition(".")[0])
    close = [nearest(key)] if ours else _close(key, 0.6, present)
    meant = f"Did you mean `{close[0]}`?" if close else "`rlctl config schema` lists rlctl's own keys."
    return ConfigError(f"unknown key `{key}`: {why}.", meant)


def _paths(values: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of sections, values and places in lists."""
    items = enumerate(values) if isinstance(values, list) else values.items() if isinstance(values, Mapping) else ()
    for name, value in items:
        yield f"{prefix}{name}"
        yield from _paths(value, f"{prefix}{name}.")


def _change(place: dict[str, Any] | list[Any], keys: Sequence[str], override: Override) -> None:
    """Apply an override below a section, or below a list, whose values are counted from 0."""
    name, *below = keys
    at: Any = name
    if isinstance(place, list):
        if not name.isdecimal() or int(name) >= len(place):
            raise ConfigError(f"`{override.key}`: the list has {len(place)} values, counted from 0, and no `{name}`.")
        at = int(name)
    now = place[at] if isinstance(place, list) else place.get(at)
    if below:
        # A list may be that of another key, too, by an anchor.
        place[at] = copy.deepcopy(now) if isinstance(now, list) else now if isinstance(now, dict) else {}
        _change(place[at], below, override)
    elif not override.remove:
        merges = isinstance(override.value, Mapping)
        place[at] = _merge(now if isinstance(now, Mapping) else {}, override.value) if merges else override.value
    elif isinstance(place, list) or name in place:
        del place[at]


def _tolerant(value: Any, root: _Root, at: tuple[str, ...]) -> Any:
    """Return the value with references resolved, and `Unresolved` instead of each leaf where that fails."""
    if isinstance(value, Mapping):
        return {key: _tolerant(item, root, (*at, str(key))) for key, item in value.items()}
    try:
        return _resolved(value, root, at)
    except TooMuch:
        raise
    except ConfigError as error:
        return Unresolved(value, error.message.removesuffix("."))


def _with_defaults(path: Path, chain: tuple[Path, ...], files: list[Path]) -> dict[str, Any]:
    place = path.resolve()
    files.append(place)
    if place in chain:
        raise ConfigError(f"{path}: its chain of `defaults` comes back to itself.")
    values = read_mapping(path, "NeMo-RL recipe" if not chain else f"`defaults` of {chain[-1].name}:", OldBooleans)
    parents = values.pop("defaults", None) or []
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        if not isinstance(parent, str):
            raise ConfigError(f"{path}: `defaults` names {parent!r}, which is no file.")
        if problem := problem_with(path.parent / parent):
            message = f"{path} builds on {parent} (`defaults`), and {path.parent / parent} cannot be read: {problem}."
            raise ConfigError(message, "Keep recipes in the folders that they have in NeMo-RL, or copy this file, too.")
        merged = _merge(merged, _with_defaults(path.parent / parent, (*chain, place), files))
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
            raise ConfigError(f"${{{name}:...}} of {arguments}: {error}") from error
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
    "oc.env": lambda a: _variable(*a),
    "oc.decode": lambda a: _decoded(*a),
}
"""Resolvers of NeMo-RL, which registers the arithmetic ones, and of OmegaConf."""
SELECT = "oc.select"
"""The resolver that looks a key up, with a value for where there is none."""


def _variable(name: Any, *otherwise: Any) -> Any:
    if len(otherwise) > 1:
        raise ConfigError(f"${{oc.env:...}} takes a name and a default, and has {len(otherwise) + 1} arguments.")
    if str(name) not in os.environ and not otherwise:
        raise ConfigError(f"the environment variable {name} is not set.")
    return os.environ.get(str(name), *otherwise)


def _decoded(text: Any, *more: Any) -> Any:
    """Return the value that a text spells, such as the number of an environment variable, whose default may already
    be a value."""
    if more or isinstance(text, list | Mapping):
        raise ConfigError(f"${{oc.decode:...}} takes one text, and has {', '.join(map(str, (text, *more)))}.")
    return parse_value(text) if isinstance(text, str) else text


class Absent(ConfigError):
    """A reference leads to a key that the recipe does not have."""


class TooMuch(ConfigError):
    """A recipe asks for more than any recipe has."""


class _Root(dict[str, Any]):
    """The top level of a recipe, in which references are looked up."""

    followed = 0
    """Number of references that were followed so far: each may lead to several others."""


def _resolved(value: Any, root: _Root, at: tuple[str, ...], depth: int = 0) -> Any:
    if depth > 50:
        raise ConfigError("it refers back to itself.")
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
            raise TooMuch(f"`{'.'.join(at)}`: its references stand for more than {TEXT_LIMIT:,} characters.")
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
    raise ConfigError("a `${` is never closed.")


def _evaluate(inner: str, root: _Root, at: tuple[str, ...], depth: int) -> Any:
    """Return the value of a reference, or of a resolver with its arguments, that stands between `${` and `}`."""
    root.followed += 1
    if root.followed > VALUE_LIMIT:
        raise TooMuch(f"`{'.'.join(at)}`: the references of the recipe lead to more than {VALUE_LIMIT:,} others.")
    match = re.match(r"([A-Za-z_][\w.]*):(.*)", inner, re.DOTALL)
    if match is None:
        return _lookup(inner.strip(), root, at, depth)
    name, arguments = match.group(1), [part.strip() for part in _split(match.group(2))]
    values = [_resolved(parse_value(a) if "${" not in a else a, root, at, depth) for a in arguments]
    if name == SELECT:
        return _selected(values, root, at, depth)
    if name not in RESOLVERS:
        raise ConfigError(f"unknown resolver `{name}`; rlctl knows {', '.join((*RESOLVERS, SELECT))}.")
    return RESOLVERS[name](values)


def _selected(arguments: list[Any], root: _Root, at: tuple[str, ...], depth: int) -> Any:
    """Return the value of the key that the first argument names, and the second where there is no such key."""
    if len(arguments) not in (1, 2):
        raise ConfigError(f"${{{SELECT}:...}} takes a key and a default, and has {len(arguments)} arguments.")
    try:
        return _lookup(str(arguments[0]), root, at, depth)
    except Absent:
        return arguments[1] if len(arguments) == 2 else None


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
    """Look up `a.b.c` (or `a[b].c`) from the top, or `.c` / `..c` from where the reference stands."""
    path = path.replace("[", ".").replace("]", "")
    dots = len(path) - len(path.lstrip("."))
    base = list(at[: len(at) - dots]) if dots else []
    keys = [*base, *(part for part in path.lstrip(".").split(".") if part)]
    value: Any = root
    if depth > 50:
        raise ConfigError("it refers back to itself.")
    for index, key in enumerate(keys):
        if isinstance(value, str) and (other := re.fullmatch(r"\$\{([\w.\[\]]+)\}", value)):
            # The way leads through another reference; what is behind it may refer back to here.
            rest = ".".join(keys[index:])
            return _lookup(f"{other.group(1)}.{rest}", root, tuple(keys[:index]), depth + 1)
        if isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, Mapping) and key in value:
            value = value[key]
        else:
            raise Absent(f"it refers to `{path}`, which the recipe does not have.")
    return _resolved(value, root, tuple(keys), depth)
