"""`rlctl plan --calibrate`: the measured phases of a run become this machine's."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import InputError
from rlctl.jobs.run_comparison import PlannedAndMeasured, compare_run, recorded_plan
from rlctl.planner.inputs.cluster import save_calibration

LEAST_S = 0.001
"""Phases that take less are not calibrated."""


def calibrate(run: Path) -> tuple[Path, dict[str, float], list[PlannedAndMeasured]]:
    """Save measured over predicted seconds of each phase of a run; return the file, the factors and the comparison.

    Raises InputError where the run has no measured phase that its plan predicts.
    """
    rows, cluster = compare_run(run), recorded_plan(run)["cluster"]
    before = cluster.get("factors") or {}
    factors = {
        row.name: before.get(row.name, 1.0) * row.measured / row.predicted
        for row in rows
        if row.name != "total" and min(row.measured, row.predicted) >= LEAST_S
    }
    if not factors:
        raise InputError(f"--calibrate {run}: no phase was both predicted and measured.", "Name a finished run.")
    return save_calibration(cluster["gpu"], str(run), factors), factors, rows
