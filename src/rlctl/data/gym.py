"""Prompts of reasoning-gym: procedural tasks with seeds, parameters and scorers of their own."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlctl.config.schema import DataConfig
from rlctl.config.yaml_values import parse_value
from rlctl.data.prompt_rows import GYM_PREFIX, GymTask, PromptRow, PromptSource, instructions
from rlctl.errors import InputError, MachineError, suggest

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

DEFAULT_SIZE = 10_000
"""Questions of a task whose size nobody gave. They are made when asked for; only their order is in memory."""
MOST_QUESTIONS = 10_000_000


def open_gym(name: str, data: DataConfig, seed: int) -> PromptSource:
    """Return the source that `reasoning-gym:<task>[:key=value,...]` names. Its row i follows from task,
    parameters, seed and i.

    Parameters after the second colon override `data.params`. Raises InputError for a task or parameter that
    reasoning-gym does not have, or a value that the task refuses.
    """
    task_name, _, inline = name.removeprefix(GYM_PREFIX).partition(":")
    params = dict(data.params)
    for part in filter(None, inline.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise InputError(f"--data {name}: {part!r} is not key=value.", "Write reasoning-gym:<task>:key=value,...")
        params[key.strip()] = parse_value(value)
    registry = _registry()
    if task_name not in registry:
        near = suggest(task_name, registry) or f"Some are {', '.join(sorted(registry)[:8])}."
        raise InputError(f"reasoning-gym has no task {task_name!r} (--data).", near)
    known = [field.name for field in dataclasses.fields(registry[task_name][1])]
    for key in params:
        if key not in known:
            near = suggest(key, known) or f"It has {', '.join(known)}."
            raise InputError(
                f"reasoning-gym task {task_name!r} has no parameter {key!r} (data.params).",
                f"{near} Parameters of a preset's task are cleared with --set data.params={{}}.",
            )
    defaults = {"seed": seed, "size": DEFAULT_SIZE if data.size is None else data.size}
    task = GymTask(task_name, {**defaults, **params})
    dataset = build_task(task)

    def row(index: int) -> PromptRow:
        entry, where = dataset[index], f"{name}, question {index}"
        return PromptRow(index, where, entry["question"], entry["answer"], {"metadata": entry["metadata"]})

    version = importlib.metadata.version("reasoning_gym")
    identity = {"source": f"{GYM_PREFIX}{task.name}", "params": task.params, "reasoning_gym": version}
    return PromptSource(name, len(dataset), row, identity, instructions(data), task)


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
