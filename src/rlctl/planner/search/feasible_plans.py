"""Plans that fit: layouts of training and of generation combined, and why others do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.costs import memory as mem
from rlctl.planner.costs import time as timing
from rlctl.planner.costs.generation import generation_memory, generation_time, weight_bytes
from rlctl.planner.costs.time import refit_time
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.result import Plan, Rejected
from rlctl.planner.search import engine_search
from rlctl.planner.search import policy_search as search
from rlctl.planner.search.policy_search import Request
from rlctl.planner.search.rules import not_runnable
from rlctl.planner.search.teacher_search import TeacherPlan, with_teacher
from rlctl.telemetry.phases import Phase


def feasible_plans(request: Request) -> tuple[list[Plan], list[Rejected]]:
    """All plans that fit, the best first (as many as are worth showing), and why others did not."""
    colocated = request.pin("generation.colocated")
    modes = [True, False] if colocated is None else [bool(colocated)]
    if request.pin("refit.mover") == "cuda-ipc":
        modes = [True]
    log = _RejectionLog()
    plans: list[Plan] = []
    if not request.workload.trains:
        return _engines_alone(request, log), log.listed()
    for colocated in modes if request.workload.rollouts else [True]:
        if colocated:
            plans += _colocated(request, log)
        elif not plans and not request.cluster.is_cpu:
            plans += _split(request, log)
    return plans, log.listed()


class _RejectionLog:
    """Collects why layouts were rejected; one line for each distinct layout."""

    def __init__(self) -> None:
        self.lines: dict[str, tuple[str, str, float]] = {}
        self.fitted: set[str] = set()
        """Halves of a plan that fit by themselves."""

    def add(self, half: str) -> search.Reject:
        def note(choice: Any, why: str, over: float = math.inf) -> None:
            name = f"{half} {choice.name()}"
            if over < self.lines.get(name, (half, "", math.inf))[2] or name not in self.lines:
                self.lines[name] = (half, why, over)

        return note

    def listed(self) -> list[Rejected]:
        """Sort by memory missed, what no rule allows last, and a half that fits in no way before one that does."""
        order = sorted(
            self.lines.items(),
            key=lambda item: (item[1][2] == math.inf, item[1][0] in self.fitted, item[1][2], len(item[0])),
        )
        return [Rejected(plan, why, over) for plan, (_, why, over) in order]


KEEP = 6
"""Candidates of training and of generation that are combined."""


def _colocated(request: Request, log: _RejectionLog) -> list[Plan]:
    cluster = request.cluster
    devices = cluster.gpus or 1
    budget = request.budget
    if cluster.is_cpu and request.workload.rollouts:
        budget = cluster.nodes and budget - _least_cpu_engine(request)
    trainings = search.training_candidates(request, devices, True, budget, log.add("training"))
    trainings = with_teacher(request, trainings, devices, budget, log.add("training"))
    log.fitted |= {"training"} if trainings else set()
    if not request.workload.rollouts:
        return [assemble(request, t, None, True) for t in trainings[:KEEP]]
    plans = []
    for training in _worth_combining(trainings, lambda t: not not_runnable(t.choice, None, True, "megatron")):
        asleep = policy_asleep(request, training)
        left = request.budget
        if cluster.is_cpu:
            left -= training.peak.total * max(1, training.choice.parallel.world_size // cluster.nodes)
            left -= _teacher_bytes(request, training)
        engines = engine_search.generation_candidates(request, devices, True, asleep, left, log.add("generation"))
        log.fitted |= {"generation"} if engines else set()
        for engine in _worth_combining(engines, lambda e: e.choice.pp == e.choice.dp == e.choice.ep == 1):
            if _refit_fits(request, training.choice, engine, log) and _host_fits(request, training, engine, log):
                plans.append(assemble(request, training, engine.choice, True))
    return sorted(plans, key=score)


def _worth_combining(candidates: list[Any], runnable: Callable[[Any], bool]) -> list[Any]:
    """The best candidates, and the best of those that can be run."""
    best, able = candidates[:KEEP], [c for c in candidates if runnable(c)][:KEEP]
    return best + [c for c in able if c not in best]


def _split(request: Request, log: _RejectionLog) -> list[Plan]:
    """Policy and engines on different devices, working one after the other."""
    plans = []
    total, device = request.cluster.gpus, request.cluster.device
    for share in (0.25, 0.5, 0.75):
        policy = int(total * share)
        if request.cluster.nodes > 1:
            policy = max(1, round(request.cluster.nodes * share)) * request.cluster.gpus_per_node
        if not 0 < policy < total:
            continue
        trainings = search.training_candidates(request, policy, False, request.budget, log.add("training"))
        trainings = with_teacher(request, trainings, policy, request.budget, log.add("training"))
        other, noted = total - policy, log.add("generation")
        engines = engine_search.generation_candidates(request, other, False, 0.0, request.budget, noted)
        made = [assemble(request, t, e.choice, False) for t in trainings[:2] for e in engines[:2]]
        for plan in made:
            if plan.memory["refit"].total <= device.memory and plan.host_memory <= device.host_memory:
                plans.append(plan)
    return sorted(plans, key=score)


def _engines_alone(request: Request, log: _RejectionLog) -> list[Plan]:
    """Completions: all devices are the engines'."""
    devices = request.cluster.gpus or 1
    engines = engine_search.generation_candidates(request, devices, False, 0.0, request.budget, log.add("generation"))
    able = _worth_combining(engines, lambda e: e.choice.pp == e.choice.dp == e.choice.ep == 1)
    return sorted((assemble(request, None, engine.choice, False) for engine in able), key=score)


