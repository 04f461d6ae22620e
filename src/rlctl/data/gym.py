"""Prompts of reasoning-gym: procedural tasks with seeds, parameters and scorers of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlctl.config.schema import DataConfig
from rlctl.config.yaml_values import parse_value
from rlctl.data.prompt_rows import GYM_PREFIX, GymTask, PromptRow, instructions
from rlctl.errors import InputError, MachineError, suggest

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

DEFAULT_SIZE = 10_000
"""Questions of a task whose size nobody gave. They are made when asked for; only their order is in memory."""
MOST_QUESTIONS = 10_000_000
QUESTION_LIMIT_S = 10.0
"""Seconds of computing for one question. All tasks take a fraction of a second with parameters that a model can learn
from; with `max_terms=1000000000` one would fill the memory first."""


class _OverLimit(BaseException):
    """A question takes too long. No task catches it, as some catch every Exception and try again."""


class GymPrompts:
    """The questions of one task. Row i is a function of (task, parameters, seed, i)."""

    def __init__(self, label: str, task: GymTask, instructions: str = "") -> None:
        self.label, self.task, self.instructions = label, task, instructions
        with _limited(label):
            self._dataset = build_task(task)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> PromptRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        where = f"{self.label}, question {index}"
        with _limited(where):
            entry = self._dataset[index]
        return PromptRow(index, where, entry["question"], entry["answer"], {"metadata": entry["metadata"]})

    def fingerprint(self) -> dict[str, Any]:
        return {
            "source": f"{GYM_PREFIX}{self.task.name}",
            "params": self.task.params,
            "rows": len(self),
            "reasoning_gym": importlib.metadata.version("reasoning_gym"),
        }


def open_gym(name: str, data: DataConfig, seed: int) -> GymPrompts:
    """Return the source that `reasoning-gym:<task>[:key=value,...]` names.

    Parameters after the second colon override `data.params`. Raises InputError for a task or parameter that
    reasoning-gym does not have, or a value that the task refuses.
    """
    task_name, _, inline = name.removeprefix(GYM_PREFIX).partition(":")
    params = {**data.params, **_inline_params(inline, name)}
    known = _known_params(task_name)
    for key in params:
        if key not in known:
            near = suggest(key, known) or f"It has {', '.join(known)}."
            raise InputError(
                f"reasoning-gym task {task_name!r} has no parameter {key!r} (data.params).",
                f"{near} Parameters of a preset's task are cleared with --set data.params={{}}.",
            )
    defaults = {"seed": seed, "size": DEFAULT_SIZE if data.size is None else data.size}
    task = GymTask(task_name, {**defaults, **params})
    for key, value in task.params.items():
        if key in defaults and (type(value) is not int or value > (MOST_QUESTIONS if key == "size" else 2**63)):
            raise InputError(
                f"reasoning-gym task {task_name!r}: {key} = {value!r} is no number of a reasonable size.",
                f"A task has at most {MOST_QUESTIONS:,} questions; its seed is a whole number.",
            )
    return GymPrompts(name, task, instructions(data))


def build_task(task: GymTask) -> ProceduralDataset:
    """Return reasoning-gym's own dataset of the task; InputError where the task refuses a value."""
    dataset_class, config_class = _registry()[task.name]
    try:
        config = config_class(**task.params)
        if hasattr(config, "validate"):
            config.validate()
        return dataset_class(config=config)
    except (AssertionError, ValueError, TypeError) as error:
        listed = ", ".join(f"{key}={json.dumps(value, default=str)}" for key, value in task.params.items())
        raise InputError(
            f"reasoning-gym task {task.name!r} refuses its parameters ({listed}): {error}.",
            "Change them with --set data.params.<name>=<value>.",
        ) from error


@contextlib.contextmanager
def _limited(what: str) -> Iterator[None]:
    """Raise InputError where the block computes for longer than `QUESTION_LIMIT_S`. Time in which other processes have
    the processor does not count. Python delivers signals to the main thread alone: in others there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise _OverLimit

    before = signal.signal(signal.SIGPROF, stop)
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, QUESTION_LIMIT_S)
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _OverLimit as error:
        raise InputError(
            f"--data {what} takes more than {QUESTION_LIMIT_S:g} s to make.",
            "Lower what makes it large: in --data behind the name of the task, or --set data.params.<name>=<value>.",
        ) from error
    finally:
        signal.signal(signal.SIGPROF, before)


def _registry() -> dict[str, tuple[type, type]]:
    """Return dataset and config class of every task."""
    try:
        with warnings.catch_warnings():
            # One of its dependencies compares with `is`, which Python remarks on at every first import.
            warnings.simplefilter("ignore", SyntaxWarning)
            # It imports matplotlib, and two of the tasks use it.
            sys.modules.setdefault("cellpylib", _ImportedLater("cellpylib"))
            from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise MachineError(
            f"Tasks of reasoning-gym need a package that is not installed: {error.name}.",
            "Install rlctl with its cpu or cuda extra.",
        ) from error
    return DATASETS


class _ImportedLater(ModuleType):
    """Stands for a module until something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _known_params(task_name: str) -> list[str]:
    """Return names of the task's parameters, as its own config class has them."""
    registry = _registry()
    if task_name not in registry:
        near = suggest(task_name, registry) or f"Some are {', '.join(sorted(registry)[:8])}."
        raise InputError(f"reasoning-gym has no task {task_name!r} (--data).", near)
    return [field.name for field in dataclasses.fields(registry[task_name][1])]


def _inline_params(text: str, name: str) -> dict[str, Any]:
    """Return parameters from `key=value,key=value`; values are YAML scalars."""
    params = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise InputError(f"--data {name}: {part!r} is not key=value.", "Write reasoning-gym:<task>:key=value,...")
        params[key.strip()] = parse_value(value)
    return params
