"""Enumerates layouts, keeps what is valid and fits, and ranks it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlctl.models.facts import ModelFacts
from rlctl.planner import memory as mem
from rlctl.planner import time as timing
from rlctl.planner.choice import Adapters, GenerationChoice, TrainingChoice
from rlctl.planner.cluster import GIB, ClusterFacts
from rlctl.planner.constants import Constants
from rlctl.planner.generation import (
    CPU_ENGINE_BYTES,
    generation_time,
    kv_bytes_per_token_on_device,
    overhead_bytes,
    plan_kv,
    weight_bytes,
)
from rlctl.planner.rules import Problem, generation_problems, training_problems
from rlctl.planner.stages import stage_layers
from rlctl.planner.workload import Workload

HEADROOM = {"fast": 0.95, "frugal": 0.95, "safe": 0.82}
"""Share of a device's memory that a plan may count on, by goal."""
SIMPLICITY = 0.01
"""A plan has to be this much faster for each further kind of parallelism that it uses."""


class Reject(Protocol):
    """Hears of a layout that is left out, why, and (where memory is why) its need over what there is."""

    def __call__(self, choice: Any, why: str, over: float = math.inf) -> None: ...


@dataclass(frozen=True)
class Request:
    """Everything that a plan depends on. `pins` are configuration keys with the values they must have."""

    facts: ModelFacts
    cluster: ClusterFacts
    workload: Workload
    pins: Mapping[str, Any]
    constants: Constants
    precision: str = "bf16"
    adapters: Adapters | None = None
    generation_bytes: float = 2.0
    gradient_bytes: int = 4

    def pin(self, key: str, default: Any = None) -> Any:
        value = self.pins.get(key)
        return default if value is None else value

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 trains."""
        return self.pin("training.backend") == "dtensor"

    @property
    def budget(self) -> float:
        """Bytes that the phases may use on one device (on a CPU: all processes of a node together)."""
        return HEADROOM[self.workload.goal] * self.cluster.device.memory * (0.9 if self.cluster.is_cpu else 1.0)


@dataclass(frozen=True)
class TrainingCandidate:
    choice: TrainingChoice
    peak: mem.PhaseMemory
    seconds: float
    logprobs: float

    @property
    def score(self) -> float:
        return (self.seconds + self.logprobs) * (1 + SIMPLICITY * complexity(self.choice))


@dataclass(frozen=True)
class GenerationCandidate:
    choice: GenerationChoice
    seconds: float
    weights: float

    @property
    def score(self) -> float:
        kinds = sum(v > 1 for v in (self.choice.tp, self.choice.pp, self.choice.dp, self.choice.ep))
        return self.seconds * (1 + SIMPLICITY * kinds)


def complexity(choice: TrainingChoice) -> int:
    """Kinds of parallelism and memory saving that a layout uses beside data parallelism."""
    sizes = (choice.tp, choice.pp, choice.vpp, choice.cp, choice.ep)
    return sum(size > 1 for size in sizes) + (choice.recompute != "none") + 2 * choice.optimizer_offload


def powers(limit: int) -> list[int]:
    return [1 << i for i in range(max(1, limit).bit_length()) if 1 << i <= limit]


def _pinned(request: Request, key: str, options: list[int]) -> list[int]:
    value = request.pin(key)
    return options if value is None else [value]


def training_layouts(request: Request, devices: int) -> Iterator[TrainingChoice]:
    """Layouts over `devices` ranks, before rules and memory: sizes only. On a CPU any number of ranks up to the
    cores."""
    if request.cluster.is_cpu:
        yield from _cpu_layouts(request)
        return
    facts, cluster = request.facts, request.cluster
    tps = _pinned(request, "training.tp", powers(min(facts.heads, max(cluster.link_domain, cluster.gpus_per_node), 16)))
    stages_to_try = [1] if request.fsdp else powers(min(facts.layers, devices, 64))
    pps = _pinned(request, "training.pp", stages_to_try)
    cps = _pinned(request, "training.cp", powers(max(1, request.workload.max_length // 4096)))
    eps = _pinned(request, "training.ep", powers(facts.moe.experts if facts.moe else 1))
    for tp in tps:
        for pp in pps:
            for cp in cps:
                if devices % (tp * pp * cp):
                    continue
                dp = request.pin("training.dp", devices // (tp * pp * cp))
                for ep in eps:
                    etp = request.pin("training.etp", 1)
                    if (tp * cp * dp) % (ep * etp) or (facts.moe and facts.moe.experts % ep):
                        continue
                    yield TrainingChoice(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, dp=dp, **_common(request, tp))


def _common(request: Request, tp: int) -> dict[str, Any]:
    return {
        "sequence_parallel": request.pin("training.sequence_parallel", tp > 1),
        "first_stage_layers": request.pin("training.first_stage_layers"),
        "last_stage_layers": request.pin("training.last_stage_layers"),
        "adapters": request.adapters,
        "sharding": "full" if request.fsdp else "optimizer",
        "reference": request.workload.reference,
        "precision": request.precision,
        "gradient_bytes": request.gradient_bytes,
    }


def _cpu_layouts(request: Request) -> Iterator[TrainingChoice]:
    cores, nodes = request.cluster.device.cores, request.cluster.nodes
    for tp in _pinned(request, "training.tp", powers(min(cores, request.facts.heads))):
        sizes = {key: request.pin(f"training.{key}", 1) for key in ("pp", "cp", "ep", "etp")}
        model = tp * sizes["pp"] * sizes["cp"]
        # What experts are spread over is data parallelism, whatever the cores are.
        least = -(-sizes["ep"] * sizes["etp"] // (tp * sizes["cp"]))
        options = [least * factor for factor in powers(max(1, cores * nodes // (model * least)))]
        for dp in _pinned(request, "training.dp", options):
            per_node = max(1, model * dp // nodes)
            threads = request.pin("training.threads", max(1, cores // per_node))
            yield TrainingChoice(tp=tp, dp=dp, threads=threads, **sizes, **_common(request, tp))


def row_sizes(request: Request, cp: int) -> list[int]:
    """Micro-batch tokens to try: rows that hold the longest rollout, and longer ones."""
    pinned = request.pin("training.micro_batch_tokens")
    if pinned is not None:
        return [pinned]
    step = 2 * cp * 64
    least = -(-request.workload.max_length // step) * step
    if request.cluster.is_cpu:
        return [max(least, 2048)]
    return [least * factor for factor in (1, 2, 4) if factor == 1 or least * factor <= 65536]


def virtual_stages(request: Request, choice: TrainingChoice) -> list[int]:
    """Virtual pipeline sizes to try: none, and the finest of at most 4 that divides the layers."""
    pinned = request.pin("training.vpp")
    if pinned is not None or choice.pp == 1:
        return [pinned or 1]
    sizes = stage_layers(request.facts.layers, choice.pp, choice.first_stage_layers, choice.last_stage_layers) or [1]
    even = [v for v in (4, 3, 2) if all(size % v == 0 for size in sizes)]
    return [1, *even[:1]]


def memory_savings(request: Request) -> list[dict[str, Any]]:
    """Recompute modes and optimizer offload to try, the cheapest in time first."""
    modes = [request.pin("training.recompute")] if request.pin("training.recompute") else ["none", "selective", "full"]
    offload = request.pin("training.optimizer_offload")
    places = [False, True] if offload is None and not request.cluster.is_cpu else [bool(offload)]
    return [{"recompute": mode, "optimizer_offload": place} for place in places for mode in modes]


def asleep_bytes(request: Request, colocated: bool) -> float:
    """What the sleeping engine keeps on the policy's device."""
    shared = colocated and request.workload.rollouts and not request.cluster.is_cpu
    return request.constants.engine_asleep_bytes if shared else 0.0


