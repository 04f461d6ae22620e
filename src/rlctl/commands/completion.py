"""Shell completion of presets, catalog models, tasks, scorers and GPUs.

Import nothing heavy here: the user waits for each completion.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

from rlctl.data.prompt_rows import GYM_PREFIX


def presets(incomplete: str) -> list[tuple[str, str]]:

    from rlctl.config.presets import preset_names, read_preset

    return [(name, read_preset(name).description) for name in beginning(preset_names(), incomplete)]


def models(incomplete: str) -> list[str]:

    from rlctl.models.catalog import entries

    names = [name for entry in entries() for name in entry.names]
    return beginning(names, incomplete)


def data(incomplete: str) -> list[str]:
    """Return reasoning-gym tasks, or only its prefix until that is typed."""
    return beginning([f"{GYM_PREFIX}{task}" for task in gym_tasks()] if ":" in incomplete else [GYM_PREFIX], incomplete)


def rewards(incomplete: str) -> list[str]:

    from rlctl.rewards.scorers import BUILT_IN

    return beginning(BUILT_IN, incomplete)


def gpus(incomplete: str) -> list[str]:

    from rlctl.planner.inputs.cluster import DEVICES

    return beginning(("auto", "cpu", *DEVICES), incomplete)


def gym_tasks() -> list[str]:
    """Return the tasks of reasoning-gym, read from its source files, because importing it takes seconds."""
    spec = importlib.util.find_spec("reasoning_gym")
    places = (spec.submodule_search_locations or []) if spec else []
    texts = (path.read_text(errors="replace") for place in places for path in Path(place).rglob("*.py"))
    constants: list[str] = []
    for text in texts:
        names = dict(re.findall(r'^([A-Z_]*DATASET_NAME\w*) = "(\w+)"', text, re.MULTILINE))
        called = re.findall(r'^register_dataset\(\s*"?([\w]+)"?', text, re.MULTILINE)
        constants += [names.get(name, name) for name in called]
    return sorted(constants)


def beginning(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that start with `incomplete`, ignoring case."""
    return [name for name in names if name.lower().startswith(incomplete.lower())]
