"""Sources of the configuration. Each yields values by dotted key with their origin. A source reports all wrong keys
before merging. pydantic-settings calls the sources of `Settings`, strongest first, then merges and validates."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from rlctl.config.facts import FOR_A_MACHINE
from rlctl.config.other_trainers import reason_against
from rlctl.config.passthrough import canonical, checked, target_of
from rlctl.config.presets import Preset, preset_chain
from rlctl.config.recipes import PRESET_KEYS, Import, Registry, claimed, override_key, read_file
from rlctl.config.schema import Schema, nest
from rlctl.config.section import Section
from rlctl.config.yaml_values import parse_value
from rlctl.errors import MOST_LINES, ConfigError

ALGORITHM = "algorithm "
"""Beginning of the origin of a value that the algorithm sets."""
PREFIX = "RLCTL_"
OWN_VARIABLES = (
    "RLCTL_ADDRESS", "RLCTL_BIND_NUMA", "RLCTL_CACHE_DIR", "RLCTL_DEBUG", "RLCTL_MACHINE_PROFILE",
    "RLCTL_EXACT", "RLCTL_MEGATRON_CHECKPOINT_DIR", "RLCTL_NODE", "RLCTL_PLAIN_PARAMETERS", "RLCTL_PROBE_DIRECTORY",
)  # fmt: skip
"""Environment variables of rlctl that are no configuration keys."""

DATA_KEYS = (
    "data.params", "data.split", "data.prompt_field", "data.answer_field", "data.prompt_template", "data.prompt_suffix",
    "data.difficulty_field", "data.size", "reward.extract",
)  # fmt: skip
BELONGS_TO = {
    "data.name": DATA_KEYS,
    "model.name": ("model.revision", "model.tokenizer", "model.chat_template"),
    "environment.name": (
        "environment.params", "environment.turns", "environment.sampled_tokens", "environment.tool_calls",
        "environment.broken_calls", "environment.tool_s",
    ),
}  # fmt: skip
"""Keys of a preset that describe the data, model or environment that it names: another one does not inherit them."""

OWN_SCORER = [{"name": "task"}]
"""A preset's `reward.terms` that are the scorer of its data."""

ENVIRONMENT = "environment.name"
TASK_KEYS = (
    "data.name", "data.sources", "data.system_prompt", "data.order", *DATA_KEYS, "reward.terms", "validation.data",
    "validation.reward",
)  # fmt: skip
"""Preset keys of a prompt and reward task, which an environment replaces."""

VALIDATES = ("validation.every", "validation.at_start", "validation.at_end", "validation.answers")
ROWS_OF_VALIDATION = ("validation.holdout", "validation.data.name")
"""Keys that enable validation, and keys that name its rows; tasks generate other rows."""
MADE = ("reasoning-gym:", "drawn-shapes")
"""Beginnings of the names of such tasks."""

OTHER_WAY = {"data.name": "data.sources", "data.sources": "data.name"}
"""Alternative keys for one setting; the stronger source's key replaces the other."""


@dataclass(frozen=True)
class GivenFlag:
    """A value given by a flag of the command line, with the flag as the user typed it, or by the command itself."""

    name: str
    value: Any


@dataclass(frozen=True)
class Refusal:
    """An unsupported setting of a source."""

    line: str
    settled_by: str | None = None
    """The key that settles it where a stronger source sets it."""
    final: bool = False
    """Nothing can go on without it: the recipe is of another kind than rlctl runs."""


@dataclass(frozen=True)
class Value:
    """One leaf of a source."""

    key: str
    value: Any
    origin: str
    """Where the value came from, in the user's words."""
    optional: bool = False
    """Accept the value even if the model lacks its feature."""


class FromSources(BaseSettings):
    """A configuration as pydantic-settings resolves it from `sources`, the strongest first."""

    def __init__(self, sources: Iterable[Source]) -> None:
        BaseSettings.__init__(self, sources=tuple(sources))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        **_: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources given to `__init__` instead of the library's own, which pass over unknown names."""
        return init_settings()["sources"]


