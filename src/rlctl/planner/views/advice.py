"""The error for a request without a plan: the rule that a pin breaks, the smallest machine, the cheapest change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from rlctl.config.parallel import SIZES
from rlctl.errors import ConfigError, NoPlanError, RlctlError
from rlctl.models.constraints import Problem
from rlctl.planner.costs.adapters import lora_choice
from rlctl.planner.inputs.cluster import DEVICES, GIB, ClusterFacts, cpu_device
from rlctl.planner.inputs.request import Request
from rlctl.planner.result import Plan, Rejected
from rlctl.planner.search import engine_search
from rlctl.planner.search import policy_search as search
from rlctl.planner.search.feasible_plans import feasible_plans
from rlctl.planner.search.layout_rules import size_problem
from rlctl.settings.training import LoraConfig

LARGEST_NODES = 4096
SHOWN = 5
"""Rejected layouts that the error carries."""


def no_plan(request: Request, rejected: list[Rejected]) -> RlctlError:
    broken = _broken_pin(request)
    if broken is not None:
        return broken
    # The first pin whose removal makes a plan fit.
    free = None
    for key in request.pins:
        without = replace(request, pins={k: v for k, v in request.pins.items() if k != key})
        if feasible_plans(replace(without, backend="megatron") if key == "training.backend" else without)[0]:
            free = f"Without {key}={request.pins[key]} a plan fits."
            break
    advice = (
        free,
        _cheapest_change(request),
        *(_larger_host(request) or (_larger_device(request), _smallest_machine(request))),
    )
    error = NoPlanError(_closest(request, rejected), " ".join(text for text in advice if text) or None)
    error.rejected = tuple((other.plan, other.why) for other in rejected[:SHOWN])
    return error


def why_none(request: Request, rejected: list[Rejected]) -> str:
    """Why a request has no plan: the rule that a pin breaks, or the layout that comes closest."""
    broken = _broken_pin(request)
    return _closest(request, rejected) if broken is None else broken.message


def _closest(request: Request, rejected: list[Rejected]) -> str:
    closest = f" Closest: {rejected[0].plan}: {rejected[0].why}." if rejected else ""
    return f"No plan fits {request.cluster.describe()}.{closest}"


def _broken_pin(request: Request) -> ConfigError | None:
    """Return the pin that breaks a rule alone, with the nearest valid value."""
    for key, value in request.pins.items():
        section, _, name = key.partition(".")
        if section not in ("training", "generation") or not isinstance(value, int) or isinstance(value, bool):
            continue
        is_size = name in SIZES and name not in ("dp", *(("pp",) if request.names_stage_layers else ()))
        problem = (size_problem(request.facts, key, value) if is_size else None) or _alone(request, key)
        if problem is not None and (problem.key == key or problem.key not in request.pins):
            options = [v for v in range(1, min(max(2 * value, 16), MOST_TRIED) + 1) if v != value]
            if name == "micro_batch_tokens":
                options = [request.workload.max_length]
            elif name == "max_batched_tokens":
                options = [1 << power for power in range(value.bit_length(), 14)]
            others = [v for v in options if _alone(request, key, v) is None]
            nearest = min(others, key=lambda v: (abs(v - value), v), default=None)
            hint = f"The nearest value that works is {key}={nearest}." if nearest is not None else None
            return ConfigError(f"{key} = {value}: {problem.message}.", hint)
    return None


MOST_TRIED = 8192
"""Values tried in place of a failing one."""


def _alone(request: Request, key: str, value: int | None = None) -> Problem | None:
    """The rule that `key` breaks in every layout with the other pins of its section; None: some layout is valid."""
    pins = dict(request.pins) | ({key: value} if value is not None else {})
    tried, devices = replace(request, pins=pins), request.cluster.devices
    engines = key.startswith("generation.")
    if engines:
        devices = tried.pin("generation.devices", devices)
    problem: Problem | None = None
    for _, ruled in (engine_search.ruled_engines if engines else search.ruled_trainings)(tried, devices):
        if not ruled:
            return None
        problem = problem or (None if engines else next((p for p in ruled if p.key == key), None)) or ruled[0]
    none = f"no engines of that size fit {devices} devices" if engines else f"{devices} devices do not split that way"
    return problem or Problem(key, none)


def _changes(request: Request) -> Iterator[tuple[str, Request]]:
    """Return memory-saving changes, cheapest first: description and changed request."""
    workload, pins = request.workload, request.pins
    cluster = request.cluster
    for step in (2, 4, 8, 16, 32, 64):
        nodes = cluster.nodes - cluster.nodes % step
        if 0.9 * cluster.nodes <= nodes < cluster.nodes:
            words = f"--nodes {nodes}: a number that parallel sizes divide"
            yield words, replace(request, cluster=replace(cluster, nodes=nodes))
    if request.adapters is not None and request.adapters.held > 1:
        for half in range(1, request.adapters.held.bit_length()):
            held = request.adapters.held >> half
            words = f"{held} of the {request.adapters.held} runs at once" if held > 1 else "one run at a time"
            yield words, replace(request, adapters=replace(request.adapters, held=held))
    saving: dict[str, Any] = {}
    if pins.get("training.recompute") not in (None, "full"):
        saving["training.recompute"] = "full"
    if pins.get("training.optimizer_offload") is False:
        saving["training.optimizer_offload"] = True
    for count in range(1, len(saving) + 1):
        for chosen in combinations(saving.items(), count):
            words = " and ".join(f"{key}={str(value).lower()}" for key, value in chosen)
            yield words, replace(request, pins={**pins, **dict(chosen)})
    megatron = workload.trains and not request.fsdp
    if request.gradient_bytes == 4 and megatron and request.precision != "float32":
        words = "gradients accumulated in BF16 (ddp.grad_reduce_in_fp32=false)"
        yield words, replace(request, gradient_bytes=2)
    for factor in (2, 4):
        length = workload.max_length // factor
        shorter = replace(workload, max_length=length, max_new_tokens=None, mean_new_tokens=None)
        if length > workload.prompt_tokens:
            yield f"--max-length {length}", replace(request, workload=shorter)
    if request.adapters is None and workload.trains:
        adapters = lora_choice(request.facts, LoraConfig(rank=16))
        yield "adapters instead of all weights (training.lora.rank=16)", replace(request, adapters=adapters)
    if request.engine.matrix_bytes is None and request.generation_bytes == 2.0:
        words = "float8 weights in the engines (vllm.quantization=fp8_per_block)"
        yield words, replace(request, engine=replace(request.engine, matrix_bytes=1.0))


def _cheapest_change(request: Request) -> str | None:
    """The first change that makes a plan fit which can be run; else the first that makes any fit."""
    planned = None
    for words, changed in _changes(request):
        plans = feasible_plans(changed)[0]
        if any(plan.runnable for plan in plans):
            return f"It fits with {words}."
        if plans and planned is None:
            because = plans[0].not_runnable_because
            because_ = f" ({because[0]})" if because else " (which rlctl does not run yet)"
            planned = f"It would fit with {words}{because_}."
    return planned


def _larger_host(request: Request) -> tuple[str, ...]:
    """Return the minimum host memory for a plan on these devices; empty: more would not help."""
    cluster = request.cluster
    if cluster.is_cpu:
        return ()
    unlimited = replace(cluster, device=replace(cluster.device, host_memory=math.inf))
    # None copies at a save, which a plan does only where host memory allows it.
    saving = request.save_copies if request.save_copies is not None else False
    plans = feasible_plans(replace(request, cluster=unlimited, save_copies=saving))[0]
    if not (able := [plan for plan in plans if plan.runnable]):
        return ()
    need = math.ceil(min(plan.host_memory for plan in able) / GIB)
    have = cluster.device.host_memory / GIB
    text = f"It fits on a machine (or in a container) with {need} GiB of memory a node; this one has {have:.0f}"
    copied = " Or set run.save_copies=false: saves then copy nothing." if request.save_copies else ""
    kept = (
        " Or set generation.discard_weights=true: sleeping engines then keep no copy."
        if _would_discard(request)
        else ""
    )
    return (f"{text}.{copied}{kept}",)


def _would_discard(request: Request) -> bool:
    """Whether a plan fits once sleeping engines discard their weights."""
    work = request.workload
    if request.discards or not (work.engines and work.trains) or work.staleness is not None:
        return False
    return any(plan.runnable and plan.colocated for plan in feasible_plans(replace(request, discards=True))[0])


def _larger_device(request: Request) -> str | None:
    """Return the smallest GPU type with more memory that runs a plan on as many GPUs; types with this node size come
    first."""
    cluster = request.cluster
    larger = [device for device in DEVICES.values() if device.memory > cluster.device.memory and not cluster.is_cpu]
    for device in sorted(
        larger,
        key=lambda larger_cluster: (larger_cluster.gpus_per_node != cluster.gpus_per_node, larger_cluster.memory),
    ):
        there = replace(cluster, device=device)
        fits = device.gpus_per_node >= cluster.gpus_per_node
        if fits and any(plan.runnable for plan in feasible_plans(replace(request, cluster=there))[0]):
            return f"It fits with --gpu {device.name}."
    return None


def _smallest_machine(request: Request) -> str | None:
    """The smallest machine that fits; where rlctl cannot run its plan, also the smallest with one that it can."""

    def plans(cluster: ClusterFacts) -> list[Plan]:
        return feasible_plans(replace(request, cluster=cluster))[0]

    def runs(cluster: ClusterFacts) -> bool:
        return any(plan.runnable for plan in plans(cluster))

    first = _smallest(request.cluster, lambda cluster: bool(plans(cluster)))
    if first is None:
        return None
    text = f"The smallest machine of this kind that fits is {first.describe()}"
    if runs(first):
        return f"{text}."
    able = _smallest(request.cluster, runs)
    more = f"; with a plan that runs, {able.describe()}." if able is not None else "."
    return f"{text} ({plans(first)[0].not_runnable_because[0]}){more}"


def _smallest(cluster: ClusterFacts, good: Callable[[ClusterFacts], bool]) -> ClusterFacts | None:
    """More of the same nodes, by powers of two and then down to the first that is good; on a CPU more memory."""
    smaller = cluster
    for larger in _larger(cluster):
        if good(larger):
            step = max(1, (larger.nodes - smaller.nodes) // 8)
            between = range(smaller.nodes + step, larger.nodes, step) if not larger.is_cpu else ()
            return next((c for nodes in between if good(c := replace(larger, nodes=nodes))), larger)
        smaller = larger
    return None


def _larger(cluster: ClusterFacts) -> Iterator[ClusterFacts]:
    if cluster.is_cpu:
        device = cluster.device
        for factor in (2, 4, 8, 16, 32):
            larger = cpu_device(device.cores, device.memory * factor, device.bf16, device.memory_bandwidth)
            yield replace(cluster, device=larger)
        return
    per_node, nodes = cluster.gpus_per_node, cluster.nodes
    while nodes == 1 and per_node < cluster.device.gpus_per_node:
        per_node = min(cluster.device.gpus_per_node, per_node * 2)
        yield replace(cluster, gpus_per_node=per_node)
    while nodes < LARGEST_NODES:
        nodes = 1 << nodes.bit_length()  # the next power of two, which parallel sizes divide
        yield replace(cluster, nodes=nodes, gpus_per_node=per_node)
