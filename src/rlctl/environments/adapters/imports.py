"""How adapters import the library that they are for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rlctl.errors import InputError, first_line


def imported(module: str, environment: str) -> Any:
    """Return a module that an environment needs. Raises InputError where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(
            f"The environment {environment} needs the package {module}: {first_line(error)}.",
            f"Install it next to rlctl: pip install {module.replace('_', '-')}",
        ) from error
