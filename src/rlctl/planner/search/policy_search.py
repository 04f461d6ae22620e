"""The search for the policy's layout: rank all valid layouts that fit. `engine_search.py` does this for engines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any, Protocol

from rlctl.config.parallel import ParallelSpec
from rlctl.models.constraints import Problem
from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import TrainingChoice
from rlctl.planner.costs import memory as mem
from rlctl.planner.costs import time as timing
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.inputs.request import Request
from rlctl.planner.search.layout_rules import training_problems

SIMPLICITY = 0.01
"""A plan has to be this much faster for each further kind of parallelism that it uses."""


class Reject(Protocol):
    """Hears of a layout that is left out, why, and (where memory is why) its need over what there is."""

    def __call__(self, choice: Any, reason: str, over: float = math.inf) -> None: ...


@dataclass(frozen=True)
class TeacherPlan:
    """The layout of a teacher or reward model, with bytes per device (on a CPU, per process) and seconds."""

    facts: ModelFacts
    choice: TrainingChoice
    memory: mem.PhaseMemory
    """Memory of the model itself while it computes."""
    asleep: float
    """Memory that its process keeps on the device while others compute."""
    seconds: float
    """Its log-probs or scores of a step, with the way from host memory and back."""
    role: str = "teacher"
    """The section of its layout."""
    others: tuple[ModelFacts, ...] = ()
    """Further architectures of teachers in the same processes, which take turns."""
    other_weights: float = 0.0
    """Bytes of their weights."""
    together: bool = True
    """All stay on the device while one of them computes."""

    @property
    def label(self) -> str:
        return self.role.replace("_", " ")

    @property
    def waits(self) -> dict[str, float]:
        """Bytes that stay on the device while others compute."""
        return {f"{self.label} asleep": self.asleep} if self.asleep else {}

    @property
    def weights(self) -> float:
        return self.memory.parts[f"{self.label} weights"]

    def resident(self) -> TeacherPlan:
        """Return the plan with all its models on the device."""
        weights = {f"{self.label} weights": self.weights + self.other_weights}
        return replace(self, memory=mem.PhaseMemory(self.memory.parts | weights), other_weights=0.0, together=True)

    @property
    def score(self) -> float:
        return self.seconds * (1 + SIMPLICITY * complexity(self.choice))


@dataclass(frozen=True)
class TrainingCandidate:
    choice: TrainingChoice
    peak: mem.PhaseMemory
    seconds: float
    logprobs: float
    critic: float = 0.0
    teacher: TeacherPlan | None = None

    @property
    def score(self) -> float:
        return (self.seconds + self.logprobs + self.critic) * (1 + SIMPLICITY * complexity(self.choice))

    def with_teacher(self, teacher: TeacherPlan) -> TrainingCandidate:
        """Return this layout with a teacher or a reward model next to it."""
        peak = mem.PhaseMemory(self.peak.parts | teacher.waits)
        logprobs = self.logprobs + (0.0 if teacher.choice.valued else teacher.seconds)
        return replace(self, peak=peak, logprobs=logprobs, teacher=teacher)


def complexity(choice: TrainingChoice) -> int:
    """Kinds of parallelism and memory saving that a layout uses in addition to data parallelism."""
    parallel = choice.parallel
    sizes = (parallel.tp, parallel.pp, parallel.vpp, parallel.cp, parallel.ep)
    waiting = choice.reference_offload + 2 * choice.optimizer_offload
    return sum(size > 1 for size in sizes) + (choice.recompute != "none") + waiting


def powers(limit: int) -> list[int]:
    return [1 << i for i in range(max(1, limit).bit_length()) if 1 << i <= limit]


def _stage_counts(devices: int, most: int) -> list[int]:
    """Return pipeline sizes to try: powers of two, and their products with the least odd part of the number of
    devices."""
    odd = next((factor for factor in (3, 5, 7) if devices % factor == 0), 1)
    return sorted({*powers(most), *(odd * size for size in powers(most // odd))})


def training_choices(request: Request, devices: int) -> Iterator[TrainingChoice]:
    """Sizes over `devices` ranks (on a CPU any number of ranks on these cores), before rules and memory."""
    if request.cluster.is_cpu:
        yield from _cpu_trainings(request, devices)
        return
    facts, cluster = request.facts, request.cluster
    tps = request.values("training.tp", powers(min(facts.heads, cluster.near_devices, 16)))
    pps = request.values("training.pp", [1] if request.fsdp else _stage_counts(devices, min(facts.layers, devices, 64)))
    cps = request.values("training.cp", powers(max(1, request.workload.max_length // 4096)))
    eps = request.values("training.ep", powers(facts.moe.experts if facts.moe else 1))
    for tp, pp, cp, ep in product(tps, pps, cps, eps):
        dp, etp = request.pin("training.dp", devices // (tp * pp * cp)), _expert_tp(request, tp)
        whole = devices % (tp * pp * cp) == 0 and (tp * cp * dp) % (ep * etp) == 0
        if whole and not (facts.moe and facts.moe.experts % ep):
            yield _training(request, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, dp=dp)


def _expert_tp(request: Request, tp: int) -> int:
    """Tensor parallel size of experts: FSDP2 has them divided like everything else."""
    return request.pin("training.etp", tp if request.fsdp and request.facts.moe else 1)


def _training(request: Request, **sizes: int) -> TrainingChoice:
    parallel = ParallelSpec(
        **sizes,
        sequence_parallel=request.pin("training.sequence_parallel"),
        first_stage_layers=request.pin("training.first_stage_layers"),
        last_stage_layers=request.pin("training.last_stage_layers"),
        replicate=request.pin("training.replicate", 1),
    )
    return TrainingChoice(
        parallel,
        adapters=request.adapters,
        sharding="full" if request.fsdp else "optimizer",
        reference=request.workload.reference,
        own_teacher=request.workload.own_teacher,
        teacher_average=request.workload.teacher_average,
        valued=request.workload.valued,
        critic=request.workload.critic,
        precision=request.precision,
        float8_copies=2,  # what TransformerEngine holds for the two products of a backward pass
        gradient_bytes=request.gradient_bytes,
        moment_bytes=request.moment_bytes,
        muon_steps=request.muon_steps,
        grouped_experts=request.fsdp or request.grouped_experts,
        dispatcher=request.dispatcher,
    )


def _cpu_trainings(request: Request, devices: int) -> Iterator[TrainingChoice]:
    nodes = request.cluster.nodes
    cores = max(1, devices // nodes)
    for tp in request.values("training.tp", powers(min(cores, request.facts.heads))):
        sizes = {key: request.pin(f"training.{key}", 1) for key in ("pp", "cp", "ep")} | {
            "etp": _expert_tp(request, tp)
        }
        model = tp * sizes["pp"] * sizes["cp"]
        # Experts are spread over data-parallel ranks, with any number of cores.
        least = -(-sizes["ep"] * sizes["etp"] // (tp * sizes["cp"]))
        options = [least * factor for factor in powers(max(1, cores * nodes // (model * least)))]
        for dp in request.values("training.dp", options):
            per_node = max(1, model * dp // nodes)
            threads = request.pin("training.threads", max(1, cores // per_node))
            yield replace(_training(request, tp=tp, dp=dp, **sizes), threads=threads)


FULL_ROW_TOKENS = 8192
"""Rows of this length fill a GPU: products of 2,048 tokens reach an eighth of an H100's rate."""


