"""Guessed causes: each planted mistake is called by its name."""

from __future__ import annotations

import numpy as np
import pytest

from rlctl.refit.diagnose import assemble, guess

RNG = np.random.default_rng(0)
SQUARE = RNG.standard_normal((12, 12), dtype=np.float32)
WIDE = RNG.standard_normal((12, 8), dtype=np.float32)


def planted() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    experts = WIDE.copy()
    experts[[2, 7]] = experts[[7, 2]]
    return {
        "transposed": (SQUARE, SQUARE.T),
        "transposed (the memory": (WIDE, WIDE.T.reshape(WIDE.shape)),
        "rows interleaved in 3 groups": (WIDE, WIDE.reshape(3, 4, 8).transpose(1, 0, 2).reshape(12, 8)),
        "rows interleaved in 2 groups": (WIDE, WIDE.reshape(2, 6, 8).transpose(1, 0, 2).reshape(12, 8)),
        "rows shifted by": (SQUARE[:11, :7], np.roll(SQUARE[:11, :7], 3, axis=0)),
        "rows permuted (2 of 12": (WIDE, experts),
        "columns": (WIDE, WIDE[:, [1, 0, 2, 3, 4, 5, 6, 7]]),
        "scaled by 2": (WIDE, 2 * WIDE),
        "offset by -1": (WIDE, WIDE - 1),
        "missing: all zeros": (WIDE, np.zeros_like(WIDE)),
        "missing: never written": (WIDE, np.full_like(WIDE, np.nan)),
        "rounding?": (WIDE, (WIDE * (1 + 1e-4 * RNG.standard_normal(WIDE.shape))).astype(np.float32)),
        "another order": (WIDE, RNG.permutation(WIDE.ravel()).reshape(WIDE.shape)),
    }


@pytest.mark.parametrize("name", planted())
def test_planted_mistake_is_named(name: str) -> None:
    expected, found = planted()[name]
    assert name in guess(expected, found)


def test_stale_weights_are_recognised() -> None:
    assert guess(WIDE, WIDE + 5 * SQUARE[:, :8], before=WIDE + 5 * SQUARE[:, :8]).startswith("stale")


def test_boxes_are_put_together() -> None:
    boxes = [([(r, 6, 2), (c * 4, 4, 1)], WIDE[r::2, c * 4 : c * 4 + 4]) for r in range(2) for c in range(2)]
    assert np.array_equal(assemble(WIDE.shape, boxes), WIDE)
