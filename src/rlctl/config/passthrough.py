"""Sections passed through to Megatron-Core and vLLM: known fields, and fields that rlctl sets.

Some fields are other names of rlctl's keys (`megatron.tensor_model_parallel_size` is `training.tp`), some are set by
rlctl and refused with the reason, and all others replace rlctl's value.
"""

from __future__ import annotations

import ast
import difflib
import functools
import types
import typing
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from rlctl.config import installed
from rlctl.config.installed import Function, InstalledField, Open
from rlctl.config.other_trainers import NAMES, counterpart
from rlctl.config.section import PassThrough

VLLM_PLUGINS = "vllm.general_plugins"


@dataclass(frozen=True)
class InstalledClass:
    """A class of Megatron-Core or vLLM that takes a section's fields."""

    label: str
    module: str
    name: str

    def fields(self) -> dict[str, InstalledField] | None:
        """Return the installed version's fields by name; None if it is not installed."""
        return installed.fields_of(self.module, self.name)

    def words(self) -> str:
        return f"{self.label} {installed.version(self.module.partition('.')[0])}'s {self.name.removeprefix('MLA')}"


TARGETS = {
    "megatron": InstalledClass("Megatron-Core", "megatron.core.transformer.transformer_config", "MLATransformerConfig"),
    "optimizer": InstalledClass("Megatron-Core", "megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    "ddp": InstalledClass(
        "Megatron-Core", "megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"
    ),
    "vllm": InstalledClass("vLLM", "vllm.engine.arg_utils", "EngineArgs"),
}

ALIASES: dict[str, str] = NAMES["aliases"]
"""Names that Megatron-Core and vLLM have for keys of rlctl."""
MANAGED: dict[str, str] = {f"megatron.{name}": "it comes from the model" for name in NAMES["megatron"]["of_the_model"]}
MANAGED |= NAMES["managed"]
"""Fields that rlctl sets itself, each with its source or the reason."""
CHOICES: dict[str, list[str]] = NAMES["choices"]
"""Values of fields that Megatron-Core declares as texts."""
INNER: dict[str, str] = NAMES["inner"]
"""vLLM's class of a field that holds further fields."""
ABSENT_PARTS = ("dsa_", "linear_", "mamba_", "use_mamba")
"""Beginnings of the names of TransformerConfig's fields for parts that no model of rlctl has."""


def without_effect(name: str, *, experts: bool, latent_attention: bool) -> str | None:
    """Return why a field of Megatron's TransformerConfig has no effect in a model with these parts; None if it may."""
    if name.startswith(ABSENT_PARTS):
        return "no model that rlctl trains has the parts it is for"
    if not experts and (name.startswith("moe_") or "_moe_" in name):
        return "the model has no experts"
    if not latent_attention and "mla" in name.split("_"):
        return "the model has no latent attention"
    return None


def passed_fields(section: str) -> dict[str, InstalledField] | None:
    """Return the installed version's fields that a section passes through: rlctl neither sets them nor has a key for
    them."""
    fields = TARGETS[section].fields()
    if fields is None:
        return None
    return {
        name: field
        for name, field in fields.items()
        if f"{section}.{name}" not in MANAGED.keys() | ALIASES.keys()
        and name not in PassThrough.keys_by_section.get(section, ())
        and field.type is not Function
    }


def json_properties(section: str) -> dict[str, Any]:
    properties = {}
    for name, field in (passed_fields(section) or {}).items():
        schema = _adapter(annotation(field)).json_schema()
        properties[name] = schema | ({"description": field.description} if field.description else {})
    return properties


def target_of(key: str) -> tuple[InstalledClass, str] | None:
    """Return the class and the field's name of a key; None for a key of rlctl."""
    section, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    passes = section in TARGETS and name and name not in PassThrough.keys_by_section.get(section, ())
    return (TARGETS[section], name) if passes else None


def canonical(key: str, value: Any) -> tuple[str, Any]:
    """Return rlctl's key and value for one of `ALIASES`; others unchanged."""
    if key not in ALIASES:
        return key, value
    if key == "megatron.recompute_granularity" and value is None:
        value = "none"
    if key.endswith("_style") and isinstance(value, str):
        value = value.lower().replace("_", "-")
    return ALIASES[key], value


def installed_field(key: str) -> InstalledField | None:
    """Return the installed version's field for a key; None if unknown."""
    target = target_of(key)
    fields = target[0].fields() if target else None
    return fields.get(target[1]) if target and fields else None


def annotation(field: InstalledField) -> Any:
    """Return a field's type for pydantic; a default of None allows None."""
    return field.type | None if field.default == "None" and field.type is not Open else field.type


