"""The environment of a run as plain data, and the class that a process loads from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from rlctl.config.plugins import load_named, plugin_names
from rlctl.environments.adapters import ADAPTERS
from rlctl.environments.builtin import BUILT_IN
from rlctl.environments.interface import Environment
from rlctl.environments.tools import schema_of
from rlctl.errors import InputError, suggest
from rlctl.isolation.child_process import shell_variables
from rlctl.isolation.user_function import UserCode, is_reference
from rlctl.settings.rewards import EnvironmentConfig

SHIPPED = BUILT_IN | ADAPTERS
NOT_TOOLS = ("reset", "step", "close", "prepare", "get_reward")


@dataclass(frozen=True)
class EnvironmentPlan:
    """The environment of a run as plain data; made by `plan_environment`."""

    name: str
    """The name that the user gave it; empty: there are only tools."""
    params: dict[str, Any]
    code: UserCode | None
    """The class, where it is in a file of the user's."""
    tools: tuple[UserCode, ...]
    """Functions of the user's that the model may call."""
    memory_gib: float
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The JSON schema of each tool, by its name."""
    form: str = "hermes"
    """The format in which the model writes calls."""
    tool_role: str = "user"
    """The role of the messages that hold results of tools."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Environment variables of the user's classes and functions."""

    @property
    def label(self) -> str:
        return self.name or "the tools"

    def load(self) -> LoadedEnvironment:
        """Import what episodes need. Raises InputError where that fails."""
        functions = {code.name: code.load() for code in self.tools}
        return LoadedEnvironment(self, self._class(), functions)

    def _class(self) -> type:
        if not self.name:
            return Environment
        if self.code is not None:
            found = self.code.load()
        else:  # `plan_environment` has found the name
            found = load_named("rlctl.environments", self.name, SHIPPED)
        if not inspect.isclass(found) or not callable(getattr(found, "reset", None)):
            raise InputError(
                f"Environment {self.label!r} is not a class with a method `reset`.",
                "The form of an environment is in docs/environments.md.",
            )
        return found


class LoadedEnvironment:
    """The environment's class and tool functions, checked."""

    def __init__(self, plan: EnvironmentPlan, kind: type, functions: dict[str, Callable[..., Any]]) -> None:
        self.plan, self.kind, self.functions = plan, kind, functions
        own = list(getattr(kind, "tools", ()))
        self.steps = kind is not Environment and getattr(kind, "step", None) not in (None, Environment.step)
        if not self.steps and not own and kind is not Environment:
            own = [n for n, f in inspect.getmembers(kind, callable) if not n.startswith("_") and n not in NOT_TOOLS]
        if missing := [name for name in own if not callable(getattr(kind, name, None))]:
            raise InputError(f"Environment {plan.label!r} names a tool {missing[0]!r} and has no such method.")
        self.methods = own
        if not self.steps and not own and not functions:
            raise InputError(
                f"Environment {plan.label!r} has no method `step` and no tools.",
                "The form of an environment is in docs/environments.md.",
            )
        try:
            inspect.signature(kind).bind(**plan.params)
        except TypeError as error:
            takes = ", ".join(inspect.signature(kind).parameters) or "none"
            raise InputError(
                f"Environment {plan.label!r} does not take these parameters (environment.params): {error}.",
                f"Its parameters are: {takes}.",
            ) from error
        prepare = getattr(kind, "prepare", None)
        self.note = str(prepare(**plan.params) or "") if prepare else ""

    def schemas(self) -> dict[str, dict[str, Any]]:
        found = {name: MethodType(getattr(self.kind, name), self) for name in self.methods} | self.functions
        of = f" of {self.plan.label}" if self.plan.name else ""
        return {name: schema_of(function, f"{name!r}{of}") for name, function in found.items()}


def plan_environment(config: EnvironmentConfig) -> EnvironmentPlan:
    """Return the plan of a run's environment without running it. Raises InputError for unknown names."""
    name, code = config.name or "", None
    if is_reference(name):
        code = UserCode.read(name, "Environment")
    elif name and name not in SHIPPED and name not in plugin_names("rlctl.environments"):
        known = (*sorted(SHIPPED), *plugin_names("rlctl.environments"))
        hint = suggest(name, known) or f"Environments are {', '.join(known)} and path/to/file.py:Class."
        raise InputError(f"Unknown environment {name!r} (--env).", hint)
    tools = tuple(UserCode.read(one, "Tool") for one in config.tools)
    return EnvironmentPlan(name, dict(config.params), code, tools, config.memory_gib, variables=shell_variables())
