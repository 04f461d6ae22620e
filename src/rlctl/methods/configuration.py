"""Resolve a configuration whose sources name the training method."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.config import load
from rlctl.config.load import Resolved, gathered
from rlctl.config.schema import Registry, Schema
from rlctl.config.section import Section
from rlctl.config.sources import Source, Value, method_source
from rlctl.methods.available import command_of, config_class, config_classes, defaults_of, registered
from rlctl.recipes.available import importers

DEFAULT_METHOD = "grpo"


def schema() -> Schema:
    """Return the keys of all methods, the default method's first."""
    return _schema(tuple(sys.path), registered())


@functools.cache
def _schema(places: tuple[str, ...], registered: tuple[str, ...]) -> Schema:
    """`places`, where packages are looked for, and the registered methods decide which classes exist; reading packages
    takes 30 ms."""
    return Schema((config_class(DEFAULT_METHOD), *config_classes()))


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
) -> Resolved:
    """Merge and validate all sources, as `config.load.gathered` has them. `config` None: the class of `run.algorithm`.

    Raises ConfigError with each wrong key or value, its origin and the nearest key.
    """
    return from_sources(
        gathered(preset, files, flags, sets, environment, overrides, stored, registry=registry()), config
    )


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
        command=command_of(method),
        hint=f"`rlctl config schema {method}` lists what there is.",
    )
