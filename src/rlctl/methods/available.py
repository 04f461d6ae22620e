"""Algorithms that are built in, registered by a program, brought by an installed package, or in a user's file."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlctl.config.plugins import find_plugin, load_plugin, origin, plugin_names
from rlctl.errors import ConfigError, InputError, suggest
from rlctl.isolation.user_function import UserCode, is_reference
from rlctl.methods.rl.advantage_trial import require_advantages
from rlctl.methods.rl.algorithm import NAMES_OF_A_STEP, Algorithm
from rlctl.settings.config import RlctlConfig
from rlctl.training.user_loss import UserLoss

Factory = Callable[[RlctlConfig], Algorithm]

GRPO = "rlctl.methods.rl.grpo:Grpo"
BUILT_IN = {
    "grpo": GRPO,
    "dr-grpo": GRPO,
    "dapo": GRPO,
    "rloo": GRPO,
    "reinforce++": GRPO,
    "reinforce++-baseline": GRPO,
    "ppo": GRPO,
    "gspo": "rlctl.methods.rl.gspo:Gspo",
    "cispo": "rlctl.methods.rl.cispo:Cispo",
    "dppo": "rlctl.methods.rl.dppo:Dppo",
    "sapo": "rlctl.methods.rl.sapo:Sapo",
    "distillation": "rlctl.methods.rl.distillation:Distillation",
}
"""Classes by name; those that share one differ by what `config/algorithm_settings.py` sets for them."""
OF_TEXTS = {
    "sft": "rlctl.methods.sft:Sft",
    "dpo": "rlctl.methods.preference:Dpo",
    "distill": "rlctl.methods.distill:Distill",
    "kto": "rlctl.methods.kto:Kto",
    "rm": "rlctl.methods.reward_model:Rm",
}
"""Classes of those that learn from a dataset, each of which is a command of `train`."""
OWN = BUILT_IN | OF_TEXTS
_registered: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Add an algorithm; processes of the policy can import `factory`. Raises ValueError for a name that is taken."""
    if name in OWN or _registered.get(name, factory) is not factory:
        raise ValueError(f"there is an algorithm {name!r} already")
    _registered[name] = factory


def require_algorithm(config: RlctlConfig) -> None:
    """Raise InputError or ConfigError for an unknown `run.algorithm`, or one whose teacher is missing or idle."""
    factory = _factory(config.run.algorithm)
    if config.run.algorithm in OWN:
        _require_fitting_teacher(config, factory(config))


def algorithm_from_config(config: RlctlConfig) -> Algorithm:
    """Return the algorithm that `run.algorithm` names, with the loss that `loss.function` names.

    Raises InputError or ConfigError where a name is unknown, a user's file does not work, or the algorithm requires
    log-probs that the configuration does not have computed.
    """
    algorithm, what = _factory(config.run.algorithm)(config), f"algorithm {config.run.algorithm}"
    if config.run.algorithm in OWN and config.data.rows != algorithm.rows:
        raise ConfigError(
            f"The algorithm {config.run.algorithm} learns from {algorithm.rows}, and data.rows = {config.data.rows}.",
            "Leave data.rows out: the algorithm sets it.",
        )
    _require_fitting_teacher(config, algorithm)
    if missing := sorted(algorithm.requires - config.logprobs_needed):
        needs = ",".join(sorted(algorithm.requires | config.logprobs_needed))
        raise ConfigError(f"The {what} needs {' and '.join(missing)}.", f"Add --set loss.needs=[{needs}].")
    if config.run.algorithm not in OWN and algorithm.rows == "prompts":
        require_advantages(algorithm, what)
    if config.loss.function:
        loss = UserLoss.tried(config.loss.function, config.loss, algorithm.needs, algorithm.teacher_top)
        algorithm.use(loss)
        what = f"loss function {loss.code.reference}"
    names = [metric.name for metric in algorithm.metrics]
    for name in names:
        parts = name.split("/")
        outer = {"/".join(parts[:count]) for count in range(1, len(parts))}
        if parts[0] in NAMES_OF_A_STEP or outer.intersection(names) or names.count(name) > 1:
            raise ConfigError(
                f"The metric {name!r} of the {what} has the name of another one.",
                "Call it otherwise, such as own/NAME.",
            )
    return algorithm


