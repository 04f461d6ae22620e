"""Schema keys by dotted name: existence, types, and nearest matches.

A `Schema` is made of configuration classes, which the rooms above hand down; this room imports none of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import operator
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar

from pydantic.fields import FieldInfo

from rlctl.config.facts import Decided, Fact, Flag, Named, Unloadable
from rlctl.config.other_trainers import counterpart
from rlctl.config.passthrough import annotation, installed_field, section_with
from rlctl.config.section import PassThrough, Section

Mark = Fact | Decided | Unloadable | Flag | Named
MARKS = (Fact, Decided, Unloadable, Flag, Named)
M = TypeVar("M", Decided, Unloadable, Flag, Named)


@dataclass(frozen=True)
class Schema:
    """The keys of configuration classes. Where several have a section, the first one's class comes first."""

    classes: tuple[type[Section], ...]
    names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, hash=False)
    """Names that keys with the mark `Named` take, by group."""

    @functools.cached_property
    def sections(self) -> dict[str, tuple[type[Section], ...]]:
        """The classes of each section."""
        classes: dict[str, dict[type[Section], None]] = {}
        for config in self.classes:
            for name, declared in config.model_fields.items():
                if (section := section_of(declared.annotation)) is not None:
                    classes.setdefault(name, {})[section] = None
        return {name: tuple(several) for name, several in classes.items()}

    @functools.cached_property
    def keys(self) -> tuple[str, ...]:
        """Every key, in order, as `section.key`."""
        fields = ((name, section.model_fields) for name, several in self.sections.items() for section in several)
        return tuple(dict.fromkeys(f"{name}.{key}" for name, keys in fields for key in keys))

    @functools.cached_property
    def marks(self) -> dict[str, tuple[Mark, ...]]:
        """The facts about each key, including the facts about its sections; keys of inner sections one by one."""
        marks: dict[str, tuple[Mark, ...]] = {}
        for config in self.classes:
            for key, several in _marks_of(config, "", ()):
                marks[key] = tuple(dict.fromkeys((*marks.get(key, ()), *several)))
        return marks

    def facts(self, key: str) -> Fact:
        """Return the facts about a key, or about the open mapping that it is in."""
        while key not in self.marks and "." in key:
            key = key.rpartition(".")[0]
        stated = (mark for mark in self.marks.get(key, ()) if isinstance(mark, Fact))
        return functools.reduce(operator.or_, stated, Fact(0))

    def with_fact(self, fact: Fact) -> tuple[str, ...]:
        """Return the keys with a fact, in the schema's order."""
        return tuple(key for key in self.marks if fact in self.facts(key))

    def with_mark(self, kind: type[M]) -> dict[str, M]:
        """Return the mark of this class of each key that has one."""
        return {key: mark for key, several in self.marks.items() for mark in several if isinstance(mark, kind)}

    def choices(self, key: str) -> tuple[str, ...]:
        """Return the values that a key with the mark `Named` takes; empty: any, or they are unknown here."""
        named = next((mark for mark in self.marks.get(key, ()) if isinstance(mark, Named)), None)
        return (*named.also, *self.names[named.group]) if named is not None and named.group in self.names else ()

    def field(self, key: str) -> FieldInfo | None:
        """Return the field of a dotted key or of an open mapping's key; None if unknown.

        `passthrough.checked` validates passed-through keys.
        """
        section, *parts = key.split(".")
        if not section or "" in parts:
            return None
        classes = self.sections.get(section, ())
        if not parts:
            return FieldInfo(annotation=classes[0]) if classes else None
        return next(filter(None, (_field_of(section, parts) for section in classes)), None)

    def why_unknown(self, key: str, command: str) -> str | None:
        """Return why the method of `command` lacks a key that another one has; None: it has it."""
        if self.field(key) is not None:
            return None
        section, _, name = key.partition(".")
        if section not in self.sections:
            return f"`{command}` has no section `{section}`"
        return f"`{command}` has no key `{name}` in the section `{section}`"

    def is_section(self, key: str) -> bool:
        declared = self.field(key)
        return declared is not None and section_of(declared.annotation) is not None

    def holds_keys(self, key: str) -> bool:
        """Return whether this key is a section or an open mapping, rather than a value or a key inside a mapping."""
        declared = self.field(key)
        if declared is None:
            return False
        return section_of(declared.annotation) is not None or (is_open(declared.annotation) and key in self.keys)

    def names_variable(self, key: str) -> bool:
        """Return whether this key is an environment variable in an open mapping of texts: `training.env.NAME`."""
        declared = self.field(key)
        return declared is not None and declared.annotation == dict[str, str] and key not in self.keys

    def takes_text(self, key: str) -> bool:
        """Return whether this key takes a text and no number, so that `2024` stays a text."""
        kinds = self.plain_kinds(key)
        return self.names_variable(key) or (str in kinds and not {int, float, bool} & kinds)

    def takes_list(self, key: str) -> bool:
        return any(typing.get_origin(kind) in (list, tuple) for kind in self.plain_kinds(key))

    def listed_section(self, key: str) -> type[Section] | None:
        """Return the section class of the entries of a list, or None for another value."""
        kinds = [typing.get_args(kind) for kind in self.plain_kinds(key) if typing.get_origin(kind) in (list, tuple)]
        return next((section for entries in kinds if (section := section_of(entries[0])) is not None), None)

    def takes_number(self, key: str) -> bool:
        """Return whether this key takes a number and no boolean, so that `true` is not taken for 1."""
        kinds = self.plain_kinds(key)
        return bool({int, float} & kinds) and bool not in kinds

    def plain_kinds(self, key: str) -> set[Any]:
        """Return a key's types without bounds; empty for an unknown key or one in an open mapping."""
        declared, passed = self.field(key), installed_field(key)
        if declared is None or is_open(declared.annotation):
            return set()
        kind = declared.annotation if passed is None else annotation(passed)
        options = typing.get_args(kind) if typing.get_origin(kind) in (UnionType, typing.Union) else (kind,)
        return {
            typing.get_args(option)[0] if typing.get_origin(option) is typing.Annotated else option
            for option in options
        }

    def nearest(self, key: str) -> str | None:
        """Return the nearest known key: another trainer's counterpart, the same name elsewhere, or the most similar
        one."""
        if (written := key.replace("-", "_")) in self.keys:
            return written
        if (rlctl_key := counterpart(key)) is not None and self.field(rlctl_key) is not None:
            return rlctl_key
        outer, _, last = key.rpartition(".")
        declared = self.field(outer) if "." in outer else None
        inner = section_of(declared.annotation) if declared else None
        if inner is not None and (alike := difflib.get_close_matches(last, inner.model_fields, n=1)):
            return f"{outer}.{alike[0]}"
        passing = section_with(last)
        if passing is not None:
            return f"{passing}.{last}"
        same_name = [key for key in self.keys if key.rpartition(".")[2] == last]
        if len(same_name) == 1:
            return same_name[0]
        alike = difflib.get_close_matches(key, [*self.keys, *self.sections], n=1, cutoff=0.6)
        if alike:
            return alike[0]
        by_last = {key.rpartition(".")[2]: key for key in self.keys}
        alike = difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)
        return by_last[alike[0]] if alike else None


