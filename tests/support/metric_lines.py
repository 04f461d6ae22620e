"""Comparing the metrics of runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Times, and what is derived from them, differ between two runs that compute the same.
TIMING_KEYS = frozenset(
    {"seconds", "refit_seconds", "tokens_per_s", "refit_gb_per_s", "time", "system", "episode_seconds"}
)


def without_timing(line: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a metrics line that the seed, the data and the weights determine."""
    return {name: value for name, value in line.items() if name not in TIMING_KEYS}
