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
from rlctl.config.recipes import Registry
from rlctl.config.schema import Schema
from rlctl.config.section import Section
from rlctl.config.sources import Source, Value, method_source
from rlctl.errors import ConfigError
from rlctl.methods.available import (
    algorithms,
    command_of,
    config_class,
    config_classes,
    defaults_of,
    method_class,
    methods,
    names,
    registered,
)
from rlctl.recipes.available import importers
from rlctl.transport import available as transports

DEFAULT_METHOD = "grpo"
ALGORITHM_FLAG = "flag --algorithm"
"""Origin of an algorithm given on the command line."""


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
    sources = with_algorithm(sources)
    method = _given("run.algorithm", sources)[1]
    method = method.value if method is not None and isinstance(method.value, str) else DEFAULT_METHOD
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
    others = [*dict.fromkeys(f"`{command}`" for command in commands.values())]
    return f"; {', '.join(others)} {'has' if len(others) == 1 else 'have'} it" if others else ""


def _given(key: str, sources: Sequence[Source]) -> tuple[int, Value | None]:
    """Return the strongest value of a key, and the place of its source."""
    values = [(place, value) for place, source in enumerate(sources) for value in source.values if value.key == key]
    return values[-1] if values else (-1, None)


def with_algorithm(sources: Sequence[Source]) -> Sequence[Source]:
    """Return the sources with `run.algorithm` set to the method of `run.method`, unless a source names one of the
    method's algorithms. `run.method` overrides another method's algorithm from a source of lower precedence.

    Raises ConfigError for contradictory values, an unknown method, and `--algorithm METHOD`. In files, `run.algorithm`
    may name a method, because older files have no `run.method`.
    """
    (place, method), (algorithm_place, algorithm) = (_given(key, sources) for key in ("run.method", "run.algorithm"))
    name = algorithm.value if algorithm is not None and isinstance(algorithm.value, str) else None
    if method is None or method.value is None:
        if (
            algorithm is not None
            and name in methods()
            and name != DEFAULT_METHOD
            and algorithm.origin == ALGORITHM_FLAG
        ):
            raise ConfigError(f"{name!r} ({ALGORITHM_FLAG}) is a method and no algorithm.", f"Write --method {name}.")
        return sources
    if method.value not in methods():
        hint = f"There are {', '.join(methods())}."
        if isinstance(method.value, str) and method.value in algorithms():
            hint = f"It is an algorithm of the method grpo: write --algorithm {method.value} (run.algorithm)."
        raise ConfigError(f"Unknown method {method.value!r} (run.method, {method.origin}).", hint)
    if name is not None and command_of(name) == f"train {method.value}":
        return sources
    if algorithm is not None and algorithm_place >= place:
        raise ConfigError(
            f"`run.algorithm` = {name!r} ({algorithm.origin}) is not of the method {method.value} ({method.origin}).",
            "Leave one of them out.",
        )
    return [*sources, Source([Value("run.algorithm", method.value, method.origin)])]


def require_algorithm(command: str, sources: Sequence[Source]) -> None:
    """Raise ConfigError if the sources name a method whose command is not `train COMMAND`."""
    for key in ("run.method", "run.algorithm"):
        value = _given(key, sources)[1]
        if value is None or not isinstance(name := value.value, str) or method_class(name) is None:
            continue
        if command_of(name) != f"train {command}":
            algorithms_alone = command == DEFAULT_METHOD and key == "run.algorithm"
            what = "no algorithm" if algorithms_alone else f"not the method of `train {command}`"
            raise ConfigError(f"`{key}` = {name!r} ({value.origin}) is {what}.", f"Write `rlctl {_shown(name)} ...`.")
