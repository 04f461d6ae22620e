"""Fingerprints of boxes as read back, and adding them up (see `checkpoints.tensor_fingerprints`). Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MASK = (1 << 64) - 1


def combine(parts: Sequence[int]) -> int:
    return sum(parts) & MASK


@dataclass(frozen=True)
class Reading:
    """Fingerprint of one box as an engine holds it."""

    tensor: str
    """Published name; for a buffer or an unreadable parameter, the engine's name."""
    shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    value: int
    holder: str
    """The parameter that holds the box."""
    expected: int | None = None
    """The value that a buffer must have, because no refit changes it."""
    unreadable: str = ""
    """Reason for a missing value; empty: there is one."""
