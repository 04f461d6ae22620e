"""Schema keys by dotted name: existence, types, and nearest matches."""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any

from pydantic.fields import FieldInfo

from rlctl.config.kinds import config_classes, sections_of
from rlctl.config.other_trainers import KEYS as OTHER_TRAINERS
from rlctl.config.parallel import SIZES
from rlctl.config.passthrough import annotation, installed_field, section_with
from rlctl.config.section import PassThrough, Section

TRAINING_CHOSEN = (*SIZES, "sequence_parallel", "micro_batch_tokens", "recompute", "optimizer_offload")
"""Keys of `training` that every plan of a training decides."""
TEACHER_SIZES = tuple(size for size in SIZES if size != "vpp")
"""Keys of `teacher` or `reward_model` that every plan with such a model decides."""
LAID_OUT = {
    "teacher": TEACHER_SIZES,
    "reward_model": TEACHER_SIZES,
    "training": (*TRAINING_CHOSEN, "threads", "first_stage_layers", "last_stage_layers", "replicate"),
    "generation": (
        "engines", "tp", "pp", "dp", "ep", "memory_fraction", "kv_cache_bytes", "max_concurrent", "max_batched_tokens",
        "threads", "colocated", "devices",
    ),
}  # fmt: skip
"""Layout keys of policy, teacher, reward model and engines by section; the planner sets unset ones."""
LAYOUT = (
    "training.backend", "cluster.nodes", "cluster.gpus_per_node", "cluster.gpu",
    *(f"{section}.{key}" for section, keys in LAID_OUT.items() for key in keys),
)  # fmt: skip
"""Layout keys of a computation, which change results only within rounding. After a change, the planner sets the others
anew."""


LAYOUT_OF_A_RECIPE = (
    "training.packing",
    "training.dynamic_batching",
    *(
        key
        for key in LAYOUT
        if not key.startswith("cluster.") and key not in ("generation.colocated", "generation.devices")
    ),
)
"""Layout keys of a recipe that rlctl drops if no plan fits, because they were chosen for another machine."""


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section class that a field holds, or None for a plain value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def is_open(annotation: Any) -> bool:
    return typing.get_origin(annotation) is dict


def field(key: str, config: type[Section] | None = None) -> FieldInfo | None:
    """Return the field of a dotted key or of an open mapping's key; None if unknown. `config` None: all methods.
    `passthrough.checked` validates passed-through keys."""
    section, *parts = key.split(".")
    if not section or "" in parts:
        return None
    classes = sections_of(section) if config is None else own_section(config, section)
    if not parts:
        return FieldInfo(annotation=classes[0]) if classes else None
    return next(filter(None, (_field_of(one, parts) for one in classes)), None)


def own_section(config: type[Section], name: str) -> tuple[type[Section], ...]:
    """Return the class of a section of one configuration; empty where it has none."""
    found = config.model_fields.get(name)
    section = section_of(found.annotation) if found is not None else None
    return () if section is None else (section,)


def _field_of(section: type[Section], parts: Sequence[str]) -> FieldInfo | None:
    model: type[Section] | None = section
    found: FieldInfo | None = None
    for part in parts:
        if model is None:
            return found if found is not None and is_open(found.annotation) else None
        passes = issubclass(model, PassThrough)
        found = model.model_fields.get(part)
        if found is None:
            return FieldInfo(annotation=Any) if passes else None
        model = section_of(found.annotation)
    return found


def why_unknown(key: str, config: type[Section], command: str) -> str | None:
    """Return why a method lacks a key that another one has; None: it has it."""
    if field(key, config) is not None:
        return None
    section, _, name = key.partition(".")
    if not own_section(config, section):
        return f"`{command}` has no section `{section}`"
    return f"`{command}` has no key `{name}` in the section `{section}`"


def is_section(key: str) -> bool:
    found = field(key)
    return found is not None and section_of(found.annotation) is not None


def holds_keys(key: str) -> bool:
    """Return whether this key is a section or an open mapping, rather than a value or a key inside a mapping."""
    found = field(key)
    return found is not None and (is_section(key) or (is_open(found.annotation) and key in known_keys()))


def names_variable(key: str) -> bool:
    """Return whether this key is inside of an open mapping of texts: an environment variable (`training.env.NAME`)."""
    found = field(key)
    return found is not None and found.annotation == dict[str, str] and key not in known_keys()


def takes_text(key: str) -> bool:
    """Return whether this key takes a text and no number, so that `2024` stays a text."""
    kinds = plain_kinds(key)
    return names_variable(key) or (str in kinds and not {int, float, bool} & kinds)


def takes_list(key: str) -> bool:
    return any(typing.get_origin(kind) is list for kind in plain_kinds(key))


def takes_number(key: str) -> bool:
    """Return whether this key takes a number and no boolean, so that `true` is not taken for 1."""
    kinds = plain_kinds(key)
    return bool({int, float} & kinds) and bool not in kinds


def plain_kinds(key: str) -> set[Any]:
    """Return a key's types without bounds; empty for an unknown key or one in an open mapping."""
    found, passed = field(key), installed_field(key)
    if found is None or is_open(found.annotation):
        return set()
    kind = found.annotation if passed is None else annotation(passed)
    options = typing.get_args(kind) if typing.get_origin(kind) in (UnionType, typing.Union) else (kind,)
    return {typing.get_args(one)[0] if typing.get_origin(one) is typing.Annotated else one for one in options}


@functools.cache
def section_names() -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for config in config_classes() for name in config.model_fields))


@functools.cache
def known_keys() -> tuple[str, ...]:
    """Return every key of all methods, in order, as `section.key`."""
    keys = (f"{name}.{key}" for name in section_names() for one in sections_of(name) for key in one.model_fields)
    return tuple(dict.fromkeys(keys))


def keys_of(config: type[Section]) -> tuple[str, ...]:
    return tuple(
        f"{name}.{key}" for name in config.model_fields for one in own_section(config, name) for key in one.model_fields
    )


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key in sorted(values, key=lambda key: key.count(".")):
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        value = values[key]
        place[name] = dict(value) if isinstance(value, Mapping) else value
    return nested


def nearest(key: str) -> str | None:
    """Return the nearest known key: another trainer's counterpart, the same name elsewhere, or the most similar one."""
    if key in OTHER_TRAINERS:
        return OTHER_TRAINERS[key]
    outer, _, last = key.rpartition(".")
    inner = section_of(found.annotation) if "." in outer and (found := field(outer)) else None
    if inner is not None and (alike := difflib.get_close_matches(last, inner.model_fields, n=1)):
        return f"{outer}.{alike[0]}"
    passing = section_with(last)
    if passing is not None:
        return f"{passing}.{last}"
    same_name = [known for known in known_keys() if known.rpartition(".")[2] == last]
    if len(same_name) == 1:
        return same_name[0]
    names = [*known_keys(), *section_names()]
    alike = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if alike:
        return alike[0]
    by_last = {known.rpartition(".")[2]: known for known in known_keys()}
    alike = difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)
    return by_last[alike[0]] if alike else None
