"""A plan: layouts, memory by phase, predicted seconds, and for every value the rule that chose it.

`make_plan` is a pure function of model facts, cluster facts, workload and pins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlctl.errors import ConfigError, NoPlanError
from rlctl.models.facts import ModelFacts
from rlctl.planner import memory as mem
from rlctl.planner import search
from rlctl.planner import time as timing
from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.cluster import GIB, ClusterFacts
from rlctl.planner.constants import DEFAULTS, Constants
from rlctl.planner.generation import generation_memory, generation_time
from rlctl.planner.rules import family_problem, not_runnable
from rlctl.planner.search import Request
from rlctl.planner.workload import Workload
from rlctl.telemetry.phases import Phase


@dataclass(frozen=True)
class Reason:
    """A chosen value and the rule that chose it."""

    value: str
    rule: str


@dataclass(frozen=True)
class Rejected:
    """A plan that was not chosen and why."""

    plan: str
    why: str


@dataclass(frozen=True)
class Plan:
    """How a step runs on a cluster. Bytes and seconds."""

    facts: ModelFacts
    cluster: ClusterFacts
    workload: Workload
    backend: str
    training: TrainingChoice
    generation: GenerationChoice | None
    colocated: bool
    micro_batches: int
    """Of one optimizer step on one data-parallel rank."""
    memory: dict[str, mem.PhaseMemory]
    """By phase, of one device; on a CPU of one process."""
    host_memory: float
    """Of one node."""
    seconds: dict[Phase, float]
    mfu: float
    mover: str
    reasons: tuple[Reason, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    alternatives: tuple[Plan, ...] = field(default=(), repr=False)
    pins: Mapping[str, Any] = field(default_factory=dict)
    blocked: tuple[str, ...] = ()
    """What else keeps it from running: keys of an imported recipe."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Prompt and completion tokens of a step, by its seconds and devices (nodes, on a CPU)."""
        devices = self.cluster.gpus or self.cluster.nodes
        return self.workload.tokens(DEFAULTS.length_sigma) / self.total_s / devices

    @property
    def not_runnable_because(self) -> list[str]:
        """What of the plan rlctl cannot run yet, each naming its key."""
        family = family_problem(self.facts.family)
        layout = not_runnable(self.training, self.generation, self.colocated, self.backend)
        return [*([family] if family else []), *self.blocked, *layout]

    @property
    def runnable(self) -> bool:
        return not self.not_runnable_because

    def name(self) -> str:
        parts = [f"training {self.training.name()}"]
        if self.generation is not None:
            parts.append(f"generation {self.generation.name()}")
        return "; ".join(parts) + ("" if self.colocated else "; split")

    def config_values(self) -> dict[str, Any]:
        """The configuration keys that the plan decides, with their values: what `train` fills in."""
        training, generation = self.training, self.generation
        values: dict[str, Any] = {
            f"training.{key}": getattr(training, key)
            for key in (
                "tp",
                "pp",
                "vpp",
                "cp",
                "ep",
                "etp",
                "dp",
                "sequence_parallel",
                "micro_batch_tokens",
                "recompute",
            )
        }
        values |= {"training.backend": self.backend, "training.optimizer_offload": training.optimizer_offload}
        if training.threads:
            values["training.threads"] = training.threads
        if generation is None:
            return values
        values |= {f"generation.{key}": getattr(generation, key) for key in ("engines", "tp", "pp", "dp", "ep")}
        values |= {"generation.colocated": self.colocated, "generation.max_concurrent": generation.max_concurrent}
        if self.cluster.is_cpu:
            values["generation.kv_cache_bytes"] = int(generation.kv_cache_bytes)
            values["generation.threads"] = generation.threads
        else:
            values["generation.memory_fraction"] = generation.memory_fraction
            values["generation.max_batched_tokens"] = generation.max_batched_tokens
        return values


