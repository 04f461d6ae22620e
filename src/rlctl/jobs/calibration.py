"""`rlctl plan --calibrate`: correct predictions for this machine with a run's measured phases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rlctl.config.load import stored_values
from rlctl.errors import InputError
from rlctl.methods.configuration import resolve
from rlctl.planner.inputs.cluster import save_calibration
from rlctl.preparation.shown_plan import shown_plan
from rlctl.report.run_comparison import PlannedAndMeasured, compare_run, recorded_plan
from rlctl.runs.directory import RunDirectory
from rlctl.telemetry.metrics import read_metrics

LEAST_S = 0.001
"""Minimum duration of a calibrated phase."""
TOKENS = "response_tokens_mean"


def calibrate(run: Path) -> tuple[Path, dict[str, float], list[PlannedAndMeasured]]:
    """Save the ratio of measured to predicted seconds for each phase of a run; return the file, the ratios and the
    comparison. The prediction uses the measured completion lengths, which the run's plan could not know.

    Raises InputError if no phase was both measured and predicted.
    """
    rows, cluster = compare_run(run), recorded_plan(run)["cluster"]
    earlier_factors = cluster.get("factors") or {}
    predicted = predicted_again(run) or {row.name: row.predicted / earlier_factors.get(row.name, 1.0) for row in rows}
    rows = [replace(row, predicted=predicted[row.name], suspect=None) for row in rows]
    factors = {
        row.name: row.measured / row.predicted
        for row in rows
        if row.name != "total" and min(row.measured, row.predicted) >= LEAST_S
    }
    if not factors:
        raise InputError(f"--calibrate {run}: no phase was both predicted and measured.", "Name a finished run.")
    return save_calibration(cluster["gpu"], str(run), factors), factors, rows


def predicted_again(run: Path) -> dict[str, float] | None:
    """Return the uncalibrated prediction in seconds, per phase and in total, for a run's settings, layout and mean
    completion length; None: the run had no completions."""
    lengths = [line[TOKENS] for line in read_metrics(RunDirectory(run).metrics) if line.get(TOKENS)]
    if not lengths:
        return None
    values = stored_values(RunDirectory(run).manifest()["config"])
    mean = f"generation.mean_length={max(1, round(fmean(lengths[1:] or lengths)))}"
    plan = shown_plan(resolve(stored=lambda _: values, environment={}, sets=[mean]), 1, lambda _: None)
    factors = dict(plan.cluster.factors)
    seconds = {phase.value: value / factors.get(phase.value, 1.0) for phase, value in plan.seconds.items()}
    return seconds | {"total": sum(seconds.values())}
