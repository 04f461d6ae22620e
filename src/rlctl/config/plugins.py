"""Algorithms, training backends, rewards and environments of other installed packages, by their entry points.

A package says in its `pyproject.toml` what it brings:

    [project.entry-points."rlctl.algorithms"]
    reinforce = "my_package.reinforce:Reinforce"

Names are read from the packages' metadata. The code behind a name is imported when a configuration asks for that name.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Literal, get_args

from rlctl.errors import InputError

EntryPointGroup = Literal[
    "rlctl.algorithms",
    "rlctl.methods",
    "rlctl.backends",
    "rlctl.rewards",
    "rlctl.environments",
    "rlctl.recipes",
    "rlctl.loggers",
    "rlctl.transports",
    "rlctl.families",
]


def plugin_names(group: EntryPointGroup) -> tuple[str, ...]:
    """Return the names in a group without importing them."""
    return tuple(sorted({entry.name for entry in _entry_points(tuple(sys.path)).select(group=group)}))


@functools.cache
def _entry_points(places: tuple[str, ...]) -> metadata.EntryPoints:
    """Reading all packages takes 30 ms, and a command asks for the names behind each of its flags."""
    every = metadata.entry_points()
    return metadata.EntryPoints(entry for group in get_args(EntryPointGroup) for entry in every.select(group=group))


def find_plugin(group: EntryPointGroup, name: str) -> metadata.EntryPoint | None:
    """Return the entry point `name` without importing it, or None. Raises InputError if two packages define it
    differently."""
    entries = list(
        {entry.value: entry for entry in _entry_points(tuple(sys.path)).select(group=group, name=name)}.values()
    )
    if len(entries) > 1:
        raise InputError(
            f"Several installed packages bring {name!r} in {group}: {', '.join(map(origin, entries))}.",
            "Uninstall all but one of them.",
        )
    return entries[0] if entries else None


def load_named(group: EntryPointGroup, name: str, built_in: Mapping[str, str]) -> Any:
    """Import `module:attribute` of a built-in or entry-point name. Raises InputError for an unknown name."""
    if name in built_in:
        return metadata.EntryPoint(name, built_in[name], group).load()
    entry = find_plugin(group, name)
    if entry is None:
        raise InputError(f"No installed package brings {name!r} in {group}.", "Install its package on every node.")
    return load_plugin(entry)


def load_plugin(entry: metadata.EntryPoint) -> Any:
    """Import an entry point. Raises InputError naming package and reason."""
    try:
        return entry.load()
    except Exception as error:
        raise InputError(
            f"{entry.name!r} of {origin(entry)} cannot be imported ({entry.value}): {type(error).__name__}: {error}.",
            "Update or uninstall that package.",
        ) from error


def origin(entry: metadata.EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.module
