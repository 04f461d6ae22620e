"""The exact arguments for the classes of Megatron-Core, transformers and vLLM, without importing the libraries."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rlctl.backends.lookup import SectionArguments
from rlctl.config.installed import fields_of
from rlctl.config.load import Resolved
from rlctl.config.passthrough import TARGETS, not_checked
from rlctl.planner.from_config import local_gpus
from rlctl.preparation.worker_specs import EnginesSpec, RunWorkersSpec

OWN_CHOICE = "the engine's own choice"


@dataclass(frozen=True)
class BackendArguments:
    """The arguments of each class. Values that the user passes through override rlctl's."""

    classes: tuple[SectionArguments, ...]

    @classmethod
    def of(cls, spec: RunWorkersSpec | EnginesSpec) -> BackendArguments:
        """Return the arguments of a policy and its engines, or of engines only."""
        if isinstance(spec, EnginesSpec):
            return cls(tuple(spec.backend.arguments(spec.engine)))
        of_engines = cls.of(spec.engines).classes if spec.engines is not None else ()
        return cls((*spec.backend.arguments(spec.policy), *of_engines))

    def pinned(self, resolved: Resolved) -> list[str]:
        """Return a line per passed-through value that differs from the usual value, with both values."""
        lines = []
        for arguments in self.classes:
            for key, value in arguments.passed.items():
                usual = _usual(arguments, key)
                if usual != value:
                    origin = resolved.origin[f"{arguments.section}.{key}"]
                    lines.append(f"{arguments.section}.{key} = {value!r} ({origin}); without it: {usual}")
        return lines

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the values by section and field. Values without a JSON type become text."""
        return {
            arguments.section: {key: _plain(value) for key, value in _given(arguments).items()}
            for arguments in self.classes
        }

    def text(self) -> Iterator[str]:
        """Yield lines for the terminal: each class, followed by its fields."""
        for arguments in self.classes:
            yield f"{arguments.class_name}:"
            yield from (f"  {key} = {value!r}" for key, value in _given(arguments).items())


def _usual(arguments: SectionArguments, key: str) -> Any:
    if key in arguments.ours:
        return arguments.ours[key]
    field = (TARGETS[arguments.section].fields() or {}).get(key)
    try:
        return ast.literal_eval(field.default or "") if field else OWN_CHOICE
    except (ValueError, SyntaxError):
        return OWN_CHOICE  # an expression of the engine's code


def _given(arguments: SectionArguments) -> dict[str, Any]:
    """Return the values of fields that the installed version has, since the backends drop the others. For a class
    outside TARGETS, return all values."""
    values = arguments.ours | arguments.passed
    fields = (
        fields_of(TARGETS[arguments.section].module, arguments.class_name) if arguments.section in TARGETS else None
    )
    return values if fields is None else {key: value for key, value in values.items() if key in fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def differences(resolved: Resolved) -> list[str]:
    """Return one line per difference from the configuration file, and per value that this machine cannot check."""
    notes = not_checked(list(resolved.origin))
    if resolved.config.megatron.passed.get("fp8") and find_spec("transformer_engine") is None:
        here = "; it is not installed here" if local_gpus() else ""
        notes.append(f"megatron.fp8 needs TransformerEngine where the GPUs are{here}")
    return [*resolved.notes, *(f"note: {line}." for line in notes)]