def _least_cpu_engine(request: Request) -> float:
    """Bytes of a node that the smallest engine needs on a CPU."""
    layouts = engine_search.generation_layouts(request, 1)
    needs = (generation_memory(request.facts, g, request.cluster, 0.0, request.constants) for g in layouts)
    return min((memory.total for memory in needs), default=0.0) + 256 * 1024**2


def _refit_fits(
    request: Request, choice: TrainingChoice, engine: engine_search.GenerationCandidate, log: _RejectionLog
) -> bool:
    if request.cluster.is_cpu:
        return True
    memory = mem.refit_memory(request.facts, choice, request.cluster, engine.weights, request.constants)
    if memory.total <= request.budget:
        return True
    why = f"refit needs {memory.total / GIB:.0f} GiB of {request.budget / GIB:.0f} for the weights of both engines"
    log.add("training")(choice, f"with {engine.choice.name()}: {why}", memory.total / request.budget)
    return False


def _host_fits(
    request: Request, training: search.TrainingCandidate, engine: engine_search.GenerationCandidate, log: _RejectionLog
) -> bool:
    """Return whether what is offloaded between the phases fits the host memory of a node."""
    if request.cluster.is_cpu:
        return True
    need = _host_memory(request, training, engine.choice, True)
    have = request.cluster.device.host_memory
    if need <= have:
        return True
    why = f"offloaded state needs {need / GIB:.0f} GiB of {have / GIB:.0f} of host memory a node"
    log.add("training")(training.choice, why, need / have)
    return False


def device_seconds(plan: Plan) -> float:
    """Device seconds of a step."""
    return plan.total_s * max(1, plan.cluster.gpus)


def score(plan: Plan) -> float:
    kinds = search.complexity(plan.training) if plan.training is not None else 0
    if plan.generation is not None:
        kinds += sum(v > 1 for v in (plan.generation.tp, plan.generation.pp, plan.generation.dp))
    aim = device_seconds(plan) if plan.workload.goal == "frugal" else plan.total_s
    return aim * (1 + search.SIMPLICITY * kinds)


def assemble(
    request: Request, training: search.TrainingCandidate | None, generation: GenerationChoice | None, colocated: bool
) -> Plan:
    """The plan of these layouts; either may be None, for training or for completions alone."""
    facts, cluster, workload, constants = request.facts, request.cluster, request.workload, request.constants
    choice = training.choice if training else None
    number = timing.micro_batches(choice, workload, constants)[0] if choice else 0
    return Plan(
        facts=facts, cluster=cluster, workload=workload, backend=_backend(request), training=choice,
        generation=generation, colocated=colocated, micro_batches=number,
        memory=_memory(request, training, generation, colocated),
        host_memory=_host_memory(request, training, generation, colocated),
        seconds=_seconds(request, training, generation, colocated),
        mfu=_mfu(request, training) if training else 0.0,
        mover=_mover(request, colocated) if training and generation else None, pins=request.pins,
        teacher=training.teacher if training else None,
    )  # fmt: skip


def _backend(request: Request) -> str:
    backend = request.pin("training.backend", "auto")
    return "megatron" if backend == "auto" else backend


def _mover(request: Request, colocated: bool) -> str:
    asked = request.pin("refit.mover")
    if asked is not None:
        return asked
    if request.cluster.is_cpu:
        return "shared-memory"
    return "cuda-ipc" if colocated else "collective"