def _require_fitting_teacher(config: RlctlConfig, algorithm: Algorithm) -> None:
    """Raise ConfigError where a teacher is needed and not there, or is there and nothing learns from it."""
    name, teacher, column = config.run.algorithm, config.teacher.model, "teacher_logprobs"
    if not teacher and column in algorithm.requires | config.logprobs_needed:
        what = f"The algorithm {name}" if column in algorithm.requires else "loss.needs = teacher_logprobs"
        raise ConfigError(f"{what} needs a teacher, and there is none.", "Name one: --teacher NAME (teacher.model).")
    if teacher and name in OWN and column not in algorithm.requires and not config.loss.function:
        raise ConfigError(
            f"teacher.model = {teacher}, but the algorithm {name} learns nothing from a teacher.",
            "Add --algorithm distillation, take `train distill`, or leave the teacher out.",
        )


def _factory(name: str) -> Factory:
    if name in _registered:
        return _registered[name]
    if name in OWN:
        module, _, factory = OWN[name].partition(":")
        return getattr(importlib.import_module(module), factory)
    if is_reference(name):
        return OutsideAlgorithm(name, code=UserCode.read(name, "Algorithm"))
    if entry := find_plugin("rlctl.algorithms", name):
        return OutsideAlgorithm(name, package=origin(entry))
    known = (*OWN, *_registered, *plugin_names("rlctl.algorithms"))
    same = [one for one in known if _letters(one) == _letters(name)]
    meant = f"Did you mean {same[0]}?" if same else suggest(name, known)
    there = f"There are {', '.join(known)} and path/to/file.py:Class."
    raise ConfigError(f"Unknown algorithm {name!r} (run.algorithm).", f"{meant} {there}" if meant else there)


def _letters(name: str) -> str:
    """Return what `dr_grpo` and `Dr.GRPO`, or `rpp` and `reinforce_plus_plus`, have in common."""
    letters = re.sub(r"[^a-z+]", "", name.lower())
    return re.sub("^(reinforceplusplus|reinforcepp|rpp)", "reinforce++", letters)


@dataclass(frozen=True)
class OutsideAlgorithm:
    """Makes the algorithm of a user's class, pickled with its file's source, or of an installed package, pickled as its
    name, so that every process imports it for itself."""

    name: str
    code: UserCode | None = None
    package: str | None = None
    """The package with its version, which a resume compares."""

    def __call__(self, config: RlctlConfig) -> Algorithm:
        """Raises InputError where the package is not installed here, or it is not a class of an algorithm."""
        what = f"Algorithm {self.code.reference if self.code else self.name!r}"
        if self.code is not None:
            made: Any = self.code.load()
        elif (entry := find_plugin("rlctl.algorithms", self.name)) is not None:
            what, made = f"{what} of {self.package}", load_plugin(entry)
        else:
            hint = "Install that package on every node."
            raise InputError(f"{what} is of {self.package}, which is not installed here.", hint)
        if not (isinstance(made, type) and issubclass(made, Algorithm)):
            raise InputError(f"{what} is not a class of an algorithm.", "Derive it from rlctl.Algorithm.")
        if missing := sorted(made.__abstractmethods__):
            hint = "Both are described in docs/training.md."
            raise InputError(f"{what} does not define {' and '.join(missing)}.", hint)
        try:
            algorithm = made(config)
        except Exception as error:
            if self.code is None:
                raise
            raise self.code.error(error, "being made") from error
        algorithm.made_by = self
        return algorithm
