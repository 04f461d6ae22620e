"""Resolve a configuration whose sources name the training method."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.config import load
from rlctl.config.load import Resolved, gathered
from rlctl.config.schema import Registry, Schema
from rlctl.config.section import Section
from rlctl.config.sources import Source, Value, method_source
from rlctl.errors import ConfigError
from rlctl.methods.available import (
    command_of,
    config_class,
    config_classes,
    defaults_of,
    method_class,
    names,
    registered,
)
from rlctl.recipes.available import importers
from rlctl.transport import available as transports

DEFAULT_METHOD = "grpo"


def schema() -> Schema:
    """Return the keys of all methods, the default method's first."""
    return _schema(tuple(sys.path), registered())


def names_of_values() -> dict[str, tuple[str, ...]]:
    """Return the names that keys take, by the entry-point group of packages that bring more."""
    return {transports.GROUP: transports.names()}


@functools.cache
def _schema(places: tuple[str, ...], registered: tuple[str, ...]) -> Schema:
    """`places`, where packages are looked for, and the registered methods decide which classes exist; reading packages
    takes 30 ms."""
    return Schema((config_class(DEFAULT_METHOD), *config_classes()), names_of_values())


def registry() -> Registry:
    return Registry(schema(), lambda method: config_class(method or DEFAULT_METHOD), importers)


def resolve(
    preset: str | None = None,
    files: Sequence[str | Path] = (),
    flags: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    stored: Callable[[Any], Sequence[Value]] | None = None,
    config: type[Section] | None = None,
    command: str | None = None,
) -> Resolved:
    """Merge and validate all sources, as `config.load.gathered` has them. `config` None: the class of `run.algorithm`.

    `command`: the name of the command of `train` that the method has to have. Raises ConfigError with each wrong key or
    value, its origin and the nearest key.
    """
    sources = gathered(preset, files, flags, sets, environment, overrides, stored, registry=registry())
    if command is not None:
        require_algorithm(command, sources)
    return from_sources(sources, config)


def from_sources(sources: Sequence[Source], config: type[Section] | None = None) -> Resolved:
    """Merge and validate `sources`, weakest first. `config` None: the class of `run.algorithm`, with its defaults.
    Raises ConfigError with a line per problem, keys first."""
    if config is not None:
        return load.from_sources(sources, config, schema=schema())
    method = next((v.value for s in reversed(sources) for v in s.values if v.key == "run.algorithm"), None)
    method = method if isinstance(method, str) else DEFAULT_METHOD
    return load.from_sources(
        [method_source(method, defaults_of(method)), *sources],
        config_class(method),
        schema=schema(),
        command=_shown(method),
        hint=f"`rlctl config schema {method}` lists its keys.",
        having=partial(_having, method),
    )


def _shown(method: str) -> str:
    command = command_of(method)
    return command if method in (DEFAULT_METHOD, command.removeprefix("train ")) else f"{command} --algorithm {method}"


def _having(method: str, key: str) -> str:
    """Return which algorithms, or where `method` is none or no other has it, which commands have a key; empty: none."""
    commands = {name: command_of(name) for name in names() if Schema((config_class(name),)).field(key) is not None}
    alike = [name for name, command in commands.items() if command == command_of(method)]
    if alike:
        return f"; the algorithm{'s'[: len(alike) - 1]} {', '.join(alike)} {'has' if len(alike) == 1 else 'have'} it"
    known = [*dict.fromkeys(f"`{command}`" for command in commands.values())]
    return f"; {', '.join(known)} {'has' if len(known) == 1 else 'have'} it" if known else ""


def require_algorithm(command: str, sources: Sequence[Source]) -> None:
    """Raise ConfigError where `run.algorithm` is a method with a command other than `train COMMAND`."""
    given = [value for source in sources for value in source.values if value.key == "run.algorithm"]
    name = given[-1].value if given else DEFAULT_METHOD
    if not isinstance(name, str) or method_class(name) is None or command_of(name) == f"train {command}":
        return
    what = "no algorithm" if command == DEFAULT_METHOD else f"not the method of `train {command}`"
    raise ConfigError(
        f"`run.algorithm` = {name!r} ({given[-1].origin}) is {what}.", f"Write `rlctl {_shown(name)} ...`."
    )
