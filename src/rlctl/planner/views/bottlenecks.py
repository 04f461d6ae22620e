"""What limits a run, and which single change of the machine or the configuration would help most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.inputs.request import Request
from rlctl.planner.result import Plan
from rlctl.planner.search.feasible_plans import feasible_plans

MOST_GPUS = 512
"""Larger machines are not planned again for each change."""
FIXED = ("training.", "generation.")


@dataclass(frozen=True)
class Improvement:
    """A change, and the seconds of a step with it."""

    words: str
    seconds: float
    gpus: int


def limits(plan: Plan) -> str:
    """Return the longest phase of a step, and the fullest phase."""
    phase, seconds = max(plan.seconds.items(), key=lambda item: item[1])
    name, memory = max(plan.memory.items(), key=lambda item: item[1].total)
    device = plan.cluster.device.memory
    return (
        f"{phase.value} takes {seconds / plan.total_s:.0%} of a step; {name} fills {memory.total / GIB:.0f} of "
        f"{device / GIB:.0f} GiB"
    )


def improvements(plan: Plan) -> list[Improvement]:
    """Return changes that fit, most helpful first; empty for a CPU, a large machine, or a plan without training."""
    cluster = plan.cluster
    if plan.training is None or cluster.is_cpu or cluster.gpus > MOST_GPUS:
        return []
    changes = []
    for words, request in _single_changes(plan):
        if plans := [name for name in feasible_plans(request)[0] if name.runnable]:
            changes.append(Improvement(words, plans[0].total_s, request.cluster.gpus))
    return sorted(changes, key=lambda improvement: improvement.seconds * improvement.gpus / cluster.gpus)


def _single_changes(plan: Plan) -> Iterator[tuple[str, Request]]:
    request, workload, device = plan.request, plan.workload, plan.cluster.device
    request = replace(request, pins={key: value for key, value in request.pins.items() if not key.startswith(FIXED)})
    cluster = plan.cluster
    yield (
        f"twice the nodes (--nodes {2 * cluster.nodes})",
        replace(request, cluster=replace(cluster, nodes=2 * cluster.nodes)),
    )
    if workload.rollouts and workload.staleness is None and cluster.gpus > 1 and request.teacher is None:
        ahead = replace(workload, staleness=1, in_flight="keep")
        yield "rollouts while the policy trains (--async)", replace(request, workload=ahead)
    if workload.lengths_differ and not workload.packing and not plan.facts.unpacked:
        packed = replace(workload, packing=True, dynamic=False)
        yield "packed rows (training.packing=true)", replace(request, workload=packed)
    if plan.generation is not None and request.engine.matrix_bytes is None and device.fp8 > device.bf16:
        engine = replace(request.engine, matrix_bytes=1.0)
        yield "float8 engines (vllm.quantization=fp8_per_block)", replace(request, engine=engine)
    larger = replace(device, memory=2 * device.memory)
    yield "GPUs with twice the memory", replace(request, cluster=replace(cluster, device=larger))


def improvements_text(plan: Plan, changes: list[Improvement]) -> list[str]:
    """Return lines on limits, and on changes with gain and cost."""
    lines = [limits(plan)]
    for improvement in changes:
        gain = plan.total_s / improvement.seconds - 1
        cost = improvement.seconds * improvement.gpus / (plan.total_s * plan.cluster.gpus) - 1
        more = f", {100 * cost:+.0f}% GPU-hours" if improvement.gpus != plan.cluster.gpus else ""
        speed = f"{100 * gain:+.0f}% steps an hour" if abs(gain) >= 0.005 else "no faster"
        lines.append(f"{improvement.words}: {improvement.seconds:.0f} s a step ({speed}{more})")
    return lines