@functools.cache
def settings_class(config: type[Section]) -> type[Any]:
    """Return the class that resolves a configuration class from sources."""
    return type(f"{config.__name__}FromSources", (FromSources, config), {"__module__": __name__})


class Source(PydanticBaseSettingsSource):
    """A source of rlctl keys; `problems` has one line per error."""

    def __init__(
        self,
        values: Iterable[Value],
        notes: Sequence[str] = (),
        refusals: Sequence[Refusal] = (),
        problems: Sequence[str] = (),
        *,
        typed: bool = False,
        shared: bool = False,
    ) -> None:
        super().__init__(FromSources)
        self.typed = typed
        """Whether the user has typed the values for this command: two that contradict each other are an error."""
        self.shared = shared
        """Whether the source serves several methods: a key that the chosen one lacks is left out, and no error."""
        self.schema = Schema(())
        """The keys of all methods, once the source is bound."""
        self.method_schema = Schema(())
        """The keys of the chosen method, once the source is bound."""
        self.notes = tuple(notes)
        """Lines on what runs differently from how the source has it."""
        self.refusals = tuple(refusals)
        """Lines on unsupported settings of the source."""
        self.problems = list(problems)
        self.unknown: dict[str, str] = {}
        """A line for each key that no method has."""
        self.values = [_by_own_name(value) for value in values]
        self.kept: list[Value] = []
        """The values that no stronger source has made meaningless, once the source has been called."""

    def __call__(self) -> dict[str, Any]:
        """Return the kept values as nested sections."""
        self.kept = [value for value in self.values if self.exists(value) and not self.superseded(value)]
        return nest({value.key: value.value for value in self.kept})

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return one section; the library requires this method and calls the source as a whole."""
        return self().get(field_name), field_name, False

    def exists(self, value: Value) -> bool:
        return self.method_schema.field(value.key) is not None

    def bind(self, schema: Schema, config: type[Section]) -> None:
        """Check the keys against the schema of all methods; `config` is the chosen method's class."""
        self.schema, self.method_schema = schema, Schema((config,))
        self.values = [self._checked(value) for value in self.values]

    def foreign(self, command: str, having: Callable[[str], str] = lambda _: "") -> list[str]:
        """Return a line per unknown or inapplicable key that the user gave for this run. `having`: what has a key."""
        if self.shared:
            return [*self.unknown.values()]
        lines = []
        for value in self.values:
            section, reason = value.key.partition(".")[0], self.method_schema.why_unknown(value.key, command)
            other_method = section in self.schema.sections and section not in self.method_schema.sections
            if value.key in self.unknown and not other_method:
                lines.append(self.unknown[value.key])
            elif reason:
                lines.append(f"`{value.key}` ({value.origin}): {reason}{having(value.key)}.")
        return lines

    def standing(self) -> list[Refusal]:
        """Return the refusals that no stronger source settles, once the source has been called."""

        def settled(key: str) -> bool:
            return bool(self.stronger(key)) or (key in OTHER_WAY and any(self.stronger(OTHER_WAY[key])))

        return [refusal for refusal in self.refusals if refusal.settled_by is None or not settled(refusal.settled_by)]

    def superseded(self, value: Value) -> bool:
        """Return whether a stronger source replaces this form of data (name or list), or the kind of machine (GPUs or
        `gpu: cpu`)."""
        if value.key in OTHER_WAY:
            return any(self.stronger(OTHER_WAY[value.key]))
        other = {"cluster.gpu": "cluster.gpus_per_node", "cluster.gpus_per_node": "cluster.gpu"}.get(value.key)
        if self.typed or other is None or not (stronger := self.stronger(other)):
            return False
        now = {value.key: value.value, other: stronger[0]}
        return now["cluster.gpu"] != "auto" and (now["cluster.gpu"] == "cpu") != (now["cluster.gpus_per_node"] == 0)

    def stronger(self, key: str) -> tuple[Any, ...]:
        """Return the value that stronger sources give to `section.key`, or an empty tuple."""
        section, _, name = key.partition(".")
        values = self.current_state.get(section, {})
        return (values[name],) if name in values else ()

    def _checked(self, value: Value) -> Value:
        schema = self.schema
        if schema.field(value.key) is None:
            # A search for similar keys takes milliseconds; no more lines than these are shown.
            meant = schema.nearest(value.key) if len(self.unknown) < MOST_LINES else None
            hint = f"; did you mean `{meant}`?" if meant else "."
            hint = f": {reason}." if (reason := reason_against(value.key)) else hint
            self.unknown[value.key] = f"unknown key `{value.key}` ({value.origin}){hint}"
        elif schema.is_section(value.key):
            self.problems.append(
                f"`{value.key}` ({value.origin}) is a section of keys and cannot be set to {value.value!r}."
            )
        elif schema.names_variable(value.key) and "=" in value.key:
            self.problems.append(f"`{value.key}` ({value.origin}): no environment variable can have this name.")
        elif isinstance(value.value, bool) and schema.takes_number(value.key):
            self.problems.append(f"`{value.key}` = {value.value!r} ({value.origin}): it should be a number.")
        elif target_of(value.key) is not None:
            taken, reason = checked(value.key, value.value)
            if reason:
                self.problems.append(f"`{value.key}` = {value.value!r} ({value.origin}): {reason}")
            return replace(value, value=taken)
        return value


