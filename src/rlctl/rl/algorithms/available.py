"""Algorithms that are built in, registered by a program, brought by an installed package, or in a user's file; losses
from such files.

A user's loss is tried before a run, in a process of its own: its file imports torch, which the driver does without.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rlctl.backends.batch import TokenBatch
from rlctl.child import call_in_child
from rlctl.config.plugins import find_plugin, load_plugin, origin, plugin_names
from rlctl.config.schema import RlctlConfig
from rlctl.data.rollouts import Rollout, RolloutGroup
from rlctl.envs.user_function import UserCode, is_reference
from rlctl.errors import ConfigError, InputError, suggest
from rlctl.rl.algorithms.algorithm import NAMES_OF_A_STEP, Algorithm
from rlctl.telemetry.metrics import Metric

if TYPE_CHECKING:
    import numpy as np
    import torch

Factory = Callable[[RlctlConfig], Algorithm]

GRPO = "rlctl.rl.algorithms.grpo:Grpo"
BUILT_IN = {
    "grpo": GRPO,
    "dr-grpo": GRPO,
    "dapo": GRPO,
    "rloo": GRPO,
    "reinforce++": GRPO,
    "reinforce++-baseline": GRPO,
    "ppo": GRPO,
    "gspo": "rlctl.rl.algorithms.gspo:Gspo",
    "cispo": "rlctl.rl.algorithms.cispo:Cispo",
    "dppo": "rlctl.rl.algorithms.dppo:Dppo",
    "sapo": "rlctl.rl.algorithms.sapo:Sapo",
    "distillation": "rlctl.rl.algorithms.distillation:Distillation",
}
"""Classes by name; those that share one differ by what `config/algorithm_settings.py` sets for them."""
OF_TEXTS = {"sft": "rlctl.rl.algorithms.sft:Sft", "dpo": "rlctl.rl.algorithms.dpo:Dpo"}
"""Classes of those that learn from a dataset, each of which is a command of `train`."""
OWN = BUILT_IN | OF_TEXTS
_registered: dict[str, Factory] = {}

FORM = "Its form is `def loss(batch)` or `def loss(batch, options)`: see docs/training.md."
TRIAL_TIMEOUT_S = 300.0
TRIAL_TOKENS = 7


def register(name: str, factory: Factory) -> None:
    """Add an algorithm. `factory` is a class or function that the policy's processes can import.

    Raises ValueError where the name is taken by another.
    """
    if name in OWN or _registered.get(name, factory) is not factory:
        raise ValueError(f"there is an algorithm {name!r} already")
    _registered[name] = factory


def require_algorithm(config: RlctlConfig) -> None:
    """Raise InputError or ConfigError where `run.algorithm` names none, or one of rlctl's own that goes with a teacher
    and has none, or the other way round; nothing of a user's is made."""
    factory = _factory(config.run.algorithm)
    if config.run.algorithm in OWN:
        _require_fitting_teacher(config, factory(config))


def algorithm_from_config(config: RlctlConfig) -> Algorithm:
    """Return the algorithm that `run.algorithm` names, with the loss that `loss.function` names.

    Raises InputError or ConfigError where a name is unknown, a user's file does not work, or the algorithm requires
    log-probs that the configuration does not have computed.
    """
    algorithm = _factory(config.run.algorithm)(config)
    if config.run.algorithm in OWN and config.data.rows != algorithm.rows:
        raise ConfigError(
            f"The algorithm {config.run.algorithm} learns from {algorithm.rows}, and data.rows = {config.data.rows}.",
            "Leave data.rows out: the algorithm sets it.",
        )
    _require_fitting_teacher(config, algorithm)
    if missing := sorted(algorithm.requires - config.logprobs_needed):
        needs = ",".join(sorted(algorithm.requires | config.logprobs_needed))
        raise ConfigError(
            f"The algorithm {config.run.algorithm} needs {' and '.join(missing)}.", f"Add --set loss.needs=[{needs}]."
        )
    if not config.loss.function:
        _require_free_names(algorithm, f"algorithm {config.run.algorithm}")
        return algorithm
    code = UserCode.read(config.loss.function, "Loss")
    untried = UserLoss(algorithm, code)
    doing = f"the trial of loss function {code.reference}"
    loss = UserLoss(algorithm, code, call_in_child(doing, partial(trial, untried), limit_s=TRIAL_TIMEOUT_S))
    _require_free_names(loss, f"loss function {code.reference}")
    return loss


def _require_free_names(algorithm: Algorithm, what: str) -> None:
    """Raise ConfigError for a metric of `what` that would replace another one in metrics.jsonl."""
    names = [metric.name for metric in algorithm.metrics]
    for name in names:
        parts = name.split("/")
        outer = {"/".join(parts[:count]) for count in range(1, len(parts))}
        if parts[0] in NAMES_OF_A_STEP or outer.intersection(names) or names.count(name) > 1:
            raise ConfigError(
                f"The metric {name!r} of the {what} has the name of another one.",
                "Call it otherwise, such as own/NAME.",
            )


