"""Resolve the configuration with the origin of each value.

Later sources win: defaults < method < preset < --config files < environment (RLCTL_SECTION__KEY) < flags < overrides of
a recipe < --set < KEY=VALUE alone. `Resolved.with_values` adds the planner's values below the user's.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from rlctl.config.facts import UNDECIDED, Decided
from rlctl.config.passthrough import target_of
from rlctl.config.recipes import Registry
from rlctl.config.schema import Schema, nest
from rlctl.config.section import Section
from rlctl.config.sources import (
    Refusal,
    Source,
    Value,
    flatten,
    settings_class,
    sources_in_order,
)
from rlctl.errors import ConfigError, lines_of

SAYS_WHAT = "`rlctl config schema` says what each key takes."
DEFAULT = "default"
PLANNER = "planner"

# pydantic's own words for these speak of inputs and arguments.
REASONS = {
    "extra_forbidden": "there is no such key",
    "missing": "this key is missing",
    "model_type": "it should be keys with values",
}


class Plan(Protocol):
    """A plan, as a configuration sees it."""

    def config_values(self) -> Mapping[str, Any]:
        """Return the keys that the plan decides, with their values."""
        ...


@dataclass(frozen=True)
class Resolved:
    """A valid configuration and the origin of every key, for example `preset laptop` or `flag --steps`."""

    config: Any
    """An instance of the method's configuration class."""
    origin: dict[str, str]
    optional: frozenset[str] = frozenset()
    """Keys accepted even if the model or machine lacks their feature."""
    notes: tuple[str, ...] = ()
    """Lines on what runs differently from how a source has it."""
    refusals: tuple[str, ...] = ()
    """Lines on unsupported settings of the sources."""
    final: tuple[str, ...] = ()
    """The `refusals` that `--allow-differences` cannot remove: other kinds of recipe."""
    schema: Schema = field(default_factory=lambda: Schema(()), repr=False, compare=False)
    """The keys of all methods that the configuration was resolved among."""

    def with_values(self, values: Mapping[str, Any], origin: str = PLANNER) -> Resolved:
        """Return the configuration with `values` (by dotted key) from `origin` for unset keys."""
        return self.deciding(Value(key, value, origin) for key, value in values.items())

    def deciding(self, values: Iterable[Value], without: Collection[str] = ()) -> Resolved:
        """Return the configuration with keys of `without` unset, and then `values` for unset keys.

        The sources are not merged again: only sections with another value, and the rules across sections, are validated
        again. Keys that the method lacks are left out. Raises ConfigError.
        """
        schema = Schema((type(self.config),))
        given = {value.key: value for value in self.given() if value.key not in without}
        decided = {value.key: value for value in values if schema.field(value.key) is not None}
        kept = {
            key: value
            for key, value in given.items()
            if key not in decided or (value.value not in UNDECIDED and value.origin != decided[key].origin)
        }
        now = decided | kept
        touched = {key.partition(".")[0] for key in (*(decided.keys() - kept.keys()), *without)}
        nested = nest({key: value.value for key, value in now.items() if key.partition(".")[0] in touched})
        sections = {
            name: nested.get(name, {}) if name in touched else getattr(self.config, name) for name in schema.sections
        }
        try:
            config = type(self.config).model_validate(sections)
        except ValidationError as error:
            raise _refused(error, now, schema) from error
        optional = frozenset(whole(key) for key, value in now.items() if value.optional)
        return replace(self, config=config, origin=origins(config, now), optional=optional)

    def with_plan(self, plan: Plan, without: Collection[str] = ()) -> Resolved:
        """Return the configuration with the plan's values, and those that plug-ins take from the plan, for unset
        keys; keys of `without` are unset."""
        marked = {key: mark.value(plan) for key, mark in Schema((type(self.config),)).with_mark(Decided).items()}
        decided = {key: value for key, value in marked.items() if value is not None}
        values = {**plan.config_values(), **decided}
        return self.deciding((Value(key, value, PLANNER) for key, value in values.items()), without)

    def replacing(self, values: Mapping[str, Any], origin: str, without: Collection[str] = ()) -> Resolved:
        """Return the configuration with `values` (by dotted key) in any case, and keys of `without` unset."""
        kept = [value for value in self.given() if value.key not in values and value.key not in without]
        refusals = [Refusal(line, final=line in self.final) for line in self.refusals]
        new = Source((Value(key, value, origin) for key, value in values.items()), shared=True)
        weaker = Source(kept, self.notes, refusals, shared=True)
        return from_sources([weaker, new], type(self.config), schema=self.schema)

    def require_supported(self) -> None:
        """Raise ConfigError if a source uses a feature that rlctl cannot run yet."""
        if self.final:
            raise ConfigError(
                "\n".join(self.final), "Name a recipe of GRPO, distillation, SFT or DPO, or set rlctl's own keys."
            )
        if self.refusals:
            raise ConfigError(
                "The configuration asks for what rlctl cannot run yet:\n" + "\n".join(self.refusals),
                "`train --allow-differences` continues without it; `rlctl config import FILE` reports every key.",
            )

    def allowing_differences(self) -> Resolved:
        """Return the configuration without values that rlctl cannot run yet; notes name them."""
        left_out = [line for line in self.refusals if line not in self.final]
        return replace(self, refusals=self.final, notes=(*self.notes, *(f"left out: {line}" for line in left_out)))

    def given(self) -> list[Value]:
        return [
            Value(key, value, self.origin[key], key in self.optional)
            for key, value in self.leaves()
            if self.origin[key] != DEFAULT
        ]

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield every key with its value, in the schema's order; the keys of open mappings one by one."""
        leaves = flatten(self.config.model_dump(mode="json"), DEFAULT, Schema((type(self.config),)))
        yield from ((leaf.key, leaf.value) for leaf in leaves)

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as plain data with the origin of each value, for the manifest."""
        return {
            key: {"value": value, "origin": self.origin[key]} | ({"optional": True} if key in self.optional else {})
            for key, value in self.leaves()
        }


def resolve(
    config: type[Section],
    *,
    preset: str | None = None,
    files: Sequence[str | Path] = (),
    flags: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Resolved:
    """Merge and validate all sources for one configuration class.

    `methods.configuration.resolve` chooses the class by the sources, and knows the keys of other methods.
    """
    registry = Registry.of(config)
    sources = gathered(preset, files, flags, sets, environment, registry=registry)
    return from_sources(sources, config, schema=registry.schema)


def gathered(
    preset: str | None,
    files: Sequence[str | Path],
    flags: Mapping[str, Any] | None,
    sets: Sequence[str],
    environment: Mapping[str, str] | None,
    overrides: Sequence[str] = (),
    stored: Callable[[Any], Sequence[Value]] | None = None,
    *,
    registry: Registry,
) -> list[Source]:
    """Return all sources, weakest first.

    `flags` maps dotted keys to values or `Flag`s; `sets` are `section.key=value` texts; `environment` defaults to the
    process's; `overrides` are like `sets`, also with another trainer's keys. `stored` returns a resumed run's user
    values for `run.dir`, weaker than all but the method's. Raises ConfigError for an unreadable file or preset.
    """
    environment = os.environ if environment is None else environment
    sources = sources_in_order(preset, files, environment, flags or {}, sets, overrides, registry=registry)
    if stored is not None:
        places = [value.value for source in sources for value in source.values if value.key == "run.dir"]
        sources.insert(0, Source(stored(places[-1] if places else None), shared=True))
    return sources


def stored_values(config: Mapping[str, Any]) -> list[Value]:
    """Return the values of a configuration that `Resolved.to_json` has stored, without the defaults."""
    return [
        Value(key, entry["value"], entry["origin"], entry.get("optional", False))
        for key, entry in config.items()
        if entry["origin"] != DEFAULT
    ]


def from_sources(
    sources: Sequence[Source],
    config: type[Section],
    *,
    schema: Schema,
    command: str = "this command",
    hint: str = "`rlctl config schema` lists every key.",
    having: Callable[[str], str] = lambda _: "",
) -> Resolved:
    """Merge `sources`, weakest first, and validate them as `config`.

    `schema` has the keys of all methods; `command`, `hint` and `having` (what has a key) are for errors. Raises
    ConfigError with a line per problem, keys first: wrong keys and values, their origin and the nearest key.
    """
    for source in sources:
        source.bind(schema, config)
    problems = [line for source in sources for line in source.problems]
    foreign = [line for source in sources for line in source.foreign(command, having)]
    if problems := problems + foreign + mixed_values(sources):
        raise ConfigError(lines_of(problems), hint)
    try:
        settings = settings_class(config)(reversed(sources))
    except ValidationError as error:
        raise _refused(error, merged(sources), Schema((config,))) from error
    values = merged(sources)
    if wrong := [line for value in values.values() if (line := unknown_name(value, schema))]:
        raise ConfigError(lines_of(wrong), SAYS_WHAT)
    refusals = [refusal for source in sources for refusal in source.standing()]
    resolved = config.model_construct(**{name: getattr(settings, name) for name in config.model_fields})
    return Resolved(
        resolved,
        origins(resolved, values),
        frozenset(whole(key) for key, value in values.items() if value.optional),
        tuple(line for source in sources for line in source.notes),
        tuple(refusal.line for refusal in refusals),
        tuple(refusal.line for refusal in refusals if refusal.final),
        schema,
    )


def unknown_name(value: Value, schema: Schema) -> str:
    """Return a line for a name that nothing brings, in the form of `explain`; empty: the value is right."""
    choices = schema.choices(value.key)
    if not choices or value.value in choices:
        return ""
    *several, last = map(repr, choices)
    return f"`{value.key}` = {value.value!r} ({value.origin}): it should be {', '.join(several)} or {last}."


def _refused(error: ValidationError, values: Mapping[str, Value], schema: Schema) -> ConfigError:
    lines = [explain(problem, values, schema) for problem in error.errors()]
    return ConfigError(lines_of(lines), SAYS_WHAT)


def merged(sources: Sequence[Source]) -> dict[str, Value]:
    return {value.key: value for source in sources for value in source.kept}


def mixed_values(sources: Sequence[Source]) -> list[str]:
    """Report passed-through fields with a plain value in one source and subkeys in another."""
    values = {value.key: value for source in sources for value in source.values}
    return [
        f"`{key}` = {value.value!r} ({value.origin}): `{whole(key)}` is set to a value, which has no keys."
        for key, value in values.items()
        if whole(key) != key and whole(key) in values and not isinstance(values[whole(key)].value, Mapping)
    ]


def origins(config: Section, values: Mapping[str, Value]) -> dict[str, str]:
    schema = Schema((type(config),))
    origin = dict.fromkeys(schema.keys, DEFAULT)
    origin |= {leaf.key: DEFAULT for leaf in flatten(config.model_dump(), DEFAULT, schema)}
    return origin | {whole(key): value.origin for key, value in values.items()}


def whole(key: str) -> str:
    """Return the key of the field that `key` is inside of: a mapping that an engine takes counts as one value."""
    return ".".join(key.split(".")[:2]) if target_of(key) else key


def explain(problem: Any, values: Mapping[str, Value], schema: Schema) -> str:
    """Return one line for a problem that pydantic found: key, value, origin, and what would fit."""
    path = ".".join(str(part) for part in problem["loc"])
    reason = REASONS.get(problem["type"]) or problem["msg"].removeprefix("Value error, ").removesuffix(".")
    reason = reason.replace("Input should be", "it should be").replace("tuple", "list").replace("Tuple", "the list")
    # A problem inside a value belongs to the key that holds the value: `a.b.c` to `a.b` or `a`.
    holders = [value for key, value in values.items() if f"{path}.".startswith(f"{key}.")]
    leaf = max(holders, key=lambda value: len(value.key), default=None)
    if leaf is None:
        return f"{reason}." if problem["type"] == "value_error" else f"`{path}`: {reason}."
    inner = problem["loc"][leaf.key.count(".") + 1 :]
    place = leaf.key + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner)
    end = _end_of(problem["type"], place, schema.listed_section(leaf.key), len(inner))
    return f"`{place}` = {problem['input']!r} ({leaf.origin}): {reason}{end}"


def _end_of(kind: str, place: str, section: type[Section] | None, depth: int) -> str:
    """Return what follows a problem's reason. `section`: the class of the entries of the list that `place` is or, at
    the `depth` 1 or 2, that it is inside of."""
    if section is None:
        return "."
    outer, _, name = place.rpartition(".")
    if (kind, depth) == ("extra_forbidden", 2):
        alike = difflib.get_close_matches(name, section.model_fields, n=1)
        return f"; did you mean `{outer}.{alike[0]}`?" if alike else "."
    entry = f"{{{next(iter(section.model_fields))}: ...}}"
    return {("tuple_type", 0): f", such as [{entry}].", ("model_type", 1): f", such as {entry}."}.get(
        (kind, depth), "."
    )
