"""The step times of a run in one table, as publications print them: phases averaged over a range of steps, next to the
plan's prediction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rlctl.errors import InputError
from rlctl.report.run_comparison import recorded_plan
from rlctl.runs.directory import RunDirectory
from rlctl.telemetry.metrics import read_metrics

COLUMNS = {
    "total": "total",
    "training": "policy training",
    "refit": "refit",
    "generation": "generation",
    "logprobs": "log-probs",
}
"""Keys of a step's seconds, and their titles in the table."""
TOKENS = "response_tokens_mean"


def steps_asked(text: str) -> tuple[int, int]:
    """Return the first and the last step of `A-B`, or of one step. Raises InputError for anything else."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not match or not 1 <= first <= last:
        raise InputError(f"--steps {text} is not a range of steps.", "Write A-B, for example --steps 22-29.")
    return first, last


def step_table(run: Path, steps: str) -> dict[str, Any]:
    """Return the measured means over the steps and the prediction. Seconds; `other` is the rest of the total.

    Raises InputError without a run, and for steps that it has not taken.
    """
    first, last = steps_asked(steps)
    lines = {int(line["step"]): line for line in read_metrics(RunDirectory(run).metrics) if "seconds" in line}
    if missing := [step for step in range(first, last + 1) if step not in lines]:
        done = f"it has steps {min(lines)} to {max(lines)}" if lines else "no step has finished"
        raise InputError(f"--steps {steps}: {run} has no step {missing[0]}; {done}.", "Name steps that it has.")
    chosen = [lines[step] for step in range(first, last + 1)]
    plan = recorded_plan(run)
    work = plan.get("workload") or {}
    measured = _row([line["seconds"] for line in chosen]) | {"mean_generated_tokens": _tokens(chosen)}
    predicted = _row([plan["seconds"]]) | {"mean_generated_tokens": work.get("mean_new_tokens")}
    ratios = {key: _ratio(measured[key], predicted[key]) for key in measured}
    rows = {"measured": measured, "predicted": predicted, "measured/predicted": ratios}
    return {"run": str(run), "steps": [first, last]} | rows


def _ratio(measured: float | None, predicted: float | None) -> float | None:
    return round(measured / predicted, 2) if measured is not None and predicted else None


def _row(seconds: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    means = {key: fmean(float(line.get(key) or 0.0) for line in seconds) for key in COLUMNS}
    rest = means["total"] - sum(value for key, value in means.items() if key != "total")
    return {key: round(value, 3) for key, value in (means | {"other": max(0.0, rest)}).items()}


def _tokens(lines: Sequence[Mapping[str, Any]]) -> float | None:
    seen = [float(line[TOKENS]) for line in lines if line.get(TOKENS) is not None]
    return round(fmean(seen), 1) if seen else None


def table_text(table: Mapping[str, Any]) -> str:
    """Return the table as text; seconds a step."""
    names = COLUMNS | {"other": "other", "mean_generated_tokens": "generated tokens"}
    first, last = table["steps"]
    head = f"{table['run']}, mean of steps {first} to {last}, seconds a step"
    rows = [["", *names.values()]]
    for kind in ("measured", "predicted", "measured/predicted"):
        values = (table[kind][key] for key in names)
        rows.append([kind, *("-" if value is None else f"{value:.2f}" for value in values)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join([head, *(f"  {line}" for line in lines)])
