"""The exact arguments that Megatron-Core and vLLM would be given, without starting or importing either."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rlctl.backends.megatron.args import (
    ddp_values,
    has_transformer_engine,
    optimizer_values,
    transformer_values,
)
from rlctl.backends.vllm.args import EngineSpec
from rlctl.config.installed import fields_of
from rlctl.config.load import Resolved
from rlctl.config.passthrough import TARGETS, not_checked
from rlctl.planner.plan import Plan
from rlctl.rl.crew import CrewSpec

OWN_CHOICE = "the engine's own choice"


@dataclass(frozen=True)
class EngineArguments:
    """By configuration section, what its class is built from: rlctl's values with those passed through over them."""

    classes: dict[str, str]
    given: dict[str, dict[str, Any]]
    ours: dict[str, dict[str, Any]]
    """Without what the user passes through."""

    @classmethod
    def of_engine(cls, engine: EngineSpec) -> EngineArguments:
        """Of an engine without a policy."""
        usual = {key: value for key, value in engine.arguments.items() if key not in engine.passed} | engine.replaced
        return cls(
            {"vllm": TARGETS["vllm"].name},
            {"vllm": _known("vllm", TARGETS["vllm"].name, engine.arguments)},
            {"vllm": usual},
        )

    @classmethod
    def of_plan(cls, plan: Plan, spec: CrewSpec) -> EngineArguments:
        """Of what a plan starts; a backend that is not there has none."""
        return cls.of(spec) if plan.backend == "megatron" else cls.of_engine(spec.engine)

    @classmethod
    def of(cls, spec: CrewSpec) -> EngineArguments:
        """Of a policy and its engines."""
        policy, engine = spec.policy, spec.engine
        ours = {
            "megatron": transformer_values(policy, has_transformer_engine(policy)),
            "ddp": ddp_values(policy),
            "optimizer": optimizer_values(policy),
            "vllm": {key: value for key, value in engine.arguments.items() if key not in engine.passed}
            | engine.replaced,
        }
        passed = {
            "megatron": policy.megatron,
            "ddp": policy.ddp,
            "optimizer": policy.optimizer.passed,
            "vllm": engine.passed,
        }
        classes = {section: target.name for section, target in TARGETS.items()}
        if policy.facts.mla is None:
            classes["megatron"] = "TransformerConfig"
        given = {section: _known(section, classes[section], ours[section] | passed[section]) for section in ours}
        return cls(classes, given, ours)

    def pinned(self, resolved: Resolved) -> list[str]:
        """A line for each value that the user passes through, with what it would be otherwise."""
        lines = []
        for section in self.given:
            for key, value in getattr(resolved.config, section).passed.items():
                usual = self._usual(section, key)
                if usual != value:
                    origin = resolved.origin[f"{section}.{key}"]
                    lines.append(f"{section}.{key} = {value!r} ({origin}); without it: {usual}")
        return lines

    def _usual(self, section: str, key: str) -> Any:
        if key in self.ours[section]:
            return self.ours[section][key]
        field = (TARGETS[section].fields() or {}).get(key)
        try:
            return ast.literal_eval(field.default or "") if field else OWN_CHOICE
        except (ValueError, SyntaxError):
            return OWN_CHOICE  # an expression of the engine's code

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Values by section and field; what JSON cannot hold as text."""
        return {
            section: {key: _plain(value) for key, value in values.items()} for section, values in self.given.items()
        }

    def text(self) -> Iterator[str]:
        """Lines for a reader at the terminal, a class each with its fields below."""
        for section, values in self.given.items():
            yield f"{self.classes[section]}:"
            yield from (f"  {key} = {value!r}" for key, value in values.items())


def _known(section: str, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the installed version has a field for, as the engines' own code drops the others."""
    fields = fields_of(TARGETS[section].module, name)
    return dict(values) if fields is None else {key: value for key, value in values.items() if key in fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def differences(resolved: Resolved) -> list[str]:
    """What of an imported recipe runs otherwise than it says, and what could not be checked here, a line each."""
    changed = [f"runs differently: {line}" for line in resolved.changed]
    notes = not_checked(list(resolved.origin))
    if resolved.config.megatron.passed.get("fp8") and find_spec("transformer_engine") is None:
        notes.append("megatron.fp8 needs TransformerEngine where the GPUs are; it is not installed here")
    return changed + [f"note: {line}." for line in notes]