def make_plan(
    facts: ModelFacts,
    cluster: ClusterFacts,
    workload: Workload,
    pins: Mapping[str, Any] | None = None,
    *,
    constants: Constants = DEFAULTS,
    precision: str | None = None,
    gradient_bytes: int = 4,
    top: int = 5,
    prefer_runnable: bool = True,
) -> Plan:
    """The best plan for a model on a cluster.

    `pins` are configuration keys (`training.tp`, `generation.engines`, `generation.colocated`, ...) whose values are
    given. `precision` is that of training: `bf16`, `float32` (default on a CPU), `fp8`, `fp4`. A plan that `train` can
    run comes before a faster one that it cannot, unless `prefer_runnable` is off.

    Raises ConfigError for a pin that a rule forbids, naming the nearest value that works, and NoPlanError where nothing
    fits, naming the smallest machine that would do and the cheapest change that would make this one do.
    """
    pins = {key: value for key, value in (pins or {}).items() if value is not None}
    precision = precision or ("float32" if cluster.is_cpu else "bf16")
    element = 4.0 if precision == "float32" else 2.0
    request = Request(facts, cluster, workload, pins, constants, precision, element, gradient_bytes)
    plans, rejected = _plans(request)
    if not plans:
        from rlctl.planner.advice import no_plan

        raise no_plan(request, rejected)
    if prefer_runnable:
        plans.sort(key=lambda plan: not plan.runnable)
    best = plans[0]
    plans = list({plan.name(): plan for plan in [*sorted(plans[1:], key=_score, reverse=True), best]}.values())[::-1]
    others = [Rejected(p.name(), _slower(p, best)) for p in plans[1 : top + 1]]
    from rlctl.planner.reasons import reasons_for

    return replace(
        best,
        reasons=tuple(reasons_for(best, request, rejected)),
        rejected=(*others, *rejected[:top]),
        alternatives=tuple(plans[1 : top + 1]),
    )


def _slower(plan: Plan, best: Plan) -> str:
    ratio = plan.total_s / best.total_s - 1
    if best.runnable and not plan.runnable and ratio < 0.005:
        gain = f"{-100 * ratio:.0f}% faster" if ratio < -0.005 else "as fast"
        return f"{gain}, but `train` cannot run it yet: {plan.not_runnable_because[0]}"
    if ratio < -0.005:
        return f"{-100 * ratio:.0f}% faster, but less simple"
    if ratio < 0.005:
        return "as fast, but less simple"
    return f"{100 * ratio:.0f}% slower ({plan.total_s:.1f} s a step)"


def _plans(request: Request) -> tuple[list[Plan], list[Rejected]]:
    """All plans that fit, the best first (as many as are worth showing), and why others did not."""
    modes = (
        [True, False] if request.pin("generation.colocated") is None else [bool(request.pin("generation.colocated"))]
    )
    log = _RejectionLog()
    plans: list[Plan] = []
    for colocated in modes if request.workload.rollouts else [True]:
        if colocated:
            plans += _colocated(request, log)
        elif not plans and not request.cluster.is_cpu:
            plans += _split(request, log)
    if request.workload.goal == "frugal":
        plans.sort(key=lambda p: p.total_s * max(1, p.cluster.gpus))
    return plans, log.listed()


