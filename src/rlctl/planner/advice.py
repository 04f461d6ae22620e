"""What to say when nothing fits: the rule that a pin breaks, the smallest machine that would do, the cheapest
change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rlctl.errors import ConfigError, NoPlanError, RlctlError
from rlctl.planner import search
from rlctl.planner.cluster import ClusterFacts, cpu_device
from rlctl.planner.plan import Rejected, _plans
from rlctl.planner.rules import Problem, generation_problems, lone_problem, training_problems
from rlctl.planner.search import Request

LARGEST_NODES = 4096
SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp")


def no_plan(request: Request, rejected: list[Rejected]) -> RlctlError:
    """The error for a request that has no plan."""
    broken = _broken_pin(request)
    if broken is not None:
        return broken
    pinned = list(request.pins)
    tightest = next((r for r in rejected if "GiB" in r.why), rejected[0] if rejected else None)
    why = f" Closest: {tightest.plan}: {tightest.why}." if tightest else ""
    hints = [
        text for text in (_free_pin(request, pinned), _cheapest_change(request), _smallest_machine(request)) if text
    ]
    return NoPlanError(f"No plan fits {request.cluster.describe()}.{why}", " ".join(hints) or None)


def fits(request: Request) -> bool:
    """Whether any plan fits."""
    return bool(_plans(request)[0])


def _broken_pin(request: Request) -> ConfigError | None:
    """The pin that breaks a rule whatever the rest is, with the nearest value that works."""
    for key, value in request.pins.items():
        section, _, name = key.partition(".")
        if section not in ("training", "generation") or not isinstance(value, int) or isinstance(value, bool):
            continue
        known = name in SIZES
        problem = (lone_problem(request.facts, key, value) if known else None) or _alone(request, key)
        if problem is not None:
            others = [v for v in _values(request, name, value) if _alone(request, key, v) is None]
            nearest = min(others, key=lambda v: (abs(v - value), v), default=None)
            hint = f"The nearest value that works is {key}={nearest}." if nearest is not None else None
            return ConfigError(f"{key} = {value}: {problem.message}.", hint)
    return None


def _values(request: Request, name: str, value: int) -> list[int]:
    if name == "micro_batch_tokens":
        return [request.workload.max_length]
    return [v for v in range(1, max(2 * value, 16) + 1) if v != value]


def _alone(request: Request, key: str, value: int | None = None) -> Problem | None:
    """The rule that `key` breaks in every layout, with all other pins of its section kept; None: some layout is
    valid."""
    pins = dict(request.pins) | ({key: value} if value is not None else {})
    tried = replace(request, pins=pins)
    devices = request.cluster.gpus or 1
    problem: Problem | None = None
    if key.startswith("generation."):
        for layout in search.generation_layouts(tried, devices):
            found = generation_problems(
                request.facts, layout, request.workload, layout.gpus if request.cluster.is_cpu else devices
            )
            if not found:
                return None
            problem = problem or found[0]
        return problem or Problem(key, f"no engines of that size fit {devices} devices")
    for layout in search.training_layouts(tried, devices):
        for rows in search.row_sizes(tried, layout.cp):
            for vpp in search.virtual_stages(tried, layout):
                choice = replace(layout, micro_batch_tokens=rows, vpp=vpp)
                world = choice.world_size if request.cluster.is_cpu else devices
                found = training_problems(request.facts, choice, request.workload, request.cluster, world)
                if not found:
                    return None
                problem = problem or next((p for p in found if p.key == key), found[0])
    return problem or Problem(key, f"{devices} devices do not split that way")


def _free_pin(request: Request, pinned: list[str]) -> str | None:
    """The first pin whose removal makes a plan fit."""
    for key in pinned:
        if fits(replace(request, pins={k: v for k, v in request.pins.items() if k != key})):
            return f"Without {key}={request.pins[key]} a plan fits."
    return None


def _changes(request: Request) -> Iterator[tuple[str, Request]]:
    """Changes that save memory, the cheapest first."""
    workload = request.workload
    if request.pins.get("training.recompute") not in (None, "full"):
        yield "training.recompute=full", replace(request, pins={**request.pins, "training.recompute": "full"})
    if request.pins.get("training.optimizer_offload") is False:
        yield (
            "training.optimizer_offload=true",
            replace(request, pins={**request.pins, "training.optimizer_offload": True}),
        )
    if request.generation_bytes == 2.0:
        yield "FP8 weights in generation (not run by `train` yet)", replace(request, generation_bytes=1.0)
    if request.gradient_bytes == 4:
        yield "gradients accumulated in BF16 (ddp.grad_reduce_in_fp32=false)", replace(request, gradient_bytes=2)
    for factor in (2, 4):
        length = workload.max_length // factor
        shorter = replace(workload, max_length=length, max_new_tokens=None, mean_new_tokens=None)
        if length > workload.prompt_tokens:
            yield f"--max-length {length}", replace(request, workload=shorter)


def _cheapest_change(request: Request) -> str | None:
    for text, changed in _changes(request):
        if fits(changed):
            return f"It fits with {text}."
    return None


def _smallest_machine(request: Request) -> str | None:
    """More of the same nodes, by doubling; on a CPU more memory."""
    for cluster in _larger(request.cluster):
        if fits(replace(request, cluster=cluster)):
            return f"The smallest machine of this kind that fits is {cluster.describe()}."
    return None


def _larger(cluster: ClusterFacts) -> Iterator[ClusterFacts]:
    if cluster.is_cpu:
        device: Any = cluster.device
        for factor in (2, 4, 8, 16, 32):
            larger = cpu_device(device.cores, device.memory * factor, device.bf16, device.memory_bandwidth)
            yield replace(cluster, device=larger)
        return
    usual = cluster.device.gpus_per_node
    per_node = cluster.gpus_per_node
    while cluster.nodes == 1 and per_node < usual:
        per_node = min(usual, per_node * 2)
        yield replace(cluster, gpus_per_node=per_node)
    nodes = cluster.nodes
    while nodes < LARGEST_NODES:
        nodes *= 2
        yield replace(cluster, nodes=nodes, gpus_per_node=max(per_node, cluster.gpus_per_node))
