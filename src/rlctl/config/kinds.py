"""The configuration classes of training methods, looked up by name in the methods' registry."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from rlctl.config.section import Section

DEFAULT_METHOD = "grpo"
REGISTRY = "rlctl.methods.available"


def _registry() -> Any:
    return importlib.import_module(REGISTRY)


def config_classes() -> tuple[type[Section], ...]:
    return _registry().config_classes()


def config_class(method: str) -> type[Section]:
    return _registry().config_class(method)


def defaults_of(method: str) -> dict[str, Any]:
    """Return the values by key that a method sets in place of defaults of its sections."""
    return _registry().defaults_of(method)


def command_of(method: str) -> str:
    return _registry().command_of(method)


def method_names() -> tuple[str, ...]:
    return _registry().names()


def sections_of(name: str) -> tuple[type[Section], ...]:
    """Return the classes of a section, of each configuration that has it, the default method's first."""
    return _sections(tuple(sys.path)).get(name, ())


@functools.cache
def _sections(places: tuple[str, ...]) -> dict[str, tuple[type[Section], ...]]:
    """Return the classes of all sections. `places`: where packages are looked for; reading them takes 30 ms."""
    found: dict[str, dict[type[Section], None]] = {}
    for config in (config_class(DEFAULT_METHOD), *config_classes()):
        for name, field in config.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                found.setdefault(name, {})[field.annotation] = None
    return {name: tuple(classes) for name, classes in found.items()}