class _RejectionLog:
    """Collects why layouts were rejected; one line for each distinct layout."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}

    def add(self, prefix: str) -> Callable[[Any, str], None]:
        def note(choice: Any, why: str) -> None:
            self.lines.setdefault(f"{prefix} {choice.name()}", why)

        return note

    def listed(self) -> list[Rejected]:
        # What missed by memory tells more than what no rule allows.
        lines = sorted(self.lines.items(), key=lambda item: ("GiB" not in item[1], len(item[0])))
        return [Rejected(plan, why) for plan, why in lines]


KEEP = 6
"""Candidates of training and of generation that are combined."""


def _colocated(request: Request, log: _RejectionLog) -> list[Plan]:
    cluster = request.cluster
    devices = cluster.gpus or 1
    budget = request.budget
    if cluster.is_cpu and request.workload.rollouts:
        budget = cluster.nodes and budget - _least_cpu_engine(request)
    trainings = search.training_candidates(request, devices, True, budget, log.add("training"))
    if not request.workload.rollouts:
        return [_assemble(request, t, None, True) for t in trainings[:KEEP]]
    plans = []
    for training in _worth_combining(trainings, lambda t: not not_runnable(t.choice, None, True, "megatron")):
        asleep = _policy_asleep(request, training.choice)
        left = request.budget
        if cluster.is_cpu:
            left -= training.peak.total * max(1, training.choice.world_size // cluster.nodes)
        engines = search.generation_candidates(request, devices, True, asleep, left, log.add("generation"))
        for engine in _worth_combining(engines, lambda e: e.choice.pp == e.choice.dp == e.choice.ep == 1):
            if _refit_fits(request, training.choice, engine, log) and _host_fits(request, training, engine, log):
                plans.append(_assemble(request, training, engine.choice, True))
    return sorted(plans, key=_score)


def _worth_combining(candidates: list[Any], runnable: Callable[[Any], bool]) -> list[Any]:
    """The best candidates, and the best of those that can be run."""
    best, able = candidates[:KEEP], [c for c in candidates if runnable(c)][:KEEP]
    return best + [c for c in able if c not in best]


def _split(request: Request, log: _RejectionLog) -> list[Plan]:
    """Policy and engines on different devices, working one after the other."""
    plans = []
    total = request.cluster.gpus
    for share in (0.25, 0.5, 0.75):
        policy = int(total * share)
        if request.cluster.nodes > 1:
            policy = max(1, round(request.cluster.nodes * share)) * request.cluster.gpus_per_node
        if not 0 < policy < total:
            continue
        trainings = search.training_candidates(request, policy, False, request.budget, log.add("training"))
        engines = search.generation_candidates(
            request, total - policy, False, 0.0, request.budget, log.add("generation")
        )
        plans += [_assemble(request, t, e.choice, False) for t in trainings[:2] for e in engines[:2]]
    return sorted(plans, key=_score)


def _score(plan: Plan) -> float:
    kinds = search.complexity(plan.training)
    if plan.generation is not None:
        kinds += sum(v > 1 for v in (plan.generation.tp, plan.generation.pp, plan.generation.dp))
    return plan.total_s * (1 + search.SIMPLICITY * kinds)


def _least_cpu_engine(request: Request) -> float:
    """Bytes of a node that the smallest engine needs on a CPU."""
    layouts = list(search.generation_layouts(request, 1))
    sizes = [
        generation_memory(request.facts, layout, request.cluster, 0.0, request.constants).total for layout in layouts
    ]
    return min(sizes, default=0.0) + 256 * 1024**2


def _policy_asleep(request: Request, choice: TrainingChoice) -> float:
    """What the offloaded policy's process keeps on the device: context, communicators, allocator."""
    if request.cluster.is_cpu:
        return 0.0
    return mem.runtime_bytes(request.cluster, choice, request.constants) + 0.5 * GIB


def _refit_fits(
    request: Request, choice: TrainingChoice, engine: search.GenerationCandidate, log: _RejectionLog
) -> bool:
    if request.cluster.is_cpu:
        return True
    memory = mem.refit_memory(request.facts, choice, request.cluster, engine.weights, request.constants)
    if memory.total <= request.budget:
        return True
    why = f"{memory.total / GIB:.0f} GiB of {request.budget / GIB:.0f} in refit: policy and engine weights at once"
    log.add("training")(choice, f"with {engine.choice.name()}: {why}")
    return False


def _host_fits(
    request: Request, training: search.TrainingCandidate, engine: search.GenerationCandidate, log: _RejectionLog
) -> bool:
    """What is offloaded between the phases fits the host memory of a node."""
    if request.cluster.is_cpu:
        return True
    need = mem.host_memory(request.facts, training.choice, request.cluster, True, engine.weights)
    have = request.cluster.device.host_memory
    if need <= have:
        return True
    log.add("training")(
        training.choice, (f"{need / GIB:.0f} GiB of {have / GIB:.0f} host memory a node for offloaded state")
    )
    return False


