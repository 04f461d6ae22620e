"""Resolves the configuration: merges its sources in order and remembers where every value came from.

Later sources win: defaults < preset < --config files < environment (RLCTL_SECTION__KEY) < flags < --set. Values
that the planner decides are put in afterwards with `Resolved.with_values`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlctl.config.keys import field, holds_keys, is_section, known_keys, nearest, takes_text
from rlctl.config.nemo_rl import import_recipe
from rlctl.config.nemo_rl_file import is_nemo_rl
from rlctl.config.nemo_rl_import import Import
from rlctl.config.passthrough import canonical, checked, target_of
from rlctl.config.presets import preset_chain
from rlctl.config.schema import RlctlConfig
from rlctl.config.yaml_values import parse_value, read_mapping
from rlctl.errors import ConfigError

DEFAULT = "default"
PLANNER = "planner"
PRESET = "preset "
ENVIRONMENT_PREFIX = "RLCTL_"
OF_A_PRESET = {"extends", "description"}
"""Keys of a preset file that are no configuration; a --config file may have them too."""

# A preset's values for these keys describe the data or the model that it names: another one does not inherit them.
BELONGS_TO = {
    "data.name": (
        "data.params",
        "data.split",
        "data.prompt_field",
        "data.answer_field",
        "data.prompt_suffix",
        "data.size",
    ),
    "model.name": ("model.revision", "model.tokenizer", "model.chat_template"),
}

# pydantic's own words for these speak of inputs and arguments.
REASONS = {"extra_forbidden": "there is no such key", "missing": "this key is missing"}


@dataclass(frozen=True)
class Flag:
    """A value given by a flag of the command line, with the flag as the user typed it."""

    name: str
    value: Any


@dataclass(frozen=True)
class Value:
    """One leaf of a source: `origin` says where it came from, in the words of the user."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Resolved:
    """A valid configuration and the origin of every key, for example `preset laptop` or `flag --steps`."""

    config: RlctlConfig
    origin: dict[str, str]
    unsupported: tuple[str, ...] = ()
    """What an imported recipe asks for and rlctl cannot run yet, a line each."""
    changed: tuple[str, ...] = ()
    """What of an imported recipe runs, but not exactly as written, a line each."""

    def with_values(self, values: Mapping[str, Any], origin: str = PLANNER) -> Resolved:
        """The same configuration with `values` (by dotted key) put in and marked as coming from `origin`."""
        leaves = {key: Value(key, leaf, self.origin[key]) for key, leaf in self.leaves() if self.origin[key] != DEFAULT}
        built = build(leaves | {key: Value(key, value, origin) for key, value in values.items()})
        return replace(built, unsupported=self.unsupported, changed=self.changed)

    def require_supported(self) -> None:
        """Raises ConfigError where an imported recipe asks for what rlctl cannot run yet."""
        if self.unsupported:
            raise ConfigError(
                "The recipe cannot be run yet:\n" + "\n".join(self.unsupported),
                "`rlctl config import FILE` writes what can be run as rlctl's own YAML.",
            )

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Every key with its value, in the schema's order; the keys of open mappings one by one."""
        yield from ((leaf.key, leaf.value) for leaf in flatten(self.config.model_dump(mode="json"), DEFAULT))

    def to_json(self) -> dict[str, Any]:
        """The configuration as plain data with the origin beside each value, for the manifest."""
        return {key: {"value": value, "origin": self.origin[key]} for key, value in self.leaves()}


