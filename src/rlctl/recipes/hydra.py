"""Overrides of the command line in Hydra's form, and the packages that recipes in that form need."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rlctl.errors import ConfigError, InputError, first_line

PACKAGES = {"hydra": "hydra-core", "omegaconf": "omegaconf"}
"""Modules that reading needs, and the packages that have them (the extra `recipes`)."""


def require_packages(trainer: str) -> None:
    """Raise InputError where a package is missing that reading a trainer's recipes needs."""
    if missing := [package for module, package in PACKAGES.items() if find_spec(module) is None]:
        raise InputError(f"Reading {trainer}'s keys needs {' and '.join(missing)}: `pip install {' '.join(missing)}`.")


@dataclass(frozen=True)
class Override:
    """A `key=value` of the command line in Hydra's form: `+` and `++` may stand in front, and `~key` removes a key."""

    key: str
    value: Any
    remove: bool = False

    @classmethod
    def parse(cls, text: str) -> Override:
        """Raise ConfigError for malformed overrides and for sweeps."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        if not text.startswith("~") and "=" not in text:
            raise ConfigError(f"{text}: there is no value.", "Write key=value, for example policy.model_name=NAME.")
        try:
            parsed = OverridesParser.create().parse_override(text)
        except HydraException as error:
            hint = "Put a text with special characters in quotes within quotes: 'key=\"a, b\"'."
            raise ConfigError(f"{text} is not an override: {sentence(error)}.", hint) from error
        if parsed.is_sweep_override():
            raise ConfigError(f"{text}: a value cannot be several values.", "Write a list in brackets: key=[1,2].")
        return cls(parsed.key_or_group, parsed.value(), parsed.is_delete())


def sentence(error: Exception) -> str:
    """Return the first line of a library's error, to stand within a sentence."""
    return first_line(error).removesuffix(".")
