"""The layout of a teacher or reward model on the policy's devices.

It waits in host memory while others compute, except on a CPU, and except a reward model that scores during training.
Unset sizes get the fastest layout that fits next to the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from rlctl.config.parallel import ParallelSpec
from rlctl.models.constraints import fsdp_problems, policy_problems
from rlctl.models.facts import ModelFacts, architectures
from rlctl.planner.choice import TrainingChoice
from rlctl.planner.costs import memory as mem
from rlctl.planner.costs import time as timing
from rlctl.planner.costs.parameters import count, stages
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.inputs.request import Request
from rlctl.planner.search.policy_search import Reject, TeacherPlan, TrainingCandidate, powers

CONTEXT_BYTES = 0.5 * GIB
"""Device bytes of a process with offloaded tensors, besides communicators."""


def with_teachers(
    request: Request, trainings: list[TrainingCandidate], devices: int, budget: float, rejected: Reject
) -> list[TrainingCandidate]:
    """Give each of `trainings` the best teacher that fits `budget` bytes next to it; others go to `rejected`."""
    if request.teacher is None:
        return trainings
    own_request = replace(request, facts=request.teacher)
    fitting, by_choice = list[TrainingCandidate](), dict[int, tuple[list[TeacherPlan], str]]()
    for training in trainings:
        tokens, beside = training.choice.micro_batch_tokens, 0.0
        if tokens not in by_choice:
            by_choice[tokens] = _teachers(own_request, devices, tokens)
        options, why_none = by_choice[tokens]
        if not request.cluster.is_cpu:  # the policy's states and processes stay while the teacher computes
            weights = (
                mem.state_bytes(request.facts, s, training.choice) for s in stages(request.facts, training.choice)
            )
            beside = max(sum(parts.values()) for parts in weights) + mem.runtime_bytes(request, training.choice)
            beside += sum(training.peak.parts.get(part, 0.0) for part in ("engine asleep", "staging"))
        able = [option for option in options if option.memory.total + beside <= budget]
        room = [option for option in able if training.peak.total + option.asleep <= budget]
        if room:
            best = min(room, key=lambda option: option.score)
            if best.memory.total + best.other_weights + beside <= budget:
                best = best.resident()
            fitting.append(training.with_teacher(best))
        elif options:
            least = min(option.memory.total for option in options)
            left = f"{(budget - beside) / GIB:.0f} are left"
            reason = f"next to it the {request.of_teacher} needs {least / GIB:.0f} GiB, and {left}"
            rejected(training.choice, reason, (least + beside) / max(budget, 1.0))
        else:
            rejected(training.choice, why_none)
    return sorted(fitting, key=lambda candidate: candidate.score)


def _teachers(request: Request, devices: int, row_tokens: int) -> tuple[list[TeacherPlan], str]:
    plans, broken, name = list[TeacherPlan](), "", request.of_teacher
    distinct = architectures((request.facts, *request.further_teachers))
    for choice in _choices(request, devices, row_tokens):
        check = fsdp_problems if choice.sharding == "full" else policy_problems
        if problems := [problem for facts in distinct for problem in check(facts, choice.parallel)]:
            broken = broken or f"the {name} as {choice.parallel.name()}: {problems[0].message}"
        elif choice.parallel.cp == 1 or not row_tokens % (2 * choice.parallel.cp):
            plans.append(_costed_together(request, choice, distinct))
    count = "one device does" if devices == 1 else f"{devices} devices do"
    sizes = f"the {name}'s sizes ({request.role}.tp, {request.role}.pp, ...) make ranks that {count} not divide into"
    return plans, broken or sizes


def _choices(request: Request, devices: int, row_tokens: int) -> Iterator[TrainingChoice]:
    facts, cluster, on_cpu, fsdp = request.facts, request.cluster, request.cluster.is_cpu, request.fsdp
    experts, role = facts.moe.experts if facts.moe else 1, request.role
    etp = request.pin(f"{role}.etp", 1)
    tps = request.values(f"{role}.tp", [1] if on_cpu else powers(min(facts.heads, cluster.near_devices, devices, 16)))
    pps = request.values(f"{role}.pp", [1] if on_cpu or fsdp else powers(min(facts.layers, devices, 64)))
    cps = request.values(f"{role}.cp", [1])
    eps = request.values(f"{role}.ep", [1] if on_cpu else powers(experts))
    for tp, pp, cp, ep in product(tps, pps, cps, eps):
        dp = request.pin(f"{role}.dp", -(-ep // (tp * cp)) if on_cpu else devices // (tp * pp * cp))
        world = tp * pp * cp * dp
        if dp < 1 or (world > devices and not on_cpu) or (tp * cp * dp) % (ep * etp):
            continue
        yield TrainingChoice(
            ParallelSpec(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, dp=dp),
            micro_batch_tokens=row_tokens,
            precision="bf16" if request.precision in ("fp8", "fp4") else request.precision,
            threads=max(1, cluster.device.cores // max(1, world // cluster.nodes)) if on_cpu else None,
            sharding="full" if fsdp else "optimizer",
            valued=role == "reward_model",
        )


def swap_seconds(request: Request) -> float:
    """Return the seconds in which the processes of a teacher read the weights of another one from disk."""
    return count(request.facts).total * (4 if request.cluster.is_cpu else 2) / request.constants.disk_bytes_per_s


def _costed_together(request: Request, choice: TrainingChoice, distinct: list[ModelFacts]) -> TeacherPlan:
    """Return the plan of teachers of several architectures, which take turns: on GPUs the others wait in host memory,
    and on CPUs all stay."""
    if len(distinct) == 1:
        return _costed(request, choice)
    work, listed = request.teaching, [request.facts, *request.further_teachers]
    plans = list[TeacherPlan]()
    for facts in distinct:
        number = listed.count(facts)
        share = replace(work, teachers=number, passes=work.passes * number / len(listed))
        plans.append(_costed(replace(request, facts=facts, teaching=share), choice))
    largest = max(plans, key=lambda plan: plan.memory.total)
    on_cpu, others = request.cluster.is_cpu, sum(plan.weights for plan in plans) - largest.weights
    parts = {f"{request.of_teacher} weights": largest.weights + others} if on_cpu else {}
    return replace(
        largest, facts=request.facts, memory=mem.PhaseMemory(largest.memory.parts | parts),
        seconds=sum(plan.seconds for plan in plans), others=tuple(distinct[1:]),
        other_weights=0.0 if on_cpu else others, together=on_cpu,
    )  # fmt: skip


def _costed(request: Request, choice: TrainingChoice) -> TeacherPlan:
    cluster, facts = request.cluster, request.facts
    runtime = {"runtime": mem.runtime_bytes(request, choice, trains=False)}
    whole = mem.logprobs_memory(request, choice, 0.0).parts | runtime
    states = [mem.state_bytes(facts, stage, choice) for stage in stages(facts, choice)]
    weights = max(state["weights"] for state in states)
    name, parts = request.of_teacher, ("activations", *(() if choice.valued else ("logits",)), "runtime")
    kept = {f"{name} {part}": whole[part] for part in parts}
    if request.workload.teacher_top:
        kept[f"{name} likely tokens"] = mem.likely_tokens_bytes(request, choice, 8 * request.teaching.lists)
    kept = {f"{name} weights": weights + max(state.get("gathered", 0.0) for state in states)} | kept
    seconds, asleep = request.teaching.passes * timing.logprobs_time(request, choice, passes=1), 0.0
    if not cluster.is_cpu and choice.valued and request.workload.staleness is not None:
        asleep = sum(kept.values())  # it scores while the policy trains
    elif not cluster.is_cpu:
        asleep = whole["runtime"] + CONTEXT_BYTES
        seconds += 2 * weights / (cluster.device.host_link * request.constants.pinned_copy)
    seconds += request.teaching.swaps * swap_seconds(request)
    return TeacherPlan(facts, choice, mem.PhaseMemory(kept), asleep, seconds, request.role)
