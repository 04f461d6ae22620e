"""Whether what the engines compute with is what the policy holds, tensor by tensor, and a guess where it is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from rlctl.backends.vllm.messages import Reading
from rlctl.errors import VerificationError, listed
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
    unread: tuple[tuple[str, str], ...] = ()
    """(tensor of the policy, why the engine's copy cannot be read back); says nothing about whether it is equal."""
    buffers: int = 0
    """Buffers of the engine that were compared with what they must hold."""

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


def compare(source: dict[str, int], readings: Sequence[Reading], sample: Sequence[str] | None = None) -> Comparison:
    """The policy's fingerprints against everything that one engine's workers read back; with `sample` those tensors
    alone, whatever else was read with them.

    A tensor that the engine holds several times (replicas, a repacked copy beside a looked-up one) must be equal
    everywhere; boxes that its workers divide among themselves must add up to it. Buffers, which no refit changes, must
    hold what they did.
    """
    if sample is not None:
        wanted = set(sample)
        readings = [reading for reading in readings if reading.unreadable or reading.tensor in wanted]
    held: dict[str, list[Reading]] = {}
    buffers = [r for r in readings if r.expected is not None]
    unreadable = {r.tensor: r.unreadable for r in readings if r.unreadable}
    for reading in readings:
        if reading.expected is None and not reading.unreadable:
            held.setdefault(reading.tensor, []).append(reading)
    both = sorted(set(source) & set(held))
    absent = {name: _why_unread(name, unreadable) for name in sorted(set(source) - set(held))}
    changed = {r.tensor for r in buffers if r.value != r.expected}
    return Comparison(
        tensors=len(both),
        mismatched=(*(name for name in both if not _agrees(source[name], held[name])), *sorted(changed)),
        missing=tuple(name for name, why in absent.items() if not why),
        extra=tuple(sorted(set(held) - set(source))),
        unread=tuple((name, why) for name, why in absent.items() if why),
        buffers=len({r.tensor for r in buffers}),
    )


def _why_unread(tensor: str, unreadable: dict[str, str]) -> str:
    """The reason given for `tensor`, or that of a parameter that may hold it, by their names; empty: there is none."""
    if tensor in unreadable:
        return unreadable[tensor]
    for parameter, why in unreadable.items():
        module = parameter.rpartition(".")[0]
        if tensor.startswith((f"{module}.", f"{module.removesuffix('.routed_experts')}.")):
            return f"{parameter} {why}"
    return ""


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


def require_as_converted(source: dict[str, int], converted: Mapping[str, int], where: Path | None = None) -> None:
    """Raise VerificationError where tensors that the policy has loaded are not what their conversion, in the directory
    `where`, wrote."""
    changed = sorted(name for name, value in source.items() if converted.get(name, value) != value)
    if changed:
        raise VerificationError(
            f"{len(changed)} of {len(source)} tensors that the policy has loaded are not those that were converted: "
            f"{listed(changed, 5)}.",
            f"{where or 'The checkpoint'} was damaged since: remove it. What a run converted, the next one converts "
            "again; for another checkpoint, `rlctl convert`.",
        )


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
