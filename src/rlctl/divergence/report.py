"""What `rlctl diverge` found, as JSON and on one page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from rlctl.divergence.causes import Cause
from rlctl.divergence.compare import SUM, Measure

WIDTH = 110
"""Characters of a line of the page."""
ROWS = 24
"""Most rows of the table."""
LATER = 6
"""Further findings that are named."""
LOGPROBS = tuple[tuple[int, int, float, float], ...]
"""(sequence, token, the program's log-prob, transformers')"""


@dataclass(frozen=True)
class Program:
    """A trainer or an engine against transformers."""

    name: str
    words: str
    """Its software, layout and dtype."""
    measures: tuple[Measure, ...]
    logprobs: LOGPROBS
    cause: Cause | None = None
    """Of the first difference; None: there is none."""
    missing: tuple[str, ...] = ()
    """Points that it has no values of."""
    problem: str | None = None
    """Why it computed nothing; None: it did."""

    @property
    def first(self) -> Measure | None:
        return next((measure for measure in self.measures if measure.parts), None)

    @property
    def parted(self) -> bool:
        return self.first is not None or self.problem is not None

    def to_json(self) -> dict[str, Any]:
        first = self.first
        return {
            "program": self.words,
            "parted": self.parted,
            "problem": self.problem,
            "first": None if first is None else _finite(asdict(first)) | {"times_noise": _number(times_noise(first))},
            "cause": None if self.cause is None else asdict(self.cause) | {"known": self.cause.known},
            "points": [_finite(asdict(measure)) | {"parts": measure.parts} for measure in self.measures],
            "not_compared": list(self.missing),
            "logprobs": _differences([(own, theirs) for _, _, own, theirs in self.logprobs]),
        }


@dataclass(frozen=True)
class DivergenceReport:
    """All programs."""

    model: str
    dtype: str
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    programs: tuple[Program, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def parted(self) -> bool:
        return any(program.parted for program in self.programs)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "tokens": list(self.lengths),
            "parted": self.parted,
            **{program.name: program.to_json() for program in self.programs},
            "engine_against_trainer": self._between(),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 1),
        }

    def _between(self) -> dict[str, float] | None:
        if len(self.programs) < 2:
            return None
        by_place = [{place[:2]: place[2] for place in program.logprobs} for program in self.programs]
        common = by_place[0].keys() & by_place[1].keys()
        return _differences([(by_place[1][place], by_place[0][place]) for place in sorted(common)])

    def lines(self) -> list[str]:
        """Return the page."""
        lines = [f"{self.model} in {self.dtype}, against transformers"]
        lines += [f"  {program.name:<8} {program.words}" for program in self.programs]
        counts = " and ".join(map(str, self.lengths))
        lines.append(
            f"{len(self.lengths)} sequences of {counts} tokens; each sub-layer of transformers got the program's input"
        )
        heads = (f"{program.name + ': difference':>22}{'noise':>10}{'limit':>8}" for program in self.programs)
        lines += ["", f"{'':<22}" + "".join(heads)]
        rows = list(self._table())
        if len(rows) > ROWS:  # a fault of every layer
            rows = [*rows[: ROWS - 3], f"{'...':<22}{len(rows) - ROWS + 1} rows more (--json has all)", *rows[-2:]]
        lines += [*rows, ""]
        for program in self.programs:
            if differences := _differences([(own, theirs) for _, _, own, theirs in program.logprobs]):
                words = f"log-probs, {program.name} against transformers"
                lines.append(f"{words}: mean {differences['mean']:.1e}, max {differences['max']:.1e}")
        if between := self._between():
            words = "log-probs, engine against trainer"
            lines.append(f"{words}: mean {between['mean']:.1e}, max {between['max']:.1e}")
        for program in self.programs:
            lines.append("")
            for line in _verdict(program, self.dtype):
                lines += textwrap.wrap(line, WIDTH, subsequent_indent="  " + " " * (len(line) - len(line.lstrip())))
        return lines + [""] * bool(self.notes) + [f"note: {note}" for note in self.notes]

    def _table(self) -> Iterator[str]:
        """Layers without a finding that follow each other share a row: their largest numbers. Sums have rows only where
        they part."""
        every = [measure for program in self.programs for measure in program.measures]
        parting = {measure.point for measure in every if measure.parts}
        points = [
            point for point in dict.fromkeys(m.point for m in every) if point in parting or not point.endswith(SUM)
        ]
        by_point = [{measure.point: measure for measure in program.measures} for program in self.programs]

        def group_of(point: str) -> Any:
            return point if point in parting or not point.startswith("layers.") else ""

        for _, members in groupby(points, group_of):
            row = list(members)
            listed = [[measures[point] for point in row if point in measures] for measures in by_point]
            yield f"{_range(row):<22}" + "".join(_cells(measures) for measures in listed)


def times_noise(measure: Measure) -> float:
    return measure.error / measure.noise if measure.noise else math.inf


def _cells(measures: Sequence[Measure]) -> str:
    if not measures:
        return f"{'not compared':>22}{'':>18}"
    error, noise, worst = (max(getattr(measure, name) for measure in measures) for name in ("error", "noise", "worst"))
    limit = "PARTS" if any(measure.parts for measure in measures) else f"{worst:.0%}"
    return f"{error:>22.1e}{noise:>10.1e}{limit:>8}"


def _range(points: Sequence[str]) -> str:
    if len(points) == 1:
        return points[0]
    first, last = points[0].split(".")[1], points[-1].split(".")[1]
    return f"layers.{first}" if first == last else f"layers.{first} to {last}"


def _verdict(program: Program, dtype: str) -> list[str]:
    if program.problem is not None:
        return [f"{program.name}: not compared: {program.problem}"]
    first, cause = program.first, program.cause
    unseen = f" Not compared: {', '.join(program.missing)}." if program.missing else ""
    if first is None or cause is None:
        return [f"{program.name}: computes what transformers computes, up to the noise of {dtype}.{unseen}"]
    lines = [
        f"{program.name} PARTS at {first.point}: its output is off by {first.error:.2g} of its size, "
        f"{times_noise(first):.2g} times the noise of {dtype}, in {first.tokens_off} of {first.tokens} tokens.",
        f"  likely cause, {cause.operation}: {cause.words}",
    ]
    if cause.known:
        lines.append(f"  evidence: transformers with this change is within {cause.difference:.1e} of the program")
    later = [measure.point for measure in program.measures if measure.parts and measure is not first]
    if later:
        more = f" and {len(later) - LATER} more" if len(later) > LATER else ""
        lines.append(f"  also, on the input they get: {', '.join(later[:LATER])}{more}")
    return [*lines, *([f" {unseen}"] if unseen else [])]


def _differences(pairs: Sequence[tuple[float, float]]) -> dict[str, float] | None:
    if not pairs:
        return None
    differences = [abs(one - other) for one, other in pairs]
    return {"mean": sum(differences) / len(differences), "max": max(differences), "tokens": len(pairs)}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _number(value) if isinstance(value, float) else value for name, value in values.items()}


def _number(value: float) -> float | None:
    """A number for JSON, which has no infinity."""
    return value if math.isfinite(value) else None