def _by_own_name(value: Value) -> Value:
    """Return the value under rlctl's key if another program's name maps to one."""
    key, taken = canonical(value.key, value.value)
    return value if key == value.key else Value(key, taken, f"{value.origin}, as {value.key}", value.optional)


def method_source(method: str, defaults: Mapping[str, Any]) -> Source:
    """The values of a training method or an RL algorithm that replace defaults."""
    return Source(Value(key, value, f"{ALGORITHM}{method}") for key, value in defaults.items())


class PresetSource(Source):
    """The values of one preset file. `named` holds the data, model and environment that weaker sources name."""

    def __init__(self, preset: Preset, names: Mapping[str, Any], schema: Schema) -> None:
        super().__init__(flatten(preset.values, f"preset {preset.name}", schema), shared=True)
        self._own_file = preset.name if preset.name.endswith((".yaml", ".yml")) else None
        self.named = named_after(names, self.values)

    def __call__(self) -> dict[str, Any]:
        """Return kept values, with a note on user preset values that an environment replaces."""
        nested = super().__call__()
        dropped = [value.key for value in self.values if self._other_task(value)]
        if self._own_file and dropped:
            environments = self.stronger(ENVIRONMENT)[0]
            self.notes = (f"note: environment {environments} replaces {', '.join(dropped)} of preset {self._own_file}",)
        if any(map(self._without_rows, self.values)):
            reason = "the preset validates, and this data has no rows for it"
            give = "--set validation.holdout=N holds rows out, and --val-data names others"
            self.notes = (*self.notes, f"note: no validation: {reason}; {give}")
        return nested

    def superseded(self, value: Value) -> bool:
        """Return also whether the value belongs to another task, data, model or environment than a stronger source
        names."""
        return (
            super().superseded(value)
            or self._other_task(value)
            or self._without_rows(value)
            or any(
                owner in self.named and self._replaced(owner) and _is_of(value.key, owned)
                for owner, owned in BELONGS_TO.items()
            )
            or (value.key == "reward.terms" and value.value == OWN_SCORER and self._replaced("data.name"))
        )

    def _other_task(self, value: Value) -> bool:
        """Return whether a stronger source names another task: an environment for data and reward, or data for a
        shipped preset's environment."""
        if value.key.startswith("environment."):
            return not self._own_file and not self.stronger(ENVIRONMENT) and any(map(self._names, OTHER_WAY))
        return _is_of(value.key, TASK_KEYS) and self._names(ENVIRONMENT) and self._replaced(ENVIRONMENT)

    def _without_rows(self, value: Value) -> bool:
        """Return whether the value asks for a validation, and data that replaces the preset's has no rows for it."""
        if value.key not in VALIDATES or not value.value or not self._replaced("data.name"):
            return False
        (name,) = self.stronger("data.name") or ("",)
        values = {value.key: value.value for value in self.values} | self._stronger_rows()
        return not str(name).startswith(MADE) and not any(values.get(key) for key in ROWS_OF_VALIDATION)

    def _stronger_rows(self) -> dict[str, Any]:
        stronger = flatten({"validation": self.current_state.get("validation", {})}, "", self.schema)
        return {value.key: value.value for value in stronger}

    def _names(self, owner: str) -> bool:
        return any(self.stronger(owner))

    def _replaced(self, owner: str) -> bool:
        if owner == "data.name" and any(self.stronger("data.sources")):
            return True
        return self.stronger(owner) not in ((), (self.named.get(owner),))


