"""The keys of the schema by their dotted names: which exist, what they take, and which one was probably meant."""

from __future__ import annotations

import difflib
import functools
import typing
from types import UnionType
from typing import Any

from pydantic.fields import FieldInfo

from rlctl.config.passthrough import annotation, installed_field, section_with
from rlctl.config.schema import PassThrough, RlctlConfig, Section

LAYOUT = (
    "cluster.nodes", "cluster.gpus_per_node", "cluster.gpu",
    *(f"training.{key}" for key in (
        "tp", "pp", "vpp", "cp", "ep", "etp", "dp", "sequence_parallel", "first_stage_layers", "last_stage_layers",
        "recompute", "optimizer_offload", "micro_batch_tokens", "threads",
    )),
    *(f"generation.{key}" for key in (
        "engines", "tp", "pp", "dp", "ep", "colocated", "memory_fraction", "kv_cache_bytes", "max_concurrent",
        "max_batched_tokens", "threads",
    )),
)  # fmt: skip
"""Keys of how one computation is laid out over devices: numbers agree within rounding whatever they are. What the
planner decided is planned again when one of them changes."""


def section_of(annotation: Any) -> type[Section] | None:
    """The section class that a field holds, or None for a plain value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def is_open(annotation: Any) -> bool:
    """Whether a field is a mapping whose keys the schema leaves open (`data.params`)."""
    return typing.get_origin(annotation) is dict


def field(key: str) -> FieldInfo | None:
    """The schema's field for a dotted key; for a key of an open mapping that mapping's field; None if unknown.

    A key of a section that passes fields through is known whatever its name is: `passthrough.checked` looks it up.
    """
    model: type[Section] | None = RlctlConfig
    found: FieldInfo | None = None
    if "" in key.split("."):
        return None
    for part in key.split("."):
        if model is None:
            return found if found is not None and is_open(found.annotation) else None
        passes = issubclass(model, PassThrough)
        found = model.model_fields.get(part)
        if found is None:
            return FieldInfo(annotation=Any) if passes else None
        model = section_of(found.annotation)
    return found


def is_section(key: str) -> bool:
    found = field(key)
    return found is not None and section_of(found.annotation) is not None


def holds_keys(key: str) -> bool:
    """Whether this key is a section or an open mapping, rather than a value or a key inside a mapping."""
    found = field(key)
    return found is not None and (is_section(key) or (is_open(found.annotation) and key in known_keys()))


def takes_text(key: str) -> bool:
    """Whether a text is a valid type for this key, so that `2024` given as text can stay one."""
    found, passed = field(key), installed_field(key)
    if found is None or is_open(found.annotation):
        return False
    kind = found.annotation if passed is None else annotation(passed)
    options = typing.get_args(kind) if typing.get_origin(kind) in (UnionType, typing.Union) else (kind,)
    return str in options and not {int, float, bool} & set(options)


@functools.cache
def known_keys() -> tuple[str, ...]:
    """Every key of the schema, in its order, as `section.key`."""
    return tuple(
        f"{name}.{key}"
        for name, section in RlctlConfig.model_fields.items()
        for key in typing.cast(type[Section], section.annotation).model_fields
    )


def nearest(key: str) -> str | None:
    """The known key that `key` was probably meant to be: the same name in another section, else the most alike."""
    last = key.rpartition(".")[2]
    passing = section_with(last)
    if passing is not None:
        return f"{passing}.{last}"
    same_name = [known for known in known_keys() if known.rpartition(".")[2] == last]
    if len(same_name) == 1:
        return same_name[0]
    names = [*known_keys(), *RlctlConfig.model_fields]
    alike = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if alike:
        return alike[0]
    by_last = {known.rpartition(".")[2]: known for known in known_keys()}
    alike = difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)
    return by_last[alike[0]] if alike else None
