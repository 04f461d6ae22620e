"""Training methods and RL algorithms by name: built in, registered by a program, of an installed package, or in a
user's file.

A package registers a method in the entry-point group `rlctl.methods` and an RL algorithm in `rlctl.algorithms`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rlctl.config.plugins import EntryPointGroup, find_plugin, load_plugin, origin, plugin_names
from rlctl.config.section import Section, given_keys
from rlctl.config.user_code import UserCode, is_reference
from rlctl.errors import ConfigError, InputError, RlctlError, suggest
from rlctl.methods.rl.advantage_trial import require_advantages
from rlctl.methods.rl.algorithm import Algorithm
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.settings.config import RlctlConfig, RolloutConfig
from rlctl.training.method import Method
from rlctl.training.step_metrics import NAMES_OF_A_STEP
from rlctl.training.trial import require_loss
from rlctl.training.user_loss import UserLoss

Factory = Callable[[Any], Method]

RL = "rlctl.methods.rl"
ALGORITHMS = {
    "grpo": f"{RL}.grpo:Grpo",
    "dr-grpo": f"{RL}.grpo:DrGrpo",
    "dapo": f"{RL}.grpo:Dapo",
    "rloo": f"{RL}.grpo:Rloo",
    "reinforce++": f"{RL}.grpo:ReinforcePlusPlus",
    "reinforce++-baseline": f"{RL}.grpo:ReinforcePlusPlusBaseline",
    "ppo": f"{RL}.grpo:Ppo",
    "gspo": f"{RL}.gspo:Gspo",
    "cispo": f"{RL}.cispo:Cispo",
    "dppo": f"{RL}.dppo:Dppo",
    "sapo": f"{RL}.sapo:Sapo",
    "distillation": f"{RL}.distillation:Distillation",
}
"""RL algorithms, which `rlctl train grpo --algorithm NAME` runs."""
METHODS = {
    "sft": "rlctl.methods.sft:Sft",
    "dpo": "rlctl.methods.preference:Dpo",
    "kto": "rlctl.methods.kto:Kto",
    "rm": "rlctl.methods.reward_model:RewardModel",
    "distill": "rlctl.methods.distill:Distill",
}
"""Methods with a command `rlctl train NAME`."""
BUILT_IN = ALGORITHMS | METHODS
GROUPS: tuple[EntryPointGroup, ...] = ("rlctl.algorithms", "rlctl.methods")
_registered: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Add a method or algorithm; processes of the policy can import `factory`. Raises ValueError for a name that is
    taken."""
    if name in BUILT_IN or _registered.get(name, factory) is not factory:
        raise ValueError(f"there is an algorithm {name!r} already")
    _registered[name] = factory


def registered() -> tuple[str, ...]:
    """Return the names that this program has registered."""
    return tuple(_registered)


def commands() -> dict[str, type[Method]]:
    """Return the method of each command `rlctl train NAME`. A package that cannot be imported has none."""
    classes: dict[str, Any] = {"grpo": _built_in("grpo")} | {name: _built_in(name) for name in METHODS}
    for name in plugin_names("rlctl.methods"):
        with suppress(InputError):
            if name not in classes and (entry := find_plugin("rlctl.methods", name)) is not None:
                classes[name] = load_plugin(entry)
    return classes


def methods() -> tuple[str, ...]:
    """Return the names of all methods, which are the names of their commands."""
    return tuple(dict.fromkeys(("grpo", *METHODS, *plugin_names("rlctl.methods"))))


def method_class(name: str) -> type[Method] | None:
    """Return the class that `run.algorithm` = `name` makes, for its configuration; None where it cannot be loaded,
    which `method_from_config` explains."""
    if not isinstance(name, str):
        return None
    if name in BUILT_IN:
        return _built_in(name)
    made: Any = _registered.get(name)
    with suppress(RlctlError):
        if made is None and is_reference(name):
            made = UserCode.read(name, "Algorithm").load()
        entries = (find_plugin(group, name) for group in GROUPS) if made is None else ()
        if (entry := next(filter(None, entries), None)) is not None:
            made = load_plugin(entry)
    return made if isinstance(made, type) and issubclass(made, Method) else None