def resolve(
    preset: str | None = None,
    files: Sequence[str | Path] = (),
    flags: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Resolved:
    """Merge all sources and validate the result.

    `flags` maps dotted keys to values or `Flag`s, `sets` holds `section.key=value` texts, `environment` is by default
    the process's own. Raises ConfigError: each wrong key or value, where it came from, and the nearest known key.
    """
    merged: dict[str, Value] = {}
    if preset is not None:
        for part in preset_chain(preset):
            merge(merged, flatten(part.values, PRESET + part.name))
    imports: list[Import] = []
    for path in files:
        values = read_mapping(Path(path), "--config")
        if is_nemo_rl(values):
            imports.append(import_recipe(Path(path)))
            merge(merged, imported_values(imports[-1]))
        elif values.keys() & OF_A_PRESET:
            *below, own = preset_chain(str(path))
            for part in below:
                merge(merged, flatten(part.values, PRESET + part.name))
            merge(merged, flatten(own.values, f"file {path}"))
        else:
            merge(merged, flatten(values, f"file {path}"))
    merge(merged, environment_values(os.environ if environment is None else environment))
    merge(merged, flag_values(flags or {}))
    for text in sets:
        merge(merged, set_values(text))
    unsupported = tuple(line for recipe in imports for line in recipe.unsupported)
    return replace(build(merged), unsupported=unsupported, changed=tuple(line for r in imports for line in r.changed))


def imported_values(recipe: Import) -> Iterator[Value]:
    """The values of a NeMo-RL recipe, each with the recipe's own key as its origin."""
    for key, value in recipe.values.items():
        yield Value(key, value, f"file {recipe.path}, {recipe.source[key]}")


def flatten(values: Mapping[Any, Any], origin: str, prefix: str = "") -> Iterator[Value]:
    """The leaves of nested sections. A section without keys has none."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if holds_keys(key) and value is None:
            continue
        # Unknown sections are walked too, so that the error names the whole key.
        if isinstance(value, Mapping) and (holds_keys(key) or field(key) is None):
            yield from flatten(value, origin, f"{key}.")
        else:
            yield Value(key, value, origin)


def environment_values(environment: Mapping[str, str]) -> Iterator[Value]:
    """`RLCTL_GRPO__STEPS=5` sets grpo.steps. Names without a double underscore are not configuration."""
    for name, text in sorted(environment.items()):
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            yield from text_values(key, text, f"environment {name}")


def flag_values(flags: Mapping[str, Any]) -> Iterator[Value]:
    for key, value in flags.items():
        flag = value if isinstance(value, Flag) else Flag(key, value)
        yield Value(key, flag.value, f"flag {flag.name}")


def set_values(text: str) -> Iterator[Value]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: there is no value.", "Write --set section.key=value.")
    return text_values(key.strip(), value, "--set")


def text_values(key: str, text: str, origin: str) -> Iterator[Value]:
    """The value that a text of the command line or the environment spells, typed by the key where that is a text."""
    value = parse_value(text)
    if takes_text(key) and value is not None and not isinstance(value, str):
        value = text
    if isinstance(value, Mapping) and holds_keys(key):
        yield from flatten(value, origin, f"{key}.")
    else:
        yield Value(key, value, origin)


def merge(merged: dict[str, Value], source: Iterable[Value]) -> None:
    """Put a source's leaves over those merged so far."""
    leaves = [canonical_leaf(leaf) for leaf in source]
    for leaf in leaves:
        drop_what_belongs_to_another(merged, leaf)
        drop_other_kind_of_machine(merged, leaf)
    for leaf in leaves:
        merged[leaf.key] = leaf


def canonical_leaf(leaf: Value) -> Value:
    """The leaf under rlctl's own key, where it was given under the engine's name for it."""
    key, value = canonical(leaf.key, leaf.value)
    return leaf if key == leaf.key else Value(key, value, f"{leaf.origin}, as {leaf.key}")


def drop_what_belongs_to_another(merged: dict[str, Value], leaf: Value) -> None:
    before = merged.get(leaf.key)
    if leaf.key not in BELONGS_TO or before is None or before.value == leaf.value:
        return
    for key in list(merged):
        owned = any(key == name or key.startswith(f"{name}.") for name in BELONGS_TO[leaf.key])
        if owned and merged[key].origin.startswith(PRESET):
            del merged[key]


def drop_other_kind_of_machine(merged: dict[str, Value], leaf: Value) -> None:
    """GPUs and `cpu` exclude each other: what a later source says of one ends what an earlier one said of the other."""
    other = {"cluster.gpu": "cluster.gpus_per_node", "cluster.gpus_per_node": "cluster.gpu"}.get(leaf.key)
    if other is None or other not in merged:
        return
    now = {leaf.key: leaf.value, other: merged[other].value}
    if now["cluster.gpu"] != "auto" and (now["cluster.gpu"] == "cpu") != (now["cluster.gpus_per_node"] == 0):
        del merged[other]


def build(merged: Mapping[str, Value]) -> Resolved:
    """Validate the merged leaves, first keys and then values. Raises ConfigError with a line for each problem."""
    problems = [unknown_key(leaf) for leaf in merged.values() if field(leaf.key) is None]
    problems += [not_a_value(leaf) for leaf in merged.values() if is_section(leaf.key)]
    merged, refused = pass_through(merged)
    problems += refused
    if problems:
        raise ConfigError("\n".join(problems), "`rlctl config schema` lists every key.")
    try:
        config = RlctlConfig.model_validate(nest(merged))
    except ValidationError as error:
        lines = [explain(problem, merged) for problem in error.errors()]
        raise ConfigError("\n".join(lines), "`rlctl config schema` says what each key takes.") from error
    return Resolved(config, origins(config, merged))


def pass_through(merged: Mapping[str, Value]) -> tuple[dict[str, Value], list[str]]:
    """The leaves with those for Megatron-Core and vLLM as their fields take them, and a line for each they do not."""
    taken, problems = dict(merged), []
    for key, leaf in merged.items():
        if target_of(key) is None:
            continue
        section, name, *deeper = key.split(".")
        value, why = checked(key, leaf.value)
        if deeper and not isinstance(merged.get(f"{section}.{name}", Value("", {}, "")).value, Mapping):
            why = f"`{section}.{name}` is set to a value, which has no keys."
        taken[key] = replace(leaf, value=value)
        problems += [f"`{key}` = {leaf.value!r} ({leaf.origin}): {why}"] if why else []
    return taken, problems


def nest(merged: Mapping[str, Value]) -> dict[str, Any]:
    """Leaves by dotted key as nested sections."""
    nested: dict[str, Any] = {}
    for key, leaf in sorted(merged.items(), key=lambda item: item[0].count(".")):
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = dict(leaf.value) if isinstance(leaf.value, Mapping) else leaf.value
    return nested


def origins(config: RlctlConfig, merged: Mapping[str, Value]) -> dict[str, str]:
    origin = dict.fromkeys(known_keys(), DEFAULT)
    origin |= {leaf.key: DEFAULT for leaf in flatten(config.model_dump(), DEFAULT)}
    for key, leaf in merged.items():
        # A key inside a mapping that is passed through counts for the mapping, which is one value to the engine.
        whole = ".".join(key.split(".")[:2]) if target_of(key) else key
        origin[whole] = leaf.origin
    return origin


def unknown_key(leaf: Value) -> str:
    meant = nearest(leaf.key)
    suggestion = f"; did you mean `{meant}`?" if meant else "."
    return f"unknown key `{leaf.key}` ({leaf.origin}){suggestion}"


def not_a_value(leaf: Value) -> str:
    return f"`{leaf.key}` ({leaf.origin}) is a section of keys and cannot be set to {leaf.value!r}."


def explain(problem: Any, merged: Mapping[str, Value]) -> str:
    """One line for one problem that pydantic found: key, value, origin, and what would fit."""
    path = ".".join(str(part) for part in problem["loc"])
    reason = REASONS.get(problem["type"]) or problem["msg"].removeprefix("Value error, ").removesuffix(".")
    reason = reason.replace("Input should be", "it should be").replace("tuple", "list")
    leaf = next((merged[key] for key in prefixes(path) if key in merged), None)
    if leaf is None:
        return f"{reason}." if problem["type"] == "value_error" else f"`{path}`: {reason}."
    inner = path.removeprefix(leaf.key).lstrip(".")
    within = f" at `{inner}`" if inner else ""
    return f"`{leaf.key}` = {problem['input']!r}{within} ({leaf.origin}): {reason}."


def prefixes(path: str) -> Iterator[str]:
    """`a.b.c`, `a.b`, `a`: a problem inside a value belongs to the key that holds the value."""
    parts = path.split(".")
    return (".".join(parts[:count]) for count in range(len(parts), 0, -1))


def plain(value: Any) -> Any:
    """A default of the schema as plain data (sections and tuples as mappings and lists)."""
    return TypeAdapter(Any).dump_python(value, mode="json")
