"""The layout of a teacher: it computes log-probs next to the policy, on the policy's devices.

It waits in host memory while others compute, except on a CPU, where that is the same memory. Its rows are those of the
policy. Where no size is given, the fastest layout is taken of those that fit next to what the policy keeps on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from rlctl.config.parallel import ParallelSpec
from rlctl.models.constraints import Problem, fsdp_problems, policy_problems
from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import TrainingChoice
from rlctl.planner.costs import memory as mem
from rlctl.planner.costs import time as timing
from rlctl.planner.costs.parameters import stages
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.search.policy_search import (
    Reject,
    Request,
    TeacherPlan,
    TrainingCandidate,
    powers,
    values_to_try,
)

CONTEXT_BYTES = 0.5 * GIB
"""Device memory that a process keeps whose tensors are in host memory, in addition to that of its communicators."""


def with_teachers(
    request: Request, trainings: list[TrainingCandidate], devices: int, budget: float, rejected: Reject
) -> list[TrainingCandidate]:
    """Give each of `trainings` the best teacher that fits `budget` bytes next to it; others go to `rejected`."""
    if request.teacher is None:
        return trainings
    found, known = [], {}
    for training in trainings:
        tokens = training.choice.micro_batch_tokens
        if tokens not in known:
            known[tokens] = _teachers(request, request.teacher, devices, tokens)
        options = known[tokens]
        beside = 0.0 if request.cluster.is_cpu else _of_policy(request, training)
        able = [one for one in options if one.memory.total + beside <= budget]
        room = [one for one in able if training.peak.total + one.asleep <= budget]
        if room:
            found.append(training.with_teacher(min(room, key=lambda one: one.score)))
        elif options:
            least = min(one.memory.total for one in options)
            why = f"next to it the teacher needs {least / GIB:.0f} GiB, and {(budget - beside) / GIB:.0f} are left"
            rejected(training.choice, why, (least + beside) / max(budget, 1.0))
        else:
            rejected(training.choice, _why_none(request, request.teacher, devices, tokens))
    return sorted(found, key=lambda one: one.score)


def _of_policy(request: Request, training: TrainingCandidate) -> float:
    """Bytes of a device that the policy's states and process keep while the teacher computes."""
    asleep = training.peak.parts.get("engine asleep", 0.0)
    fullest = max(
        sum(mem.state_bytes(request.facts, stage, training.choice).values())
        for stage in stages(request.facts, training.choice)
    )
    return fullest + mem.runtime_bytes(request.cluster, training.choice, request.constants) + asleep


def _teachers(request: Request, facts: ModelFacts, devices: int, row_tokens: int) -> list[TeacherPlan]:
    """Return all valid layouts of the teacher with rows of that many tokens."""
    return [
        _costed(request, facts, choice)
        for choice in _choices(request, facts, devices, row_tokens)
        if not _problems(facts, choice) and (choice.parallel.cp == 1 or not row_tokens % (2 * choice.parallel.cp))
    ]


def _why_none(request: Request, facts: ModelFacts, devices: int, row_tokens: int) -> str:
    """Return the rule that the teacher's first layout breaks, or that its sizes fit no devices."""
    for choice in _choices(request, facts, devices, row_tokens):
        if problems := _problems(facts, choice):
            return f"the teacher as {choice.parallel.name()}: {problems[0].message}"
    count = "one device does" if devices == 1 else f"{devices} devices do"
    return f"the teacher's sizes (teacher.tp, teacher.pp, ...) make ranks that {count} not divide into"


def _problems(facts: ModelFacts, choice: TrainingChoice) -> list[Problem]:
    """Return the rules of the policy's backend, which is the teacher's too, that the sizes break."""
    return (fsdp_problems if choice.sharding == "full" else policy_problems)(facts, choice.parallel)


def _choices(request: Request, facts: ModelFacts, devices: int, row_tokens: int) -> Iterator[TrainingChoice]:
    cluster, on_cpu, fsdp = request.cluster, request.cluster.is_cpu, request.fsdp
    joined = max(cluster.link_domain, cluster.gpus_per_node)
    precision = "bf16" if request.precision in ("fp8", "fp4") else request.precision
    experts = facts.moe.experts if facts.moe else 1
    tps = values_to_try(request, "teacher.tp", [1] if on_cpu else powers(min(facts.heads, joined, devices, 16)))
    pps = values_to_try(request, "teacher.pp", [1] if on_cpu or fsdp else powers(min(facts.layers, devices, 64)))
    cps = values_to_try(request, "teacher.cp", [1])
    eps = values_to_try(request, "teacher.ep", [1] if on_cpu else powers(experts))
    etp = request.pin("teacher.etp", 1)
    for tp, pp, cp, ep in product(tps, pps, cps, eps):
        dp = request.pin("teacher.dp", -(-ep // (tp * cp)) if on_cpu else devices // (tp * pp * cp))
        world = tp * pp * cp * dp
        if dp < 1 or (world > devices and not on_cpu) or (tp * cp * dp) % (ep * etp):
            continue
        threads = max(1, cluster.device.cores // max(1, world // cluster.nodes)) if on_cpu else None
        parallel = ParallelSpec(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, dp=dp)
        sharding = "full" if fsdp else "optimizer"
        yield TrainingChoice(
            parallel, micro_batch_tokens=row_tokens, precision=precision, threads=threads, sharding=sharding
        )


def _costed(request: Request, facts: ModelFacts, choice: TrainingChoice) -> TeacherPlan:
    cluster, constants = request.cluster, request.constants
    whole = mem.logprobs_memory(facts, choice, cluster, 0.0, constants)
    states = [mem.state_bytes(facts, stage, choice) for stage in stages(facts, choice)]
    weights = max(own["weights"] for own in states)
    gathered = max(own.get("gathered", 0.0) for own in states)
    kept = {"teacher weights": weights + gathered, "teacher activations": whole.parts["activations"],
            "teacher logits": whole.parts["logits"], "teacher runtime": whole.parts["runtime"]}  # fmt: skip
    alone = replace(request.workload, old_logprobs=True, reference=False)
    seconds = timing.logprobs_time(facts, choice, alone, cluster, constants)
    asleep = 0.0
    if not cluster.is_cpu:
        asleep = whole.parts["runtime"] + CONTEXT_BYTES
        seconds += 2 * weights / (cluster.device.host_link * constants.pinned_copy)
    return TeacherPlan(facts, choice, mem.PhaseMemory(kept), asleep, seconds)