def _memory(
    request: Request, training: search.TrainingCandidate | None, generation: GenerationChoice | None, colocated: bool
) -> dict[str, mem.PhaseMemory]:
    facts, cluster, constants = request.facts, request.cluster, request.constants
    if training is None:
        assert generation is not None
        return {"generation": generation_memory(facts, generation, cluster, 0.0, constants)}
    asleep = search.asleep_bytes(request, colocated)
    phases = {"training": training.peak}
    if generation is None:
        return phases
    phases["logprobs"] = mem.logprobs_memory(facts, training.choice, cluster, asleep, constants)
    if training.teacher is not None:
        phases["teacher"] = _while_taught(request, training, training.teacher, phases["logprobs"])
    policy = policy_asleep(request, training) if colocated else 0.0
    engine = generation_memory(facts, generation, cluster, policy, constants)
    if colocated:
        weights = weight_bytes(facts, generation)
        phases["refit"] = mem.refit_memory(facts, training.choice, cluster, weights, constants)
    else:
        phases["refit"] = mem.split_refit_memory(facts, training.choice, cluster, engine, constants)
    return phases | {"generation": engine}


def _host_memory(
    request: Request, training: search.TrainingCandidate | None, generation: GenerationChoice | None, colocated: bool
) -> float:
    if training is None and not request.cluster.is_cpu:
        return mem.engine_host_memory(request.cluster)
    if training is not None and not request.cluster.is_cpu:
        weights = weight_bytes(request.facts, generation) if generation else 0.0
        shared = colocated and generation is not None
        taught = training.teacher.memory.parts["teacher weights"] if training.teacher else 0.0
        ranks = max(1, request.cluster.gpus_per_node)
        return mem.host_memory(request.facts, training.choice, request.cluster, shared, weights) + ranks * taught
    engine = 0.0
    if generation is not None:
        per_node = max(1, generation.engines // request.cluster.nodes) * generation.tp
        engine = per_node * generation_memory(request.facts, generation, request.cluster, 0.0, request.constants).total
    if training is None:
        return engine
    policy = max(1, training.choice.parallel.world_size // request.cluster.nodes) * training.peak.total
    return policy + _teacher_bytes(request, training) + engine


def _seconds(
    request: Request, training: search.TrainingCandidate | None, generation: GenerationChoice | None, colocated: bool
) -> dict[Phase, float]:
    facts, constants, cluster = request.facts, request.constants, request.cluster
    seconds = dict.fromkeys(Phase, 0.0)
    if generation is not None:
        spent = generation_time(facts, generation, request.workload, cluster, constants)
        seconds[Phase.GENERATION] = spent.total
    if training is None:
        return seconds
    seconds |= {
        Phase.TRAINING: training.seconds,
        Phase.LOGPROBS: training.logprobs,
        Phase.CRITIC: training.critic,
    }
    seconds[Phase.OTHER] = 0.1 if cluster.is_cpu else constants.other_s
    if generation is not None:
        seconds[Phase.REWARD] = 0.05 if cluster.is_cpu else constants.reward_s
        mover = _mover(request, colocated)
        seconds[Phase.REFIT] = refit_time(
            facts, training.choice, generation, cluster, colocated, constants, mover=mover
        )
    return seconds


def _mfu(request: Request, training: search.TrainingCandidate) -> float:
    """Return the MFU of the training phase, against the peak of the training precision."""
    frozen = training.choice.adapters is not None
    flops = timing.model_flops(request.facts, request.workload, request.constants, frozen=frozen)
    devices = training.choice.parallel.world_size if not request.cluster.is_cpu else request.cluster.nodes
    return flops / training.seconds / devices / request.cluster.device.flops(request.precision)


def policy_asleep(request: Request, training: search.TrainingCandidate) -> float:
    """Return the bytes that the offloaded policy's process keeps on the device: context, communicators, allocator; and
    those of a teacher's."""
    if request.cluster.is_cpu:
        return 0.0
    taught = training.teacher.asleep if training.teacher is not None else 0.0
    return mem.runtime_bytes(request.cluster, training.choice, request.constants) + 0.5 * GIB + taught


def _while_taught(
    request: Request, training: search.TrainingCandidate, teacher: TeacherPlan, logprobs: mem.PhaseMemory
) -> mem.PhaseMemory:
    """Return the memory while the teacher computes: on a GPU next to the policy's states, on a CPU in a process of its
    own."""
    if request.cluster.is_cpu:
        return teacher.memory
    states = {name: size for name, size in logprobs.parts.items() if name not in ("activations", "logits")}
    return mem.PhaseMemory(states | teacher.memory.parts)


def _teacher_bytes(request: Request, training: search.TrainingCandidate) -> float:
    """Return the bytes of a node that the processes of a teacher take on a CPU."""
    if training.teacher is None:
        return 0.0
    ranks = max(1, training.teacher.choice.parallel.world_size // request.cluster.nodes)
    return ranks * training.teacher.memory.total