def checked(key: str, value: Any) -> tuple[Any, str | None]:
    """Return the field's value, and an error or None."""
    if key in MANAGED:
        return value, f"rlctl sets this itself: {MANAGED[key]}."
    engine_field = target_of(key)
    fields = engine_field[0].fields() if engine_field else None
    if engine_field is None or fields is None:
        return value, None
    target, name = engine_field
    if name not in fields:
        close = [
            f"{key.partition('.')[0]}.{field}" for field in difflib.get_close_matches(name, fields, n=1, cutoff=0.6)
        ]
        suggestion = counterpart(key) or (close[0] if close else None)
        meant = f"; did you mean `{suggestion}`?" if suggestion else "."
        return value, f"it is not a field of {target.words()}{meant}"
    kind = annotation(fields[name])
    if kind in (Function, Function | None):
        return value, "it takes a Python function, which a configuration cannot hold."
    if key.count(".") > 1:
        takes = kind is Open or dict in {typing.get_origin(k) or k for k in (typing.get_args(kind) or (kind,))}
        if takes:
            section, _, inner, *deeper = key.split(".")
            return value, None if deeper else _inner_problem(f"{section}.{name}", {inner: value})
        return value, f"{key.split('.')[0]}.{name} takes {type_words(kind)}, and no inner keys."
    try:
        value = _adapter(kind).validate_python(value)
    except ValidationError:
        return value, f"it takes {type_words(kind)}."
    if isinstance(value, dict) and (problem := _inner_problem(key, value)):
        return value, problem
    if names := choices(key, fields[name]):
        # Megatron-Core splits a text at commas (cuda_graph_scope); vLLM takes names in any case, and paths of classes.
        texts = [part for item in (value if isinstance(value, list) else [value]) for part in str(item).split(",")]
        suggestion = {allowed.lower() for allowed in names}
        if value is not None and any("." not in text and text.lower() not in suggestion for text in texts):
            return value, f"it takes {' | '.join(names)}."
    return value, None


def _inner_problem(key: str, values: dict[str, Any]) -> str | None:
    """Return what an enumeration among the fields of one of vLLM's inner classes takes, if a text is not in it."""
    fields = installed.fields_of("vllm.config", INNER[key]) if key in INNER else None
    for name, value in values.items() if fields else ():
        names = _texts(fields[name].type) if fields and name in fields else []
        if names and isinstance(value, str) and value.lower() not in {text.lower() for text in names}:
            return f"{name} takes {' | '.join(names)}."
    return None


def choices(key: str, field: InstalledField) -> tuple[str, ...]:
    """Return the texts that a field takes; empty: any.

    vLLM declares many names as `str | Literal[...]`, because packages can register more, and refuses others when an
    engine starts. Another package's plug-in may have registered any name.
    """
    if key in CHOICES:
        return tuple(CHOICES[key])
    if key == "vllm.spec_method":  # declared as a text, and handed to SpeculativeConfig
        methods = (installed.fields_of("vllm.config", "SpeculativeConfig") or {}).get("method")
        return tuple(_texts(methods.type)) if methods is not None else ()
    texts = tuple(dict.fromkeys(text for kind in (field.type, field.narrower) for text in _texts(kind)))
    if not texts or str not in (field.type, *typing.get_args(field.type)) or _vllm_is_extended():
        return ()
    usual = ast.literal_eval(field.default) if field.default and field.default[0] in "'\"" else None
    return texts if usual is None or usual in texts else (usual, *texts)


def _texts(kind: Any) -> list[str]:
    """Return the texts in the literals of a type."""
    if typing.get_origin(kind) is Literal:
        return [argument for argument in typing.get_args(kind) if isinstance(argument, str)]
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return [text for argument in typing.get_args(kind) for text in _texts(argument)]
    return []


@functools.cache
def _vllm_is_extended() -> bool:
    """Return whether a package other than vLLM registers plug-ins with it."""
    return any(
        entry.dist is None or not entry.dist.name.startswith("vllm") for entry in entry_points(group=VLLM_PLUGINS)
    )


@functools.cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind, config={"arbitrary_types_allowed": True})


def section_with(name: str) -> str | None:
    """Return the section whose class has a field of this name, for a key that was given in the wrong section."""
    return next((section for section, target in TARGETS.items() if name in (target.fields() or {})), None)


def not_checked(keys: list[str]) -> list[str]:
    """Return a line for each section whose keys could not be checked because their engine is not installed."""
    sections = dict.fromkeys(key.partition(".")[0] for key in keys if target_of(key))
    return [
        f"{section}.*: {TARGETS[section].label} is not installed, so its fields were not checked"
        for section in sections
        if TARGETS[section].fields() is None
    ]


def type_words(kind: Any) -> str:
    """Return a type in the words of the configuration: `Literal['a', 'b'] | None` is `a | b | unset`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return type_words(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return " | ".join(type_words(argument) for argument in arguments if argument is not Function)
    if origin in (tuple, list, set) and arguments:
        return f"list of {type_words(arguments[0])}"
    if origin is dict:
        return "mapping"
    names = {
        str: "text", int: "integer", float: "number", bool: "true | false", type(None): "unset", Any: "any",
        Open: "any", dict: "mapping", list: "list", tuple: "list", set: "list", Function: "a Python function",
    }  # fmt: skip
    return names.get(kind, getattr(kind, "__name__", str(kind)))