def training_candidates(
    request: Request, devices: int, colocated: bool, budget: float, rejected: Reject
) -> list[TrainingCandidate]:
    """All layouts that are valid and fit `budget` bytes a device, the best first; others go to `rejected`."""
    found: list[TrainingCandidate] = []
    for layout in training_layouts(request, devices):
        for rows in row_sizes(request, layout.cp):
            for vpp in virtual_stages(request, layout):
                choice = replace(layout, micro_batch_tokens=rows, vpp=vpp)
                world = choice.world_size if request.cluster.is_cpu else devices
                problems = training_problems(request.facts, choice, request.workload, request.cluster, world)
                if problems:
                    rejected(choice, problems[0].message)
                    continue
                candidate = _least_saving(request, choice, colocated, budget, rejected)
                if candidate is not None:
                    found.append(candidate)
    return sorted(found, key=lambda c: c.score)


def _least_saving(
    request: Request,
    choice: TrainingChoice,
    colocated: bool,
    budget: float,
    rejected: Reject,
) -> TrainingCandidate | None:
    """`choice` with the least recomputation and offload that fits; None: does not fit in any way."""
    number, _ = timing.micro_batches(choice, request.workload, request.constants)
    asleep = asleep_bytes(request, colocated)
    limit = budget
    if request.cluster.is_cpu:
        limit = budget / max(1, choice.world_size // request.cluster.nodes)
    for saving in memory_savings(request):
        saved = replace(choice, **saving)
        peak = mem.training_memory(
            request.facts, saved, request.workload, request.cluster, asleep, number, request.constants
        )
        if peak.total <= limit:
            seconds = timing.training_time(
                request.facts, saved, request.workload, request.cluster, colocated, request.constants
            )
            logprobs = timing.logprobs_time(request.facts, saved, request.workload, request.cluster, request.constants)
            return TrainingCandidate(saved, peak, seconds.total, logprobs)
    part = max(peak.parts, key=lambda name: peak.parts[name])
    limit = max(0.0, limit)  # on a CPU an engine alone may take more than there is
    why = f"{peak.total / GIB:.0f} GiB of {limit / GIB:.0f} in training, {peak.parts[part] / GIB:.0f} of it {part}"
    rejected(saved, why, peak.total / max(limit, 1.0))
    return None


def generation_layouts(request: Request, devices: int) -> Iterator[GenerationChoice]:
    """Engines over `devices` devices, before rules and memory."""
    facts, cluster, workload = request.facts, request.cluster, request.workload
    base = {
        "weight_bytes": request.generation_bytes,
        "max_batched_tokens": request.pin("generation.max_batched_tokens", 8192),
    }
    if cluster.is_cpu:
        yield from _cpu_engines(request, base)
        return
    experts = facts.moe.experts if facts.moe else 1
    for tp in _pinned(request, "generation.tp", powers(min(facts.heads, devices, 64))):
        for pp in _pinned(request, "generation.pp", [1] if tp < cluster.gpus_per_node else [1, 2, 4]):
            options = [(1, 1)] + ([(1, tp)] if experts > 1 and tp > 1 else [])
            if experts > 1:
                options += [
                    (dp, tp * dp) for dp in powers(64)[1:] if experts % (tp * dp) == 0 and tp * pp * dp <= devices
                ]
            for dp, ep in options:
                if dp != request.pin("generation.dp", dp) or ep != request.pin("generation.ep", ep):
                    continue
                engines = request.pin("generation.engines", min(devices // (tp * pp * dp), workload.prompts))
                if engines:
                    share = workload.share(engines, dp)
                    concurrent = request.pin("generation.max_concurrent", max(8, min(1024, share)))
                    yield GenerationChoice(engines, tp, pp, dp, ep, max_concurrent=concurrent, **base)


def _cpu_engines(request: Request, base: dict[str, Any]) -> Iterator[GenerationChoice]:
    workload, cores = request.workload, request.cluster.device.cores * request.cluster.nodes
    sizes = {key: request.pin(f"generation.{key}", 1) for key in ("pp", "dp", "ep")}
    for tp in _pinned(request, "generation.tp", [1]):
        engines = request.pin("generation.engines", min(request.cluster.nodes, workload.prompts))
        threads = request.pin("generation.threads", max(1, cores // (engines * tp)))
        concurrent = request.pin("generation.max_concurrent", min(256, workload.share(engines)))
        yield GenerationChoice(
            engines, tp, memory_fraction=None, max_concurrent=concurrent, threads=threads, **sizes, **base
        )


def memory_fraction(request: Request, layout: GenerationChoice, colocated: bool, asleep: float) -> float:
    """Share of a device for vLLM: enough for all its rollouts at full length, at most what the sleeping policy
    leaves."""
    pinned = request.pin("generation.memory_fraction")
    if pinned is not None:
        return pinned
    memory = request.cluster.device.memory
    ceiling = 0.92 if request.workload.goal != "safe" else 0.85
    if colocated:
        ceiling = min(ceiling, 1 - asleep / memory - 0.04)
    cache = layout.max_concurrent * request.workload.max_length * kv_bytes_per_token_on_device(request.facts, layout)
    fixed = weight_bytes(request.facts, layout) + sum(overhead_bytes(request.facts, layout, request.constants).values())
    wanted = (fixed + cache) / memory + 0.02
    return max(0.2, int(min(ceiling, wanted) * 100) / 100)


def generation_candidates(
    request: Request,
    devices: int,
    colocated: bool,
    asleep: float,
    budget: float,
    rejected: Reject,
) -> list[GenerationCandidate]:
    """All engine layouts that are valid and fit, the best first. `asleep`: what the offloaded policy keeps."""
    found = []
    for layout in generation_layouts(request, devices):
        problems = generation_problems(
            request.facts, layout, request.workload, max(devices, layout.gpus if request.cluster.is_cpu else 0)
        )
        if problems:
            rejected(layout, problems[0].message)
            continue
        sized = _with_cache(request, layout, colocated, asleep, budget)
        if isinstance(sized, Problem):
            rejected(layout, sized.message, sized.over)
            continue
        seconds = generation_time(request.facts, sized, request.workload, request.cluster, request.constants).total
        found.append(GenerationCandidate(sized, seconds, weight_bytes(request.facts, sized)))
    return sorted(found, key=lambda c: c.score)


def _with_cache(
    request: Request, layout: GenerationChoice, colocated: bool, asleep: float, budget: float
) -> GenerationChoice | Problem:
    """The layout with its memory fraction and KV cache, or why it does not fit."""
    facts, workload = request.facts, request.workload
    if request.cluster.is_cpu:
        return _cpu_cache(request, layout, budget)
    pinned = request.pin("generation.kv_cache_bytes")
    if pinned is not None:
        return _pinned_cache(request, layout, pinned, asleep if colocated else 0.0)
    fraction = memory_fraction(request, layout, colocated, asleep)
    layout = replace(layout, memory_fraction=fraction)
    free, tokens = plan_kv(facts, layout, workload, request.cluster, request.constants)
    if tokens < workload.max_length:
        need = weight_bytes(facts, layout) + sum(overhead_bytes(facts, layout, request.constants).values())
        need += workload.max_length * kv_bytes_per_token_on_device(facts, layout)
        have = fraction * request.cluster.device.memory
        return Problem(
            "generation.tp",
            f"one sequence of {workload.max_length} tokens needs {need / GIB:.0f} GiB, vLLM may use {have / GIB:.0f}",
            need / have,
        )
    if colocated and fraction * request.cluster.device.memory + asleep > request.cluster.device.memory:
        return Problem(
            "generation.memory_fraction",
            f"{fraction} leaves less than the {asleep / GIB:.1f} GiB of the sleeping policy",
        )
    return replace(layout, kv_cache_bytes=free, kv_cache_tokens=tokens)


def _pinned_cache(
    request: Request, layout: GenerationChoice, pinned: float, asleep: float
) -> GenerationChoice | Problem:
    """A KV cache of given size on each GPU; the memory fraction follows from it."""
    have = request.cluster.device.memory
    need = pinned + weight_bytes(request.facts, layout)
    need += sum(overhead_bytes(request.facts, layout, request.constants).values())
    if need + asleep > have:
        return Problem(
            "generation.kv_cache_bytes",
            f"{pinned / GIB:.0f} GiB of KV cache make an engine of {need / GIB:.0f} GiB a GPU, beside "
            f"{asleep / GIB:.0f} of the sleeping policy; there are {have / GIB:.0f}",
            (need + asleep) / have,
        )
    tokens = int(pinned / kv_bytes_per_token_on_device(request.facts, layout))
    if tokens < request.workload.max_length:
        return Problem(
            "generation.kv_cache_bytes",
            f"{pinned} bytes hold {tokens} tokens, one sequence has {request.workload.max_length}: it takes "
            f"{int(request.workload.max_length * kv_bytes_per_token_on_device(request.facts, layout))} bytes",
        )
    fraction = min(0.99, math.ceil(100 * need / have) / 100)
    return replace(layout, memory_fraction=fraction, kv_cache_bytes=pinned, kv_cache_tokens=tokens)


def _cpu_cache(request: Request, layout: GenerationChoice, budget: float) -> GenerationChoice | Problem:
    """A KV cache for all sequences that run at once at full length, within the memory that training leaves."""
    per_token = kv_bytes_per_token_on_device(request.facts, layout) * layout.tp
    wanted = layout.max_concurrent * request.workload.max_length * per_token * 1.1
    least = request.workload.max_length * per_token * 1.1
    engines = max(1, layout.engines // request.cluster.nodes)
    fixed = layout.tp * (CPU_ENGINE_BYTES + request.constants.cpu_process_bytes) + layout.tp * weight_bytes(
        request.facts, layout
    )
    free = budget / engines - fixed
    size = request.pin("generation.kv_cache_bytes", min(max(wanted, 256 * 1024**2), free))
    if size < least or size > free:
        return Problem(
            "generation.kv_cache_bytes",
            f"engines need {fixed / GIB:.1f} GiB and {least / GIB:.2f} for one sequence; "
            f"{max(0.0, budget) / GIB:.1f} are left",
        )
    size = int(size) // 2**20 * 2**20 if size > 2**20 else int(size)
    return replace(layout, kv_cache_bytes=size, kv_cache_tokens=int(size / per_token))
