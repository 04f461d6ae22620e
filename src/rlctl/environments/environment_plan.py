"""The environment of a run as plain data, and the class that a process loads from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

from rlctl.config.plugins import load_named, plugin_names
from rlctl.config.user_code import UserCode, is_reference
from rlctl.environments.adapters import ADAPTERS
from rlctl.environments.builtin import BUILT_IN
from rlctl.environments.interface import Agent, Environment
from rlctl.environments.sandboxes import SandboxPlan
from rlctl.environments.tools import schema_of
from rlctl.errors import InputError, suggest
from rlctl.processes.child import shell_variables
from rlctl.settings.rewards import EnvironmentConfig

SHIPPED = BUILT_IN | ADAPTERS
NOT_TOOLS = ("reset", "step", "close", "prepare", "get_reward")


@dataclass(frozen=True)
class EnvironmentPlan:
    """The environment of a run as plain data; made by `plan_environment`."""

    name: str
    """The user's name for it; empty: tools alone."""
    params: dict[str, Any]
    code: UserCode | None
    """The class, if it is in a user's file."""
    tools: tuple[UserCode, ...]
    """User functions that the model may call."""
    memory_gib: float
    sandbox: SandboxPlan
    """Where programs run."""
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    """JSON schemas of the tools, by name."""
    form: str = "hermes"
    """The format of tool calls."""
    tool_role: str = "user"
    """The role of messages with tool results."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Environment variables of user classes and functions."""

    @property
    def label(self) -> str:
        return self.name or "the tools"

    def load(self) -> LoadedEnvironment:
        """Import the class and the tools. Raises InputError if that fails."""
        functions = {code.name: code.load() for code in self.tools}
        return LoadedEnvironment(self, self._class(), functions)

    def _class(self) -> type:
        if not self.name:
            return Environment
        # `plan_environment` checked the name.
        kind = self.code.load() if self.code is not None else load_named("rlctl.environments", self.name, SHIPPED)
        if not inspect.isclass(kind) or not (issubclass(kind, Agent) or callable(getattr(kind, "reset", None))):
            raise InputError(
                f"Environment {self.label!r} is not a class with a method `reset`.",
                "The form of an environment is in docs/environments.md.",
            )
        return kind


class LoadedEnvironment:
    """The environment's class and tool functions, checked."""

    def __init__(self, plan: EnvironmentPlan, kind: type, functions: dict[str, Callable[..., Any]]) -> None:
        self.plan, self.kind, self.functions = plan, kind, functions
        runs = issubclass(kind, Agent)
        if plan.sandbox.words and not (runs and kind.sandboxed):
            raise InputError(
                f"environment.sandbox = {plan.sandbox.words[0]} is for programs, and environment {plan.label!r} starts "
                "none in a sandbox.",
                "Leave it out. The environments program, verifiers and harbor have sandboxes.",
            )
        plan = self.plan = replace(plan, sandbox=plan.sandbox.of_containers()) if runs and kind.containers else plan
        plan.sandbox.kind.require(plan.sandbox)
        methods = [] if runs else list(getattr(kind, "tools", ()))
        self.steps = runs or (kind is not Environment and getattr(kind, "step", None) not in (None, Environment.step))
        if not self.steps and not methods and kind is not Environment:
            methods = [n for n, f in inspect.getmembers(kind, callable) if not n.startswith("_") and n not in NOT_TOOLS]
        if missing := [name for name in methods if not callable(getattr(kind, name, None))]:
            raise InputError(f"Environment {plan.label!r} names a tool {missing[0]!r} and has no such method.")
        self.methods = methods
        if not self.steps and not methods and not functions:
            raise InputError(
                f"Environment {plan.label!r} has no method `step` and no tools.",
                "The form of an environment is in docs/environments.md.",
            )
        try:
            inspect.signature(kind).bind(**plan.params)
        except TypeError as error:
            takes = ", ".join(inspect.signature(kind).parameters) or "none"
            said = " ".join(inspect.cleandoc(vars(kind).get("__doc__") or "").partition("\n\n")[0].split())
            raise InputError(
                f"Environment {plan.label!r} does not take these parameters (environment.params): {error}.",
                f"Its parameters are: {takes}. {said}".rstrip(),
            ) from error
        prepare = getattr(kind, "prepare", None)
        self.note = str(prepare(**plan.params) or "") if prepare else ""

    def schemas(self) -> dict[str, dict[str, Any]]:
        tools = {name: MethodType(getattr(self.kind, name), self) for name in self.methods} | self.functions
        owner = f" of {self.plan.label}" if self.plan.name else ""
        return {name: schema_of(function, f"{name!r}{owner}") for name, function in tools.items()}


def plan_environment(config: EnvironmentConfig) -> EnvironmentPlan:
    """Return the plan of a run's environment without running it. Raises InputError for unknown names."""
    name, code = config.name or "", None
    if is_reference(name):
        code = UserCode.read(name, "Environment")
    elif name and name not in SHIPPED and name not in plugin_names("rlctl.environments"):
        names = (*sorted(SHIPPED), *plugin_names("rlctl.environments"))
        hint = suggest(name, names) or f"Environments are {', '.join(names)} and path/to/file.py:Class."
        raise InputError(f"Unknown environment {name!r} (--env).", hint)
    tools = tuple(UserCode.read(tool, "Tool") for tool in config.tools)
    return EnvironmentPlan(
        name, dict(config.params), code, tools, config.memory_gib, SandboxPlan.of(config), variables=shell_variables()
    )