def row_sizes(request: Request, cp: int) -> list[int]:
    """Micro-batch tokens to try: rows of the longest rollout, and longer rows."""
    pinned = request.pin("training.micro_batch_tokens")
    if pinned is not None:
        return [pinned]
    step = 2 * cp * 64
    least = -(-request.workload.max_length // step) * step
    if request.cluster.is_cpu:
        return [max(least, 2048)]
    factors = [1, 2, 4]
    while least * factors[-1] < FULL_ROW_TOKENS:  # short texts, too, fill the device where memory allows
        factors.append(2 * factors[-1])
    return [least * factor for factor in factors if factor == 1 or least * factor <= 65536]


def virtual_stages(request: Request, choice: TrainingChoice) -> list[int]:
    """Virtual pipeline sizes to try: none, and the finest of at most 4 that divides the layers."""
    pinned = request.pin("training.vpp")
    if pinned is not None or choice.parallel.pp == 1:
        return [pinned or 1]
    sizes = choice.parallel.stage_layers(request.facts.layers) or [1]
    even = [v for v in (4, 3, 2) if all(size % v == 0 for size in sizes)]
    return [1, *even[:1]]


def memory_savings(request: Request) -> list[dict[str, Any]]:
    """Return recompute and offload modes to try: the reference (two moves per step) before the optimizer."""
    modes = [request.pin("training.recompute")] if request.pin("training.recompute") else ["none", "selective", "full"]
    copied = request.workload.reference and request.adapters is None and not request.cluster.is_cpu
    offload = request.pin("training.optimizer_offload")
    places = [False, True] if offload is None and not request.cluster.is_cpu else [bool(offload)]
    return [
        {"recompute": mode, "optimizer_offload": place, "reference_offload": waits}
        for place, waits, mode in product(places, (False, True)[: 1 + copied], modes)
    ]


def asleep_bytes(request: Request, colocated: bool) -> float:
    """Return the bytes that the sleeping engine keeps on the policy's device."""
    shared = colocated and request.workload.engines and not request.cluster.is_cpu
    return mem.engine_asleep_bytes(request) if shared else 0.0


def snapshot_parts(request: Request, choice: TrainingChoice) -> dict[str, float]:
    """Return the bytes of a save in a training process, if they use the device's memory: on a CPU."""
    if not (request.cluster.is_cpu and request.saves):
        return {}
    return {"snapshot": (1 + choice.critic) * mem.snapshot_bytes(request.facts, choice, 1)}


def held_bytes(request: Request, training: TrainingCandidate) -> float:
    """Return the most bytes of one policy process: of training, and on a CPU of a save meanwhile."""
    return training.peak.total + sum(snapshot_parts(request, training.choice).values())


def ruled_trainings(request: Request, devices: int) -> Iterator[tuple[TrainingChoice, list[Problem]]]:
    """Yield layouts with their micro-batches and virtual stages, and the rules that they break."""
    for sizes in training_choices(request, devices):
        for tokens, vpp in product(row_sizes(request, sizes.parallel.cp), virtual_stages(request, sizes)):
            choice = replace(sizes, micro_batch_tokens=tokens, parallel=replace(sizes.parallel, vpp=vpp))
            yield choice, training_problems(request, choice, None if request.cluster.is_cpu else devices)


def training_candidates(
    request: Request, devices: int, colocated: bool, budget: float, rejected: Reject
) -> list[TrainingCandidate]:
    """Return all valid layouts within `budget` bytes per device, best first; others go to `rejected`. Offloaded states
    come last, because their speed was never measured."""
    candidates: list[TrainingCandidate] = []
    for choice, problems in ruled_trainings(request, devices):
        if problems:
            rejected(choice, problems[0].message)
        elif candidate := _least_saving(request, choice, colocated, budget, rejected):
            candidates.append(candidate)
    resident = [c for c in candidates if not c.choice.optimizer_offload]
    return sorted(resident or candidates, key=lambda c: c.score)


def _least_saving(
    request: Request, choice: TrainingChoice, colocated: bool, budget: float, rejected: Reject
) -> TrainingCandidate | None:
    """Return `choice` with the least recomputation and offload that fits (alternating policy and critic first); None:
    it never fits."""
    number, _ = timing.micro_batches(request, choice)
    asleep, cluster = asleep_bytes(request, colocated), request.cluster
    turns = choice.critic and colocated and request.workload.rollouts and not cluster.is_cpu
    limit = budget / (max(1, choice.parallel.world_size // cluster.nodes) if cluster.is_cpu else 1)
    limit -= sum(snapshot_parts(request, choice).values())
    saved, peak = choice, mem.PhaseMemory({})
    for _, savings in groupby(memory_savings(request), key=lambda saving: saving["optimizer_offload"]):
        some = [saving | {"critic_offload": wait} for saving, wait in product(savings, (False, True)[: 1 + turns])]
        saved = replace(choice, **some[-1])  # the largest saving: if that does not fit, no choice does
        if (peak := mem.training_memory(request, saved, asleep, number)).total > limit:
            continue
        saved, peak = next(
            (sizes, memory)
            for sizes in (replace(choice, **saving) for saving in some)
            if (memory := mem.training_memory(request, sizes, asleep, number)).total <= limit
        )
        seconds = timing.training_time(request, saved, colocated).total
        critic = timing.critic_time(request, saved, colocated)
        return TrainingCandidate(saved, peak, seconds, timing.logprobs_time(request, saved), critic)
    part = max(peak.parts, key=lambda name: peak.parts[name])
    limit = max(0.0, limit)  # on a CPU an engine alone may take more than there is
    needs = f"{peak.total / GIB:.0f} GiB of {limit / GIB:.0f}, {peak.parts[part] / GIB:.0f} of them for {part}"
    rejected(saved, f"training needs {needs}", peak.total / max(limit, 1.0))
    return None
