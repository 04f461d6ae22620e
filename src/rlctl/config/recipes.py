"""Recipes: configurations of other trainers, and their importers. Importers are entry points of the group
`rlctl.recipes`, imported when a file or an override has keys that rlctl lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from rlctl.config.schema import Schema, nest
from rlctl.config.section import Section
from rlctl.config.yaml_values import read_mapping
from rlctl.errors import ConfigError

PRESET_KEYS = {"extends", "description"}
"""Keys of a preset file that are no configuration; a --config file may have them too."""
YAML = (".yaml", ".yml")

SCRIPTS = {".py": "Python script", ".ipynb": "notebook", ".sh": "shell script that starts no known trainer"}
"""Files that hold code where configuration is expected."""
LONGEST_VALUE = 60
"""Characters of a value in a line of the report."""

Status = Literal["not yet", "not known", "changed", "logging", "mapped", "not applicable"]
"""`not yet` would change the numbers and stops a run unless allowed; `not known` is an unknown key; `changed` runs
differently; `logging` affects only logs and validation."""


@dataclass(frozen=True)
class Entry:
    """The outcome of one key of a recipe."""

    key: str
    value: Any
    status: Status
    note: str
    """The rlctl key, or the reason."""
    settled_by: str | None = None
    """The rlctl key that settles a `not yet`, wherever the user sets it."""


def grouped(entries: Iterable[Entry]) -> list[tuple[str, Entry]]:
    """Return one line for entries of a section with the same outcome and reason, with the first entry."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.status, entry.key.partition(".")[0], entry.note), []).append(entry)
    return [
        (f"{first.key} and {len(others)} more: {first.note}" if others else
         f"{first.key} = {short(first.value)}: {first.note}", first)
        for first, *others in groups.values()
    ]  # fmt: skip


def short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


@dataclass
class Import:
    """A recipe in rlctl's words."""

    path: Path
    files: list[Path] = dataclasses.field(default_factory=list)
    """The recipe and the files that it builds on."""
    trainer: str = ""
    """The trainer whose recipe it is, as a message names it."""
    foreign: str | None = None
    """The sentence on a recipe of another kind than rlctl runs: another algorithm, an evaluation."""
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Values by rlctl's dotted keys."""
    entries: list[Entry] = dataclasses.field(default_factory=list)
    source: dict[str, str] = dataclasses.field(default_factory=dict)
    """The recipe's key of each value."""
    overridden: frozenset[str] = frozenset()
    """Keys that the command line gives a value."""
    before: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The recipe's values before overrides."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Lines on which value wins if the recipe sets one thing twice."""
    optional: set[str] = dataclasses.field(default_factory=set)
    """Keys accepted even if the model or machine lacks their feature."""

    @property
    def refusals(self) -> list[tuple[str, str | None]]:
        """Return unsupported parts with the rlctl key that settles each, or one sentence if the recipe cannot run at
        all."""
        if self.foreign is not None:
            return [(self.foreign, None)]
        return [(line, first.settled_by) for line, first in grouped(self.of("not yet"))]

    @property
    def unsupported(self) -> list[str]:
        """The lines of `refusals`."""
        return [line for line, _ in self.refusals]

    def lines(self, status: Status) -> list[str]:
        """Return lines on the keys with one outcome."""
        return [line for line, _ in grouped(self.of(status))]

    def of(self, status: Status) -> list[Entry]:
        return [entry for entry in self.entries if entry.status == status]

    def set(self, key: str, value: Any, source: str) -> None:
        self.values[key], self.source[key] = value, source

    def without_invalid(self, config_class: Callable[[str | None], type[Section]]) -> Import:
        """Make values that rlctl's keys cannot hold entries of the report, and return the recipe."""
        config = config_class(self.values.get("run.algorithm"))
        accepted = {key: value for key, value in self.values.items() if key in Schema((config,)).keys}
        try:
            config.model_validate(nest(accepted))
        except ValidationError as error:
            for problem in error.errors():
                path = ".".join(map(str, problem["loc"]))
                key = next((key for key in accepted if f"{path}.".startswith(f"{key}.")), None)
                if key not in self.values:  # it has a line, or keys do not go together: other sources may change one
                    continue
                source, reason = self.source.pop(key), problem["msg"].replace("Input should be", "it should be")
                del self.values[key]
                before = next((entry for entry in self.entries if entry.key == source), None)
                self.entries[:] = [e for e in self.entries if e.key != source or e.status not in ("mapped", "changed")]
                if before is not None:  # otherwise it is a default of the trainer that the recipe does not write
                    note = f"{key} cannot be {accepted[key]!r}: {reason}"
                    self.entries.append(Entry(source, before.value, "not yet", note, key))
        return self