def named_after(names: Mapping[str, Any], values: Iterable[Value]) -> dict[str, Any]:
    """Return data, model and environment once `values` override `named`. An environment replaces weaker data."""
    owners = {value.key: value.value for value in values if value.key in (*BELONGS_TO, *OTHER_WAY) and value.value}
    weaker = {key: name for key, name in names.items() if ENVIRONMENT not in owners or key not in OTHER_WAY}
    return weaker | owners


def _is_of(key: str, owned: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in owned)


def environment_source(environment: Mapping[str, str], schema: Schema) -> Source:
    """`RLCTL_RUN__STEPS=5` sets run.steps. A name that begins with RLCTL_ and means nothing is a problem."""
    names = [name for name in sorted(environment) if name.startswith(PREFIX) and name not in OWN_VARIABLES]
    keys = {name: environment_key(name, schema) for name in names if "__" in name}
    values = (
        value
        for name, key in keys.items()
        for value in text_values(key, environment[name], f"environment {name}", schema)
    )
    return Source(values, problems=[unknown_variable(name, schema) for name in names if name not in keys])


def set_source(text: str, schema: Schema) -> Source:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: there is no value.", "Write --set section.key=value.")
    return Source(text_values(key.strip(), value, "--set", schema), typed=True)


def sources_in_order(
    preset: str | None,
    files: Iterable[str | Path],
    environment: Mapping[str, str],
    flags: Mapping[str, Any],
    sets: Iterable[str],
    overrides: Sequence[str] = (),
    *,
    registry: Registry,
) -> list[Source]:
    """Return all sources, weakest first. `overrides` are Hydra's `key=value`: rlctl's keys are set, others change the
    last recipe in `files`. Raises ConfigError for an unreadable file or preset."""
    schema = registry.schema
    sources: list[Source] = []
    flags_by_key = {key: flag if isinstance(flag, GivenFlag) else GivenFlag(key, flag) for key, flag in flags.items()}
    method = next((flags_by_key[key].value for key in ("run.method", "run.algorithm") if key in flags_by_key), None)
    rlctl_texts = [text for text in overrides if schema.field(override_key(text)) is not None]
    other = [text for text in overrides if text not in rlctl_texts]
    overridden: list[Source] = []

    def add_presets(chain: Iterable[Preset]) -> None:
        for part in chain:
            names: dict[str, Any] = {}
            for below in sources:
                names = named_after(names, below.values)
            sources.append(PresetSource(part, names, schema))

    add_presets(preset_chain(preset) if preset is not None else ())
    contents = [(Path(path), *read_file(Path(path), "--config", registry)) for path in files]
    recipes = [path for path, _, importer in contents if importer]
    for path, values, importer in contents:
        if importer:
            # References of a recipe lead also to the keys that it has under rlctl's own names.
            texts = [text for text in overrides if text in other or importer.has(override_key(text))]
            recipe = importer.read(path, texts if path is recipes[-1] else (), method)
            source, above = recipe_sources(recipe.without_invalid(registry.config_class), schema)
            sources.append(source)
            overridden.append(above)
            continue
        if values.keys() & PRESET_KEYS:
            *below, last = preset_chain(str(path))
            add_presets(below)
            values = last.values
        sources.append(Source(flatten(values, f"file {path}", schema)))
    for importer, texts in claimed(other if not recipes else (), registry).values():
        recipe = importer.read(None, texts, method).without_invalid(registry.config_class)
        overridden += recipe_sources(recipe, schema)
    stated = [set_source(text.lstrip("+"), schema) for text in rlctl_texts]
    flag_values = (
        (key, flag.value, f"flag {flag.name}" if flag.name.startswith("-") else flag.name)
        for key, flag in flags_by_key.items()
    )
    of_flags = Source((Value(*value) for value in flag_values), typed=True)
    typed = [set_source(text, schema) for text in sets]
    return [*sources, environment_source(environment, schema), of_flags, *overridden, *typed, *stated]