def _marks_of(section: type[Section], prefix: str, around: tuple[Mark, ...]) -> Iterator[tuple[str, tuple[Mark, ...]]]:
    for name, declared in section.model_fields.items():
        marks = (*around, *(mark for mark in declared.metadata if isinstance(mark, MARKS)))
        inner = section_of(declared.annotation)
        if inner is None:
            yield f"{prefix}{name}", marks
        else:
            yield from _marks_of(inner, f"{prefix}{name}.", marks)


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section class that a field holds, or None for a plain value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def is_open(annotation: Any) -> bool:
    return typing.get_origin(annotation) is dict


def _field_of(section: type[Section], parts: Sequence[str]) -> FieldInfo | None:
    model: type[Section] | None = section
    declared: FieldInfo | None = None
    for part in parts:
        if model is None:
            return declared if declared is not None and is_open(declared.annotation) else None
        passes = issubclass(model, PassThrough)
        declared = model.model_fields.get(part)
        if declared is None:
            return FieldInfo(annotation=Any) if passes else None
        model = section_of(declared.annotation)
    return declared


def keys_with(section: type[Section], fact: Fact) -> tuple[str, ...]:
    """Return the keys of a section with a fact, in the order of its fields."""
    return tuple(
        key for key, marks in _marks_of(section, "", ()) if any(m for m in marks if isinstance(m, Fact) and fact in m)
    )


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as nested sections."""
    nested: dict[str, Any] = {}
    for key in sorted(values, key=lambda key: key.count(".")):
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        value = values[key]
        place[name] = dict(value) if isinstance(value, Mapping) else value
    return nested