class Importer(Protocol):
    """An entry point of `rlctl.recipes`: reads one trainer's recipes."""

    trainer: str
    """The trainer's name in messages."""

    def recognizes(self, path: Path, values: Mapping[str, Any]) -> bool:
        """Return whether a file is a recipe of this trainer. `values`: its top level, empty where it is not YAML."""
        ...

    def sections(self) -> Collection[str]:
        """Return the names of the top-level sections of this trainer's configuration."""
        ...

    def has(self, key: str) -> bool:
        """Return whether this trainer has a dotted key of this name."""
        ...

    def read(self, path: Path | None, overrides: Sequence[str], method: str | None) -> Import:
        """Read a recipe with `key=value` overrides, or overrides alone. `method`: the command's method. Raises
        ConfigError naming file or key."""
        ...


def is_own(values: Mapping[str, Any], schema: Schema) -> bool:
    """Return whether a YAML file has only rlctl's top-level sections."""
    return all(str(key).partition(".")[0] in {*schema.sections, *PRESET_KEYS} for key in values)


def read_file(path: Path, description: str, registry: Registry) -> tuple[dict[str, Any], Importer | None]:
    """Return a file's sections, and the importer of another trainer's recipe (other formats have no sections). Raises
    ConfigError for an unreadable file."""
    values = read_mapping(path, description) if path.suffix in YAML or not path.is_file() else {}
    if path.suffix in YAML and is_own(values, registry.schema):
        return values, None
    importer = next((candidate for candidate in registry.importers() if candidate.recognizes(path, values)), None)
    if importer is None and path.suffix in SCRIPTS and path.is_file():
        readers = ", ".join(candidate.trainer for candidate in registry.importers())
        raise ConfigError(
            f"{description} {path} is a {SCRIPTS[path.suffix]}, which is not read.",
            f"Give a YAML file, with rlctl's keys or a recipe of {readers}. "
            "--reward FILE.py:FUNCTION takes reward functions from a script, and --model and --data name the rest.",
        )
    return (values, importer) if importer or path.suffix in YAML else (read_mapping(path, description), None)


def claimed(texts: Iterable[str], registry: Registry) -> dict[str, tuple[Importer, list[str]]]:
    """Return overrides grouped by the trainer that has their key or section. Raises ConfigError for an unknown one."""
    claims: dict[str, tuple[Importer, list[str]]] = {}
    for text in texts:
        key = override_key(text)
        having = next((candidate for candidate in registry.importers() if candidate.has(key)), None)
        section = key.partition(".")[0]
        importer = having or next(
            (candidate for candidate in registry.importers() if section in candidate.sections()), None
        )
        if importer is None:
            meant = registry.schema.nearest(key)
            hint = f"Did you mean `{meant}`?" if meant else "`rlctl config schema` lists every key."
            raise ConfigError(f"unknown key `{key}`: neither rlctl nor a trainer whose recipes it reads has it.", hint)
        claims.setdefault(importer.trainer, (importer, []))[1].append(text)
    return claims


def override_key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0].strip()


@dataclass(frozen=True)
class Registry:
    """The schema of all methods, their configuration classes by name, and the importers of recipes: handed down by the
    rooms that have them."""

    schema: Schema
    config_class: Callable[[str | None], type[Section]]
    """Method name -> configuration class; None stands for the default method."""
    importers: Callable[[], Iterable[Importer]] = tuple

    @classmethod
    def of(cls, config: type[Section]) -> Registry:
        """Return the registry of one configuration class."""
        return cls(Schema((config,)), lambda _: config)