def _assemble(
    request: Request, training: search.TrainingCandidate, generation: GenerationChoice | None, colocated: bool
) -> Plan:
    facts, cluster, workload, constants = request.facts, request.cluster, request.workload, request.constants
    choice = training.choice
    number, _ = timing.micro_batches(choice, workload, constants)
    return Plan(
        facts=facts, cluster=cluster, workload=workload, backend=_backend(request), training=choice,
        generation=generation, colocated=colocated, micro_batches=number,
        memory=_memory(request, training, generation, colocated),
        host_memory=_host_memory(request, training, generation, colocated),
        seconds=_seconds(request, training, generation, colocated),
        mfu=_mfu(request, training), mover=_mover(request, colocated), pins=request.pins,
    )  # fmt: skip


def _backend(request: Request) -> str:
    backend = request.pin("training.backend", "auto")
    return "megatron" if backend == "auto" else backend


def _mover(request: Request, colocated: bool) -> str:
    if request.cluster.is_cpu:
        return "shared-memory"
    return "cuda-ipc" if colocated else "nccl"


def _memory(
    request: Request, training: search.TrainingCandidate, generation: GenerationChoice | None, colocated: bool
) -> dict[str, mem.PhaseMemory]:
    facts, cluster, constants = request.facts, request.cluster, request.constants
    asleep = search.asleep_bytes(request, colocated)
    phases = {"training": training.peak}
    if generation is None:
        return phases
    phases["logprobs"] = mem.logprobs_memory(facts, training.choice, cluster, asleep, constants)
    weights = search.weight_bytes(facts, generation)
    phases["refit"] = mem.refit_memory(facts, training.choice, cluster, weights, constants)
    policy = _policy_asleep(request, training.choice) if colocated else 0.0
    phases["generation"] = generation_memory(facts, generation, cluster, policy, constants)
    return phases


def _host_memory(
    request: Request, training: search.TrainingCandidate, generation: GenerationChoice | None, colocated: bool
) -> float:
    if not request.cluster.is_cpu:
        weights = search.weight_bytes(request.facts, generation) if generation else 0.0
        return mem.host_memory(
            request.facts, training.choice, request.cluster, colocated and generation is not None, weights
        )
    ranks = max(1, training.choice.world_size // request.cluster.nodes)
    engine = 0.0
    if generation is not None:
        per_node = max(1, generation.engines // request.cluster.nodes) * generation.tp
        engine = per_node * generation_memory(request.facts, generation, request.cluster, 0.0, request.constants).total
    return ranks * training.peak.total + engine


def _seconds(
    request: Request, training: search.TrainingCandidate, generation: GenerationChoice | None, colocated: bool
) -> dict[Phase, float]:
    constants, cluster = request.constants, request.cluster
    seconds = dict.fromkeys(Phase, 0.0) | {Phase.TRAINING: training.seconds, Phase.LOGPROBS: training.logprobs}
    seconds[Phase.OTHER] = 0.1 if cluster.is_cpu else constants.other_s
    if generation is not None:
        seconds[Phase.GENERATION] = generation_time(
            request.facts, generation, request.workload, cluster, constants
        ).total
        seconds[Phase.REWARD] = 0.05 if cluster.is_cpu else constants.reward_s
        seconds[Phase.REFIT] = timing.refit_time(
            request.facts, training.choice, cluster, colocated, generation.weight_bytes, generation.tp, constants
        )
    return seconds


def _mfu(request: Request, training: search.TrainingCandidate) -> float:
    """Of the training phase, against the peak of the training precision."""
    flops = timing.model_flops(request.facts, request.workload, request.constants)
    devices = training.choice.world_size if not request.cluster.is_cpu else request.cluster.nodes
    return flops / training.seconds / devices / request.cluster.device.flops(request.precision)


def refuse_unrunnable(plan: Plan) -> None:
    """Raises ConfigError naming each key of a plan that `train` cannot run yet."""
    why = plan.not_runnable_because
    if why:
        raise ConfigError(
            f"The plan cannot be run yet: {'; '.join(why)}.",
            "Pin those keys with --set, or use `rlctl plan` to look at it.",
        )


__all__ = ["NoPlanError", "Plan", "Reason", "Rejected", "make_plan", "refuse_unrunnable"]
