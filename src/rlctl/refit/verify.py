"""Whether what the engines compute with is what the policy holds, tensor by tensor, and a guess where it is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from rlctl.backends.vllm.messages import Reading
from rlctl.errors import VerificationError
from rlctl.weights.fingerprints import combine


@dataclass(frozen=True)
class Comparison:
    """Outcome of one comparison."""

    tensors: int
    mismatched: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """The policy holds it, the engine does not."""
    extra: tuple[str, ...] = ()
    """The engine holds it, the policy does not."""

    @property
    def equal(self) -> bool:
        return not (self.mismatched or self.missing or self.extra)


def source_sums(by_rank: Iterable[dict[str, int]]) -> dict[str, int]:
    """Fingerprint of each whole tensor from the shares of all ranks."""
    sums: dict[str, int] = {}
    for part in by_rank:
        for name, value in part.items():
            sums[name] = combine([sums.get(name, 0), value])
    return sums


def compare(source: dict[str, int], readings: Sequence[Reading]) -> Comparison:
    """The policy's fingerprints against everything that one engine's workers read back.

    A tensor that the engine holds several times (replicas, a repacked copy beside a looked-up one) must be equal
    everywhere; boxes that its workers divide among themselves must add up to it.
    """
    held: dict[str, list[Reading]] = {}
    for reading in readings:
        held.setdefault(reading.tensor, []).append(reading)
    both = sorted(set(source) & set(held))
    return Comparison(
        tensors=len(both),
        mismatched=tuple(name for name in both if not _agrees(source[name], held[name])),
        missing=tuple(sorted(set(source) - set(held))),
        extra=tuple(sorted(set(held) - set(source))),
    )


def _agrees(value: int, readings: list[Reading]) -> bool:
    by_site: dict[str, dict[tuple, set[int]]] = {}
    for r in readings:
        by_site.setdefault(r.site, {}).setdefault((r.start, r.extent), set()).add(r.value)
    return all(_site_agrees(value, readings[0].shape, boxes) for boxes in by_site.values())


def _site_agrees(value: int, shape: tuple[int, ...], boxes: dict[tuple, set[int]]) -> bool:
    if any(len(values) > 1 for values in boxes.values()):  # replicas differ
        return False
    covered = sum(prod(extent) for _, extent in boxes)
    return covered == prod(shape) and combine([v for (v,) in boxes.values()]) == value


def require_equal(comparison: Comparison, version: int, where: str) -> None:
    """Raise VerificationError naming the tensors that differ."""
    if comparison.equal:
        return
    parts = [
        f"{len(names)} {what} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
        for what, names in (
            ("differ", comparison.mismatched),
            ("are missing in the engine", comparison.missing),
            ("are in the engine alone", comparison.extra),
        )
        if names
    ]
    raise VerificationError(
        f"Refit to version {version}: of {comparison.tensors} tensors in {where}, {'; '.join(parts)}.",
        "The engine refuses to generate. `rlctl refit-test` says more.",
    )
