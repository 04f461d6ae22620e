"""Prediction against measurement of a finished run: by phase, and which constant is off."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rlctl.errors import InputError
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.inputs.constants import DEFAULTS
from rlctl.runs.directory import RunDirectory
from rlctl.telemetry.metrics import read_metrics
from rlctl.telemetry.phases import Phase

SUSPECTS = {
    Phase.GENERATION: "decode_bandwidth_efficiency, decode_step_s or length_sigma (CPU: CPU_DECODE_EFFICIENCY)",
    Phase.REWARD: "reward_s",
    Phase.LOGPROBS: "matmul_efficiency (CPU: CPU_MATMUL_EFFICIENCY)",
    Phase.CRITIC: "matmul_efficiency or packing_fill (CPU: CPU_MATMUL_EFFICIENCY)",
    Phase.TRAINING: "matmul_efficiency or packing_fill (CPU: CPU_MATMUL_EFFICIENCY)",
    Phase.REFIT: "refit_link_efficiency or refit_fixed_s",
    Phase.OTHER: "other_s",
}
TOLERANCE = 0.3


@dataclass(frozen=True)
class PlannedAndMeasured:
    """Seconds of a phase in a step (predicted, and the median measured), or most memory of a process in GiB (predicted
    of its largest phase, and measured on the fullest rank)."""

    name: str
    predicted: float
    measured: float
    suspect: str | None
    """The constant to look at, where prediction and measurement differ by more than 30%."""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted, for a calibration; None: no prediction."""
        return self.measured / self.predicted if self.predicted else None


def recorded_plan(run: Path) -> dict[str, Any]:
    """The plan in the run's manifest."""
    plan = RunDirectory(run).manifest().get("plan") or {}
    if "seconds" not in plan:
        raise InputError(f"--run {run}: its manifest holds no plan with predicted seconds.")
    return plan


def compare_run(run: Path) -> list[PlannedAndMeasured]:
    """Return one row a phase, and the total, measured over the steps without the first if there are more."""
    predicted, rows = recorded_plan(run)["seconds"], []
    steps = [line["seconds"] for line in read_metrics(RunDirectory(run).metrics) if "seconds" in line]
    if not steps:
        raise InputError(f"--run {run}: no step has finished.", "Give the directory of a run that took a step.")
    total = median(step.get("total", 0.0) for step in steps[1:] or steps)
    for phase in [*Phase, "total"]:
        expected, seen = float(predicted.get(phase, 0.0)), median(step.get(phase, 0.0) for step in steps[1:] or steps)
        off = abs(expected - seen) > max(TOLERANCE * max(seen, 1e-9), 0.05 * total)
        rows.append(PlannedAndMeasured(str(phase), expected, seen, SUSPECTS.get(phase) if off else None))
    return rows


ELSEWHERE = (
    "total", "runtime", "teacher runtime", "teacher asleep", "reward model runtime", "reward model asleep",
    "engine asleep", "policy asleep", "engine runtime", "CUDA graphs",
)  # fmt: skip
"""Entries of a GPU's memory that are no part that torch's allocator hands out in the process itself."""
MEMORY_SUSPECTS = {
    "policy": "fragmentation or logit_copy_bytes (CPU: cpu_policy_bytes)",
    "engine": "sampler_bytes (CPU: CPU_ENGINE_BYTES or cpu_process_bytes)",
}


def compare_memory(run: Path) -> list[PlannedAndMeasured]:
    """Policy and engine; a run that was killed, or is older than this file, has no measurement: no rows.

    On a CPU resident memory of a process is compared, without more pages of library files than the plan counts, on a
    GPU what torch reserved there.
    """
    path, plan = run / "memory.json", recorded_plan(run)
    if not path.exists():
        return []
    measured, cpu = json.loads(path.read_text(encoding="utf-8")), plan["cluster"]["gpu"] == "cpu"
    rows = []
    for process, phases in (("policy", ("training", "logprobs", "saving")), ("engine", ("generation",))):
        ranks = measured.get(process, ())
        seen = max((_on_cpu(rank, process) if cpu else rank.get("device", 0) for rank in ranks), default=0) / GIB
        parts = [plan["memory_gib"].get(phase, {}).items() for phase in phases]
        left_out = ("total",) if cpu else ELSEWHERE
        expected = max(sum(value for name, value in memory_parts if name not in left_out) for memory_parts in parts)
        if seen:
            off = abs(expected - seen) > TOLERANCE * seen
            rows.append(PlannedAndMeasured(process, expected, seen, MEMORY_SUSPECTS[process] if off else None))
    return rows


def _on_cpu(rank: dict[str, int], process: str) -> float:
    """Return the bytes of a process that its plan predicts."""
    surplus = max(0.0, rank.get("files", 0) - DEFAULTS.cpu_library_bytes) if process == "policy" else 0.0
    return rank.get("host", 0) - surplus


def comparison_text(rows: list[PlannedAndMeasured], title: str, unit: str) -> str:
    """A table, and what to look at."""
    lines = [f"  {title:<12}{f'predicted {unit}':>15}{f'measured {unit}':>14}{'measured/predicted':>20}"]
    for row in rows:
        ratio = f"{row.ratio:.2f}" if row.ratio is not None else "-"
        mark = f"  look at {row.suspect}" if row.suspect else ""
        lines.append(f"  {row.name:<12}{row.predicted:>15.2f}{row.measured:>14.2f}{ratio:>20}{mark}")
    return "\n".join(lines)