def _require_fitting_teacher(config: RlctlConfig, algorithm: Algorithm) -> None:
    """Raise ConfigError where a teacher is needed and not there, or is there and nothing learns from it."""
    name, teacher, column = config.run.algorithm, config.teacher.model, "teacher_logprobs"
    if not teacher and column in algorithm.requires | config.logprobs_needed:
        what = f"The algorithm {name}" if column in algorithm.requires else "loss.needs = teacher_logprobs"
        raise ConfigError(f"{what} needs a teacher, and there is none.", "Name one: --teacher NAME (teacher.model).")
    if teacher and name in OWN and column not in algorithm.requires and not config.loss.function:
        raise ConfigError(
            f"teacher.model = {teacher}, but the algorithm {name} learns nothing from a teacher.",
            "Add --algorithm distillation, or leave the teacher out.",
        )


def _factory(name: str) -> Factory:
    if name in _registered:
        return _registered[name]
    if name in OWN:
        module, _, factory = OWN[name].partition(":")
        return getattr(importlib.import_module(module), factory)
    if is_reference(name):
        return UserAlgorithm(UserCode.read(name, "Algorithm"))
    if entry := find_plugin("rlctl.algorithms", name):
        return PluginAlgorithm(name, origin(entry))
    known = (*OWN, *_registered, *plugin_names("rlctl.algorithms"))
    raise ConfigError(
        f"Unknown algorithm {name!r} (run.algorithm).",
        " ".join(filter(None, [_meant(name, known), f"There are {', '.join(known)} and path/to/file.py:Class."])),
    )


def _meant(name: str, known: Sequence[str]) -> str | None:
    """Return a suggestion for a name that is spelled in another way, such as `dr_grpo` or `reinforce_plus_plus`."""

    def spelled(text: str) -> str:
        letters = re.sub(r"[^a-z+]", "", text.lower())
        return re.sub("^(reinforceplusplus|reinforcepp|rpp)", "reinforce++", letters)

    same = [one for one in known if spelled(one) == spelled(name)]
    return f"Did you mean {same[0]}?" if same else suggest(name, known)


@dataclass(frozen=True)
class UserAlgorithm:
    """Makes the algorithm of a user's class; pickled with the file's source."""

    code: UserCode

    def __call__(self, config: RlctlConfig) -> Algorithm:
        """Raises InputError where the class is none, or cannot be made."""
        make = _checked_class(self.code.load(), f"Algorithm {self.code.reference!r}")
        try:
            algorithm = make(config)
        except Exception as error:
            raise self.code.error(error, "being made") from error
        algorithm.made_by = self
        return algorithm


@dataclass(frozen=True)
class PluginAlgorithm:
    """Makes the algorithm of an installed package; pickled as its name, so every process imports it for itself."""

    name: str
    package: str
    """The package with its version, which a resume compares."""

    def __call__(self, config: RlctlConfig) -> Algorithm:
        """Raises InputError where the package is not installed here, or brings no class of an algorithm."""
        entry = find_plugin("rlctl.algorithms", self.name)
        if entry is None:
            raise InputError(
                f"Algorithm {self.name!r} is of {self.package}, which is not installed here.",
                "Install that package on every node.",
            )
        algorithm = _checked_class(load_plugin(entry), f"Algorithm {self.name!r} of {self.package}")(config)
        algorithm.made_by = self
        return algorithm


def _checked_class(made: Any, what: str) -> type[Algorithm]:
    """Return a class that an algorithm can be made of. Raises InputError, naming `what`, for anything else."""
    if not (isinstance(made, type) and issubclass(made, Algorithm)):
        raise InputError(f"{what} is no class of an algorithm.", "Derive it from rlctl.Algorithm.")
    if missing := sorted(made.__abstractmethods__):
        raise InputError(f"{what} does not define {' and '.join(missing)}.", "Both are described in docs/training.md.")
    return made


