"""Adding up fingerprints of boxes (see `checkpoints.fingerprints`), for those who only compare them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

MASK = (1 << 64) - 1


def combine(parts: Sequence[int]) -> int:
    """Fingerprint of the union of disjoint boxes."""
    return sum(parts) & MASK
