"""Prediction against measurement of a finished run: by phase, and which constant is off."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rlctl.config.files import written_text
from rlctl.errors import InputError
from rlctl.planner.inputs.cluster import GIB
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
class _Comparison:
    predicted: float
    measured: float
    suspect: str | None
    """The constant to look at, where prediction and measurement differ by more than 30%."""

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return self.predicted / self.measured if self.measured else None

    def columns(self, name: str) -> str:
        """A line of a table."""
        ratio = f"{self.ratio:.2f}" if self.ratio is not None else "-"
        mark = f"  look at {self.suspect}" if self.suspect else ""
        return f"  {name:<12}{self.predicted:>15.2f}{self.measured:>14.2f}{ratio:>8}{mark}"


@dataclass(frozen=True)
class PhaseComparison(_Comparison):
    """Seconds of a phase in a step: predicted, and the median measured."""

    phase: str


@dataclass(frozen=True)
class MemoryComparison(_Comparison):
    """Most memory of a process in GiB: predicted (of its largest phase), and measured on the fullest rank."""

    process: str


def measured_seconds(run: Path) -> dict[str, float]:
    """Median seconds of each phase over the steps of a run, the first step left out where there are more."""
    path = run / "metrics.jsonl"
    if not path.exists():
        raise InputError(f"--run {run}: there is no metrics.jsonl.", "Give the directory of a run that took a step.")
    steps = [line["seconds"] for line in read_metrics(path) if "seconds" in line]
    if not steps:
        raise InputError(f"--run {run}: no step has finished.", "Give the directory of a run that took a step.")
    steady = steps[1:] or steps
    return {phase: median(step.get(phase, 0.0) for step in steady) for phase in [*Phase, "total"]}


def recorded_plan(run: Path) -> dict[str, Any]:
    """The plan in the run's manifest."""
    path = run / "manifest.json"
    if not path.exists():
        raise InputError(f"--run {run}: there is no manifest.json.", "Give the directory of a run.")
    try:
        plan = json.loads(written_text(path)).get("plan")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"--run {run}: manifest.json cannot be read: {error}.") from error
    if not isinstance(plan, dict) or "seconds" not in plan:
        raise InputError(f"--run {run}: its manifest holds no plan with predicted seconds.")
    return plan


def compare_run(run: Path) -> list[PhaseComparison]:
    """One row a phase, and the total."""
    predicted, measured = recorded_plan(run)["seconds"], measured_seconds(run)
    rows = []
    for phase in [*Phase, "total"]:
        expected, seen = float(predicted.get(phase, 0.0)), measured[phase]
        off = abs(expected - seen) > TOLERANCE * max(seen, 1e-9) and abs(expected - seen) > 0.05 * measured["total"]
        rows.append(PhaseComparison(expected, seen, SUSPECTS.get(phase) if off else None, str(phase)))
    return rows


ELSEWHERE = (
    "runtime",
    "teacher runtime",
    "teacher asleep",
    "engine asleep",
    "policy asleep",
    "engine runtime",
    "CUDA graphs",
)
"""Parts of a GPU's memory that torch's allocator does not hand out in the process itself."""
MEMORY_SUSPECTS = {
    "policy": "fragmentation or logit_copy_bytes (CPU: cpu_process_bytes)",
    "engine": "sampler_bytes (CPU: CPU_ENGINE_BYTES or cpu_process_bytes)",
}


def compare_memory(run: Path) -> list[MemoryComparison]:
    """Policy and engine; a run that was killed, or is older than this file, has no measurement: no rows.

    On a CPU resident memory of a process is compared, on a GPU what torch reserved there.
    """
    path, plan = run / "memory.json", recorded_plan(run)
    if not path.exists():
        return []
    measured, cpu = json.loads(written_text(path)), plan["cluster"]["gpu"] == "cpu"
    rows = []
    for process, phases in (("policy", ("training", "logprobs")), ("engine", ("generation",))):
        seen = max((rank.get("host" if cpu else "device", 0) for rank in measured.get(process, ())), default=0) / GIB
        expected = max(_held(plan["memory_gib"].get(phase, {}), cpu) for phase in phases)
        if seen:
            off = abs(expected - seen) > TOLERANCE * seen
            rows.append(MemoryComparison(expected, seen, MEMORY_SUSPECTS[process] if off else None, process))
    return rows


def _held(parts: dict[str, float], cpu: bool) -> float:
    """GiB of a phase that the measurement covers."""
    return sum(value for name, value in parts.items() if name != "total" and (cpu or name not in ELSEWHERE))


def memory_text(rows: list[MemoryComparison]) -> str:
    """A table, and what to look at."""
    head = f"  {'process':<12}{'predicted GiB':>15}{'measured GiB':>14}{'ratio':>8}"
    return "\n".join([head, *(row.columns(row.process) for row in rows)])


def comparison_text(rows: list[PhaseComparison], run: Path) -> str:
    """A table, and what to look at."""
    head = f"  {'phase':<12}{'predicted s':>15}{'measured s':>14}{'ratio':>8}"
    return "\n".join([f"{run}", head, *(row.columns(row.phase) for row in rows)])
