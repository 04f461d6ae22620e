"""Tasks of reasoning-gym, as its package has them."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlctl.data.prompt_rows import GymTask
from rlctl.errors import InputError, MachineError

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset


def build_task(task: GymTask) -> ProceduralDataset:
    """Return reasoning-gym's own dataset of the task; InputError where the task refuses a value."""
    dataset_class, config_class = gym_registry()[task.name]
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


def gym_registry() -> dict[str, tuple[type, type]]:
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