def recipe_sources(recipe: Import, schema: Schema) -> tuple[Source, Source]:
    """Return a recipe's source, and the stronger source of its overrides."""
    overrides = recipe.overridden
    values: dict[bool, list[Value]] = {True: [], False: []}
    refusals: dict[bool, list[Refusal]] = {True: [], False: []}
    for key, value in recipe.values.items():
        source = recipe.source[key]
        origin = f"override {source}" if source in overrides else f"file {recipe.path}, {source}"
        optional = key in recipe.optional or (FOR_A_MACHINE in schema.facts(key) and source not in overrides)
        values[source in overrides].append(Value(key, value, origin, optional=optional))
    for line, settled_by in recipe.refusals:
        refusal = Refusal(line, settled_by, final=recipe.foreign is not None)
        refusals[recipe.source.get(settled_by or "") in overrides].append(refusal)
    notes = [
        *(f"left out: {line}" for line in recipe.lines("not known")),
        *(f"runs differently: {line}" for line in recipe.lines("changed")),
        *(f"note: {line}" for line in recipe.notes),
        *(
            f"note: {entry.key} = {entry.value} sets nothing by itself: {entry.note}"
            for entry in (*recipe.of("not applicable"), *recipe.of("logging"))
            if entry.key in overrides and entry.key not in recipe.source.values()
        ),
    ]
    if renamed := [
        f"{recipe.source[value.key]} is rlctl's {value.key}"
        for value in values[True]
        if recipe.source[value.key] != value.key
    ]:
        notes.append(f"note: {'; '.join(renamed)}")
    return Source(values[False], notes, refusals[False], shared=True), Source(values[True], (), refusals[True])


def flatten(values: Mapping[Any, Any], origin: str, schema: Schema, prefix: str = "") -> Iterator[Value]:
    """Yield the leaves of nested sections. A section without keys has none."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if schema.holds_keys(key) and value is None:
            continue
        # Unknown sections are walked too, so that the error names the whole key.
        if isinstance(value, Mapping) and (schema.holds_keys(key) or schema.field(key) is None):
            yield from flatten(value, origin, schema, f"{key}.")
        else:
            yield Value(key, value, origin)


def text_values(key: str, text: str, origin: str, schema: Schema) -> Iterator[Value]:
    """Yield the value of a command-line or environment text; text keys keep the text."""
    value = parse_value(text)
    if schema.takes_text(key) and not isinstance(value, str) and (value is not None or schema.names_variable(key)):
        value = value if isinstance(value, list) and schema.takes_list(key) else text
    if isinstance(value, Mapping) and schema.holds_keys(key):
        yield from flatten(value, origin, schema, f"{key}.")
    else:
        yield Value(key, value, origin)


def environment_key(name: str, schema: Schema) -> str:
    """Return the key that an environment variable sets; names of passed-on variables stay unchanged."""
    parts = name.removeprefix(PREFIX).split("__")
    variable = ".".join((*map(str.lower, parts[:2]), "__".join(parts[2:])))
    return variable if schema.names_variable(variable) else ".".join(parts).lower()


def unknown_variable(name: str, schema: Schema) -> str:
    """Say that an environment variable means nothing, and which one was probably meant."""
    text = name.removeprefix(PREFIX).lower()
    spelled = {key.replace(".", "_"): key for key in schema.keys}
    meant = spelled.get(text) or (text if text in schema.sections else schema.nearest(text))
    close = () if text in schema.sections else difflib.get_close_matches(name, OWN_VARIABLES, n=1, cutoff=0.8)
    if close or meant is None:
        hint = f"did you mean {close[0]}?" if close else f"a key is set by {PREFIX}<SECTION>__<KEY>."
    else:
        section, _, key = meant.upper().partition(".")
        hint = f"`{meant}` is set by {PREFIX}{section}__{key or '<KEY>'}."
    return f"unknown environment variable {name}; {hint}"
