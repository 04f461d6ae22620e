"""One line a step: what `metrics.jsonl` holds, and how a metric is declared."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlctl.config.files import replace_file
from rlctl.errors import InputError

Metrics = Mapping[str, Any]
TOKENS = "tokens"
"""Name of the sum that counts response tokens."""
LOSS = "loss"
"""The metric where lower is better; for all others higher is better."""


@dataclass(frozen=True)
class Metric:
    """A value that is computed while a step trains: how its parts become one number, and where it is shown."""

    name: str
    """Name in metrics.jsonl; a slash makes it part of a nested value, unless it is `flat`."""
    reduce: Literal["mean", "sum", "max", "effective"]
    """Over the step's response tokens. `max` is at least 0; `effective`: relative effective sample size, (sum of w)^2 /
    (tokens x sum of w^2)."""
    curve: str = ""
    """Title of its curve in the report; empty: it has none."""
    column: str = ""
    """Heading of its column in the terminal; empty: it has none."""
    form: str = ".3f"
    """How the terminal formats it."""
    per: str = TOKENS
    """Name of the sum that a mean is divided by: of the response tokens, or another metric."""
    flat: bool = False
    """The name stands in metrics.jsonl with its slash, as other trainers write it."""


class MetricsFile:
    """`metrics.jsonl`, opened and flushed to the disk for each line: an editor may have put another file there."""

    def __init__(self, path: Path, *, finished: int) -> None:
        """Open `path`, dropping the lines of steps after step `finished` (a killed run is ahead of its checkpoint)."""
        self.path = path
        kept = [line for line in read_metrics(path) if line["step"] <= finished]
        replace_file(path, "".join(_to_line(line) for line in kept).encode())
        self.steps = {line["step"] for line in kept}

    def log(self, step: int, metrics: Metrics) -> None:
        with self.path.open("a") as file:
            file.write(_to_line({"step": step, **metrics}))
            file.flush()
            os.fsync(file.fileno())
        self.steps.add(step)


def flatten(metrics: Metrics, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, value) of every number in `metrics`, nested names joined by a slash."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)


def nested(values: Mapping[str, float]) -> dict[str, Any]:
    """Undo `flatten`: nest values by slashes in names."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *outer, last = name.split("/")
        place = tree
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` except an incomplete last one. Raises InputError for other damage."""
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}.", "Restore the file.") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            metrics = json.loads(line)
            if not isinstance(metrics, dict) or not isinstance(metrics.get("step"), int):
                raise ValueError("it has no `step`")
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise InputError(
                    f"{path}, line {number} is not the metrics of a step: {error}.",
                    "Restore the file, or remove the line.",
                ) from error
        else:
            records.append(metrics)
    return records


def _to_line(metrics: Metrics) -> str:
    return json.dumps(finite(metrics), allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """Return `value` with None for NaN and infinities, which JSON lacks."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