def config_class(name: str) -> type[RlctlConfig]:
    """Return the configuration class of a method or an algorithm; RL's for an unknown one."""
    method = method_class(name)
    return RlConfig if method is None else method.Config


def config_classes() -> tuple[type[RlctlConfig], ...]:
    """Return every configuration class that is known without loading a user's file: which keys there are at all."""
    classes = [RlConfig, *(_built_in(name).Config for name in BUILT_IN), RolloutConfig]
    classes += [method.Config for method in commands().values()]
    classes += [method.Config for name in plugin_names("rlctl.algorithms") if (method := method_class(name))]
    classes += [made.Config for made in _registered.values() if isinstance(made, type) and issubclass(made, Method)]
    return tuple(dict.fromkeys(classes))


def names() -> tuple[str, ...]:
    """Return the names of all methods and RL algorithms that are known without a user's file."""
    return tuple(dict.fromkeys((*BUILT_IN, *_registered, *(name for group in GROUPS for name in plugin_names(group)))))


def algorithms() -> tuple[str, ...]:
    """Return the names of all RL algorithms that are known without a user's file."""
    return tuple(name for name in names() if command_of(name) == "train grpo")


def defaults_of(name: str) -> dict[str, Any]:
    """Return a method's or algorithm's values that replace defaults, by key: `defaults`, and arguments of the sections
    in its configuration class, such as `batch: BatchConfig = BatchConfig(prompts=4)`."""
    if (method := method_class(name)) is None:
        return {}
    sections = {name: field.default for name, field in method.Config.model_fields.items()}
    of_sections = (
        given_keys(section, f"{name}.") for name, section in sections.items() if isinstance(section, Section)
    )
    return dict(chain.from_iterable(of_sections)) | dict(method.defaults)


def command_of(name: str) -> str:
    """Return the command that trains with a method or algorithm."""
    method = method_class(name)
    return f"train {method.command if method and method.command else 'grpo'}"


def method_from_config(config: RlctlConfig, *, tries_loss: bool = True) -> Method:
    """Return the method that `run.algorithm` names, with the loss that `loss.function` names.

    Raises InputError or ConfigError where a name is unknown, a user's file does not work, or the method requires
    log-probs that the configuration does not have computed. `tries_loss` off: a loss of the user's is not run.
    """
    method, what = _factory(config.run.algorithm)(config), f"algorithm {config.run.algorithm}"
    if config.run.method is not None and command_of(config.run.algorithm) != f"train {config.run.method}":
        raise ConfigError(
            f"run.algorithm = {config.run.algorithm} is not of run.method = {config.run.method}.",
            "Leave one of them out.",
        )
    _require_fitting_teacher(config, method)
    if not tries_loss:
        return method
    if missing := sorted(method.requires - method.needs):
        needs = ",".join(sorted(method.requires | method.needs))
        raise ConfigError(f"The {what} needs {' and '.join(missing)}.", f"Add --set loss.needs=[{needs}].")
    if config.run.algorithm not in BUILT_IN:
        if isinstance(method, Algorithm):
            require_advantages(method, method.config.batch.generations, what)
        require_loss(method, what)
    if function := method.config.loss.function:
        options = method.config.loss
        loss = UserLoss.tried(function, options.params, options, method.needs, method.teacher_top)
        method.use(loss)
        what = f"loss function {loss.code.reference}"
    names = [metric.name for metric in method.metrics]
    for name in names:
        parts = name.split("/")
        outer = {"/".join(parts[:count]) for count in range(1, len(parts))}
        if parts[0] in NAMES_OF_A_STEP or outer.intersection(names) or names.count(name) > 1:
            raise ConfigError(
                f"The metric {name!r} of the {what} has the name of another one.",
                "Call it otherwise, such as own/NAME.",
            )
    return method


