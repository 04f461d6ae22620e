"""Why a tensor arrived wrong: a guess from the values on both sides. Suffix letters: R rows, C columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RELATIVE = 1e-6


def assemble(shape: Sequence[int], boxes: Sequence[tuple[list[tuple[int, int, int]], np.ndarray]]) -> np.ndarray:
    """The whole tensor from boxes given as (start, count, step) of each dimension; NaN where no box lies."""
    whole = np.full(shape, np.nan, np.float32)
    for box, values in boxes:
        whole[tuple(slice(first, first + count * step, step) for first, count, step in box)] = values
    return whole


def guess(expected: np.ndarray, found: np.ndarray, before: np.ndarray | None = None) -> str:
    """What turns `expected` into `found`, in a few words; `before` is what the engine held before the refit."""
    if np.isnan(found).all():
        return "missing: never written"
    if not found.any() and expected.any():
        return "missing: all zeros"
    if before is not None and np.array_equal(found, before):
        return "stale: still the weights from before the refit"
    if np.isnan(found).any():
        return f"missing in part: {np.isnan(found).mean():.0%} of the elements never written"
    return _reordered(expected, found) or _scaled(expected, found) or _partial(expected, found)


def _reordered(expected: np.ndarray, found: np.ndarray) -> str | None:
    if expected.ndim == 2:
        square = expected.shape[0] == expected.shape[1]
        if square and np.array_equal(found, expected.T):
            return "transposed"
        if np.array_equal(found.ravel(), expected.T.ravel()):
            return "transposed (the memory is that of the transpose)"
        if cause := _rows(expected, found):
            return cause
        if cause := _rows(expected.T, found.T):
            return cause.replace("rows", "columns")
    if np.array_equal(np.sort(found, axis=None), np.sort(expected, axis=None)):
        return "the right elements in another order"
    return None


def _rows(expected_RC: np.ndarray, found_RC: np.ndarray) -> str | None:
    """Whether `found` has the rows of `expected` in another order, and in which."""
    place = {row.tobytes(): index for index, row in enumerate(np.ascontiguousarray(expected_RC))}
    order = np.array([place.get(row.tobytes(), -1) for row in np.ascontiguousarray(found_RC)])
    if (order < 0).any() or len(set(order.tolist())) != len(order):
        return None
    rows = len(order)
    for groups in (2, 3, *range(4, 65)):
        if rows % groups:
            continue
        dealt = np.arange(rows).reshape(groups, -1).T.ravel()
        if np.array_equal(order, dealt) or np.array_equal(order, np.argsort(dealt)):
            return f"rows interleaved in {groups} groups (QKV or gate/up taken apart wrongly, or rotary order)"
    shift = int(order[0])
    if np.array_equal(order, np.roll(np.arange(rows), -shift)):
        return f"rows shifted by {shift} (a shard in another's place)"
    return f"rows permuted ({int((order != np.arange(rows)).sum())} of {rows} out of place)"


def _scaled(expected: np.ndarray, found: np.ndarray) -> str | None:
    solid = np.abs(expected) > 1e-12
    if not solid.any():
        return None
    ratios = found[solid].astype(np.float64) / expected[solid]
    ratio = float(np.median(ratios))
    if np.allclose(ratios, ratio, rtol=RELATIVE, atol=0) and abs(ratio - 1) > RELATIVE:
        return f"scaled by {ratio:.6g}"
    offset = (found.astype(np.float64) - expected).ravel()
    if np.allclose(offset, offset[0], rtol=0, atol=1e-6) and abs(offset[0]) > 1e-6:
        return f"offset by {offset[0]:.6g} (a norm stored as its distance from one)"
    return None


def _partial(expected: np.ndarray, found: np.ndarray) -> str:
    wrong = float((expected != found).mean())
    largest = float(np.abs(expected.astype(np.float64) - found).max())
    rounded = largest <= 2**-8 * float(np.abs(expected).max() or 1.0)
    return f"{wrong:.1%} of the elements differ by at most {largest:.3g}" + (" (rounding?)" if rounded else "")