class UserLoss(Algorithm):
    """An algorithm with the user's loss in place of its own, and with the metrics that this loss returns."""

    def __init__(self, inner: Algorithm, code: UserCode, names: tuple[str, ...] = ()) -> None:
        """`names` are those of the metrics that the function returns."""
        super().__init__(inner.config)
        self.inner, self.code, self._names = inner, code, names
        self.metrics = tuple(Metric(name, "mean", curve=name) for name in names)

    @property
    def teacher_top(self) -> int:
        return self.inner.teacher_top

    def keeps(self, rewards_G: np.ndarray) -> bool:
        return self.inner.keeps(rewards_G)

    def trains_on(self, group: RolloutGroup) -> bool:
        return self.inner.trains_on(group)

    def advantages(self, rewards_G: np.ndarray) -> np.ndarray:
        return self.inner.advantages(rewards_G)

    def batch_advantages(self, groups: Sequence[RolloutGroup]) -> list[np.ndarray]:
        return self.inner.batch_advantages(groups)

    def learned_tokens(self, rollout: Rollout) -> int:
        return self.inner.learned_tokens(rollout)

    def token_weights(self, response_tokens_N: np.ndarray) -> np.ndarray:
        return self.inner.token_weights(response_tokens_N)

    def token_loss(self, batch: TokenBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        loss_R, values = self.answer(batch)
        return loss_R, values if self.metrics else {}

    def manifest(self) -> dict[str, Any]:
        return self.inner.manifest() | {"loss": self.code.fingerprint}

    def __reduce__(self) -> tuple[Any, ...]:
        return UserLoss, (self.inner, self.code, self._names)

    def answer(self, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the function's loss [R] and its further values [R].

        Raises InputError naming the line of the file where it fails, or what of its answer is wrong.
        """
        import torch

        function = self.code.load()
        parameters = inspect.signature(function).parameters.values()
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        try:
            found = function(batch, self.config.loss) if len(positional) > 1 else function(batch)
        except Exception as error:
            raise self.code.error(error, "computing a loss") from error
        answer: tuple[Any, Any] = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        loss_R, values = answer
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise InputError(
                f"Loss function {self.code.reference} returned {repr(values)[:80]} as its metrics.",
                'It returns the loss alone, or (loss, {"name": values}).',
            )
        if self._names and values.keys() != set(self._names):
            raise InputError(
                f"Loss function {self.code.reference} returned the metrics {', '.join(values) or '(none)'}, and "
                f"{', '.join(self._names)} when it was tried.",
                "It returns the same ones for every batch.",
            )
        shape = batch.logprobs_R.shape
        for what, value in (("the loss", loss_R), *((f"metric {name}", value) for name, value in values.items())):
            if not isinstance(value, torch.Tensor) or value.shape != shape:
                given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
                raise InputError(
                    f"Loss function {self.code.reference} returned {given[:80]} as {what} of {shape[0]} tokens.",
                    "It returns one number for each response token.",
                )
        return loss_R, values


def trial(loss: UserLoss) -> tuple[str, ...]:
    """Call the function once on made-up tokens; return the names of its metrics.

    Raises InputError where it fails, returns something else than a loss, or does not depend on the policy.
    """
    import torch

    try:
        batch = _made_up_batch(loss.needs, loss.teacher_top)
        loss_R, values = loss.answer(batch)
        if not loss_R.requires_grad:
            raise InputError(
                f"Loss function {loss.code.reference} returned a loss that does not depend on batch.logprobs_R.",
                "Without that nothing is learned: compute it from batch.logprobs_R, and do not detach it.",
            )
        loss_R.sum().backward()
        gradient = batch.logprobs_R.grad
        if gradient is None or not (torch.isfinite(loss_R).all() and torch.isfinite(gradient).all()):
            raise InputError(f"Loss function {loss.code.reference} returned a loss or gradient that is not finite.")
        return tuple(values)
    except InputError as error:
        raise InputError(error.message, error.hint or FORM) from error


def _made_up_batch(needs: frozenset[str], top: int = 0) -> TokenBatch:
    """Return a batch of two rollouts with the columns that a run with these needs has; `top` of a teacher's tokens."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def near(values_R: torch.Tensor) -> torch.Tensor:
        return (values_R + 0.1 * torch.randn(TRIAL_TOKENS, generator=generator)).clamp(max=-0.01)

    logprobs_R = near(torch.full((TRIAL_TOKENS,), -2.0))
    return TokenBatch(
        logprobs_R=logprobs_R.clone().requires_grad_(),
        entropy_R=torch.ones(TRIAL_TOKENS),
        rollout_logprobs_R=near(logprobs_R),
        advantages_R=torch.tensor([1.0] * 4 + [-1.0] * 3),
        token_weights_R=torch.full((TRIAL_TOKENS,), 1 / TRIAL_TOKENS),
        counted_R=torch.ones(TRIAL_TOKENS, dtype=torch.bool),
        rollout_R=torch.tensor([0] * 4 + [1] * 3),
        old_logprobs_R=near(logprobs_R) if "old_logprobs" in needs else None,
        reference_logprobs_R=near(logprobs_R) if "reference_logprobs" in needs else None,
        teacher_logprobs_R=near(logprobs_R) if "teacher_logprobs" in needs else None,
        teacher_top_RK=torch.full((TRIAL_TOKENS, top), -math.log(top + 1)) if top else None,
        top_logprobs_RK=torch.full((TRIAL_TOKENS, top), -math.log(top + 2)).requires_grad_() if top else None,
    )