def _require_fitting_teacher(config: RlctlConfig, method: Method) -> None:
    """Raise ConfigError where a teacher is needed and not there, or is there and nothing learns from it."""
    name, column = config.run.algorithm, "teacher_logprobs"
    if not config.has_teacher and column in method.requires | method.needs:
        what = f"The algorithm {name}" if column in method.requires else "loss.needs = teacher_logprobs"
        raise ConfigError(
            f"{what} needs a teacher.", "Name one: --teacher NAME (teacher.model), or set teacher.policy=true."
        )
    if config.has_teacher and name in BUILT_IN and column not in method.requires and not method.config.loss.function:
        named = "policy = true" if config.own_teacher else "models"
        named = f"model = {config.named_teacher.model}" if config.named_teacher else named
        raise ConfigError(
            f"teacher.{named}, but the algorithm {name} learns nothing from a teacher.",
            "Add --algorithm distillation, take `train distill`, or leave the teacher out.",
        )


def _built_in(name: str) -> type[Method]:
    module, _, factory = BUILT_IN[name].partition(":")
    return getattr(importlib.import_module(module), factory)


def _factory(name: str) -> Factory:
    if name in _registered:
        return _registered[name]
    if name in BUILT_IN:
        return _built_in(name)
    if is_reference(name):
        return OutsideMethod(name, code=UserCode.read(name, "Algorithm"))
    if entry := next(filter(None, (find_plugin(group, name) for group in GROUPS)), None):
        return OutsideMethod(name, package=origin(entry))
    names = algorithms()
    alike = [algorithm for algorithm in names if _letters(algorithm) == _letters(name)]
    near = f"Did you mean {alike[0]}?" if alike else suggest(name, names)
    choices = f"There are {', '.join(names)} and path/to/file.py:Class."
    raise ConfigError(f"Unknown algorithm {name!r} (run.algorithm).", f"{near} {choices}" if near else choices)


def _letters(name: str) -> str:
    """Return what `dr_grpo` and `Dr.GRPO`, or `rpp` and `reinforce_plus_plus`, have in common."""
    letters = re.sub(r"[^a-z+]", "", name.lower())
    return re.sub("^(reinforceplusplus|reinforcepp|rpp)", "reinforce++", letters)


@dataclass(frozen=True)
class OutsideMethod:
    """Makes a method from a user's class, pickled with its file's source, or from an installed package, pickled by
    name: each process imports it separately."""

    name: str
    code: UserCode | None = None
    package: str | None = None
    """The package with its version, which a resume compares."""

    def __call__(self, config: RlctlConfig) -> Method:
        """Raise InputError where the package is not installed here, or it is not a class of a method."""
        what = f"Algorithm {self.code.reference if self.code else self.name!r}"
        if self.code is not None:
            made: Any = self.code.load()
        elif entry := next(filter(None, (find_plugin(group, self.name) for group in GROUPS)), None):
            what, made = f"{what} of {self.package}", load_plugin(entry)
        else:
            hint = "Install that package on every node."
            raise InputError(f"{what} is of {self.package}, which is not installed here.", hint)
        if not (isinstance(made, type) and issubclass(made, Method)):
            raise InputError(f"{what} is not a class of an algorithm.", "Derive it from rlctl.Algorithm.")
        if missing := sorted(made.__abstractmethods__):
            hint = "Both are described in docs/training.md."
            raise InputError(f"{what} does not define {' and '.join(missing)}.", hint)
        try:
            method = made(config)
        except Exception as error:
            if self.code is None:
                raise
            raise self.code.error(error, "being made") from error
        method.made_by = self
        return method


__all__ = ["ALGORITHMS", "BUILT_IN", "METHODS", "Algorithm", "commands", "config_class", "method_from_config"]
