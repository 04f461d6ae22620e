"""Compare the engines' weights with the policy's, and guess why they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from rlctl.errors import VerificationError, listed
from rlctl.weights.readings import Reading, combine


@dataclass(frozen=True)
class TensorComparison:
    """Outcome of comparing one engine with the policy."""

    tensors: int
    mismatched: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Tensors that the policy holds and the engine does not."""
    extra: tuple[str, ...] = ()
    """Tensors that the engine holds and the policy does not."""
    unread: tuple[tuple[str, str], ...] = ()
    """(tensor of the policy, why the engine's copy cannot be read back). Such tensors are not compared."""
    buffers: int = 0
    """Engine buffers compared with expected values."""

    @property
    def equal(self) -> bool:
        return not (self.mismatched or self.missing or self.extra)


def source_sums(by_rank: Iterable[dict[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for part in by_rank:
        for name, value in part.items():
            sums[name] = combine([sums.get(name, 0), value])
    return sums


def compare(
    source: dict[str, int], readings: Sequence[Reading], sample: Sequence[str] | None = None
) -> TensorComparison:
    """Compare the policy's fingerprints with one engine's readings (only `sample`, if given). Copies must be equal,
    parts must add up, and buffers must be unchanged."""
    if sample is not None:
        names = set(sample)
        readings = [reading for reading in readings if reading.unreadable or reading.tensor in names]
    readings_of: dict[str, list[Reading]] = {}
    buffers = [r for r in readings if r.expected is not None]
    unreadable = {r.tensor: r.unreadable for r in readings if r.unreadable}
    for reading in readings:
        if reading.expected is None and not reading.unreadable:
            readings_of.setdefault(reading.tensor, []).append(reading)
    both = sorted(set(source) & set(readings_of))
    absent = {name: _why_unread(name, unreadable) for name in sorted(set(source) - set(readings_of))}
    changed = {r.tensor for r in buffers if r.value != r.expected}
    return TensorComparison(
        tensors=len(both),
        mismatched=(*(name for name in both if not _agrees(source[name], readings_of[name])), *sorted(changed)),
        missing=tuple(name for name, reason in absent.items() if not reason),
        extra=tuple(sorted(set(readings_of) - set(source))),
        unread=tuple((name, reason) for name, reason in absent.items() if reason),
        buffers=len({r.tensor for r in buffers}),
    )


def _why_unread(tensor: str, unreadable: dict[str, str]) -> str:
    """Return why `tensor`, or a parameter with it, is unreadable; empty: it is readable."""
    if tensor in unreadable:
        return unreadable[tensor]
    for parameter, reason in unreadable.items():
        module = parameter.rpartition(".")[0]
        if tensor.startswith((f"{module}.", f"{module.removesuffix('.routed_experts')}.")):
            return f"{parameter} {reason}"
    return ""


def _agrees(value: int, readings: list[Reading]) -> bool:
    by_holder: dict[str, dict[tuple, set[int]]] = {}
    for r in readings:
        by_holder.setdefault(r.holder, {}).setdefault((r.start, r.extent), set()).add(r.value)
    return all(_copy_agrees(value, readings[0].shape, boxes) for boxes in by_holder.values())


def _copy_agrees(value: int, shape: tuple[int, ...], boxes: dict[tuple, set[int]]) -> bool:
    if any(len(values) > 1 for values in boxes.values()):  # replicas differ
        return False
    covered = sum(prod(extent) for _, extent in boxes)
    return covered == prod(shape) and combine([v for (v,) in boxes.values()]) == value


def require_as_converted(source: dict[str, int], converted: Mapping[str, int], where: Path | None = None) -> None:
    """Raise VerificationError if tensors that the policy has loaded are not what their conversion in `where` wrote."""
    changed = sorted(name for name, value in source.items() if converted.get(name, value) != value)
    if changed:
        raise VerificationError(
            f"{len(changed)} of {len(source)} tensors that the policy has loaded are not those that were converted: "
            f"{listed(changed, 5)}.",
            f"{where or 'The checkpoint'} was damaged since: remove it. If a run made it, the next run makes it again; "
            "otherwise use `rlctl convert`.",
        )


def require_equal(comparison: TensorComparison, version: int, where: str) -> None:
    """Raise VerificationError naming the tensors that differ."""
    if comparison.equal:
        return
    parts = [
        f"{len(names)} {description} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
        for description, names in (
            ("differ", comparison.mismatched),
            ("are missing in the engine", comparison.missing),
            ("are in the engine alone", comparison.extra),
        )
        if names
    ]
    raise VerificationError(
        f"Refit to version {version}: of {comparison.tensors} tensors in {where}, {'; '.join(parts)}.",
        "The engine refuses to generate. `rlctl refit-test` shows how the tensors differ, and `rlctl diverge` which "
        "sub-layer computes something else.",
    )


def assemble(shape: Sequence[int], boxes: Sequence[tuple[list[tuple[int, int, int]], np.ndarray]]) -> np.ndarray:
    """Assemble a tensor from boxes (start, count, step per dimension); NaN elsewhere."""
    whole = np.full(shape, np.nan, np.float32)
    for box, values in boxes:
        whole[tuple(slice(first, first + count * step, step) for first, count, step in box)] = values
    return whole


def guess(expected: np.ndarray, actual: np.ndarray) -> str:
    """Guess in a few words why `found` is not `expected`."""
    if np.isnan(actual).all():
        return "missing: never written"
    if not actual.any() and expected.any():
        return "missing: all zeros"
    if np.isnan(actual).any():
        return f"missing in part: {np.isnan(actual).mean():.0%} of the elements never written"
    if np.array_equal(np.sort(actual, axis=None), np.sort(expected, axis=None)):
        return "the right elements in another order"
    wrong = float((expected != actual).mean())
    largest = float(np.abs(expected.astype(np.float64) - actual).max())
    rounded = largest <= 2**-8 * float(np.abs(expected).max() or 1.0)
    return f"{wrong:.1%} of the elements differ by at most {largest:.3g}" + (" (rounding?)" if rounded else "")
