"""Presets: files with values for one kind of machine, which can build on each other."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.config.files import user_path
from rlctl.config.yaml_values import read_mapping
from rlctl.errors import ConfigError

ORDER = ("laptop", "1gpu", "1node", "2nodes", "8nodes")


@dataclass(frozen=True)
class Preset:
    """One preset file's values, without its base's values."""

    name: str
    path: Path
    description: str
    extends: str | None
    """Name of a shipped preset, or a file; the preset file gives it relative to itself."""
    values: dict[str, Any]


def presets_directory() -> Path:
    """Return the folder of shipped presets: inside an installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "presets"
    return installed if installed.is_dir() else package.parents[1] / "presets"


def preset_names() -> list[str]:
    names = [path.stem for path in presets_directory().glob("*.yaml")]
    return sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def read_preset(name: str) -> Preset:
    """Read the shipped preset `name`, or a YAML file. Raises ConfigError for an unknown name (with the nearest one) or
    a file without sections."""
    path = preset_path(name)
    values = read_mapping(path, "--preset")
    description, extends = values.pop("description", ""), values.pop("extends", None)
    for key, value in (("description", description), ("extends", extends or "")):
        if not isinstance(value, str):
            raise ConfigError(f"preset {name}: `{key}` must be a text, not {value!r}.")
    if extends is not None and extends.endswith((".yaml", ".yml")):
        extends = os.path.normpath(path.parent / user_path(extends))
    return Preset(name, path, description, extends, values)


def preset_path(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    names = preset_names()
    if name not in names:
        alike = difflib.get_close_matches(name, names, n=1)
        meant = f"Did you mean `{alike[0]}`?" if alike else f"There are: {', '.join(names)}; or give a .yaml file."
        raise ConfigError(f"--preset {name}: there is no such preset.", meant)
    return presets_directory() / f"{name}.yaml"


def preset_chain(name: str) -> list[Preset]:
    """Return the preset and its bases, the most basic first. Raises ConfigError for a circle."""
    chain: list[Preset] = []
    parent: str | None = name
    while parent is not None:
        if parent in (preset.name for preset in chain):
            path = " -> ".join([*(preset.name for preset in chain), parent])
            raise ConfigError(f"preset {name} extends itself: {path}.", "Remove one `extends` of the circle.")
        chain.append(read_preset(parent))
        parent = chain[-1].extends
    return chain[::-1]
