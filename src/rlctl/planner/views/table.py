"""One line a machine: seconds, tokens, GPU-hours and memory of a step over a range of GPU counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.result import Plan

NAMES = ("GPUs", "s a step", "range", "tokens/s/GPU", "GPU-hours a step", "GiB of a GPU", "layout")


def machine_row(nodes: int, gpus_per_node: int, plan: Plan | str) -> dict[str, Any]:
    gpus = nodes * gpus_per_node
    row: dict[str, Any] = {"gpus": gpus, "nodes": nodes, "gpus_per_node": gpus_per_node, "fits": isinstance(plan, Plan)}
    if isinstance(plan, str):
        return row | {"why": plan.splitlines()[0]}
    return row | {
        "seconds": round(plan.total_s, 1),
        "seconds_range": [round(end, 1) for end in plan.ranges["total"]],
        "tokens_per_s_per_gpu": round(plan.tokens_per_s_per_gpu, 1),
        "gpu_hours": round(gpus * plan.total_s / 3600, 3),
        "memory_gib": round(max(memory.total for memory in plan.memory.values()) / GIB, 1),
        "plan": plan.name(),
    }


def rows_text(rows: Sequence[dict[str, Any]]) -> str:
    cells: list[tuple[str, ...]] = [NAMES]
    for row in rows:
        if not row["fits"]:
            reason = row["why"].removesuffix(".")
            cells.append((str(row["gpus"]), "-", "", "", "", "", reason if len(reason) <= 60 else f"{reason[:57]}..."))
            continue
        low, high = row["seconds_range"]
        numbers = (f"{row['seconds']:.0f}", f"{low:.0f} to {high:.0f}", f"{row['tokens_per_s_per_gpu']:,.0f}")
        cells.append((str(row["gpus"]), *numbers, f"{row['gpu_hours']:.2f}", f"{row['memory_gib']:.0f}", row["plan"]))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in cells]
    return "\n".join(f"  {line}" for line in lines)
