"""`make_plan`: a pure function of model facts, cluster facts, workload and pins."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlctl.errors import ConfigError, NoPlanError
from rlctl.models.constraints import family_problem
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.inputs.request import Request
from rlctl.planner.result import NextBest, Plan, Reason, Rejected
from rlctl.planner.search import policy_search as search
from rlctl.planner.search.evidence import evidence
from rlctl.planner.search.feasible_plans import (
    assemble,
    believable,
    device_seconds,
    dimensions,
    feasible_plans,
    places_of,
    preference,
    score,
    untried_kinds,
)
from rlctl.planner.views.advice import no_plan, why_none
from rlctl.planner.views.reasons import reasons_for
from rlctl.telemetry.phases import Phase
from rlctl.transport.available import transport_facts

OTHER = "dtensor"
"""The fallback backend, if none is requested."""
PUBLISHED = (
    "In published runs with one trainer on H100s, Megatron-Core was faster: 8B on 8 GPUs took 28 s a step against 38, "
    "70B on 64 GPUs 28 s against 97."
)
ADDED = "A newer transformers may have it, or one file of a package adds a family (docs/adding_a_model.md)."
ON_CPUS = "On a CPU, both backends take about as long."

Refusal = Callable[[Plan], str | None]
"""Returns why a plan's backend does not support the configuration; None: it does."""


def make_plan(
    request: Request, *, top: int = 5, prefer_runnable: bool = True, refusal: Refusal = lambda _: None
) -> Plan:
    """Return the best plan and the `top` others.

    Runnable plans come first unless `prefer_runnable` is off. Without a pinned `training.backend`, Megatron is
    preferred; `refusal` checks each backend's best plan. Raises ConfigError for a forbidden pin (with the nearest valid
    value), and NoPlanError with the smallest sufficient machine and cheapest change.
    """
    adapters = request.adapters
    if adapters is None or adapters.refit != "delta" or request.pin("training.lora.refit"):
        return _made_plan(request, top, prefer_runnable, refusal)
    plans = list[Plan]()
    for way in (adapters, *adapters.others):
        with contextlib.suppress(NoPlanError):
            plans.append(_made_plan(replace(request, adapters=way), top, prefer_runnable, refusal))
    if not plans:
        merged = replace(adapters, refit="merged", why="The second copy of adapted matrices (delta) does not fit.")
        return _made_plan(replace(request, adapters=merged), top, prefer_runnable, refusal)
    best = min(plans, key=lambda plan: plan.total_s)
    return _with_other_ways(best, [plan for plan in plans if plan is not best])


def _with_other_ways(best: Plan, others: Sequence[Plan]) -> Plan:
    """Add the steps of other ways of `training.lora.refit` to the reason of the best one."""
    if best.training is None or best.training.adapters is None or not others:
        return best
    value = f"training.lora.refit={best.training.adapters.refit}"
    times = [f"{plan.total_s:.2f} s with {_refit_of(plan)}" for plan in others]
    rule = f"{best.training.adapters.why} A step takes {best.total_s:.2f} s, and {', '.join(times)}."
    return replace(best, reasons=tuple(Reason(value, rule) if r.value == value else r for r in best.reasons))


def _refit_of(plan: Plan) -> str:
    return plan.training.adapters.refit if plan.training is not None and plan.training.adapters is not None else ""


def _made_plan(request: Request, top: int, prefer_runnable: bool, refusal: Refusal) -> Plan:
    _check_mover(request)
    _check_devices(request)
    if (pinned := request.pin("training.backend")) or not request.workload.trains:
        best_plan, rule = _found(replace(request, backend=pinned or request.backend), prefer_runnable), ""
    else:
        best_plan, rule = _of_either(request, prefer_runnable, refusal)
    request, plans, rejected = best_plan.request, best_plan.plans, best_plan.rejected
    if not plans:
        raise no_plan(request, rejected)
    best = plans[0]
    others = _others(plans, best)[:top]
    beside = _beside(request, plans, best)
    best = replace(best, beside=beside)
    sides = [name for name in SIDES if getattr(best, name) is not None]
    near = tuple(layout for side in sides for layout in _next_best(side, plans, best, rejected))
    best = replace(best, next_best=near)
    shown = {f"{layout.side} {layout.layout}" for layout in near} | set(best.name().split("; "))
    faster = next((plan for plan in others if plan.total_s < best.total_s and not plan.equals(best)), None)
    new = [plan for plan in others if plan is faster or not shown.issuperset(plan.name().split("; "))]
    listed = [Rejected(plan.name(), _with_seconds(plan, best)) for plan in new]
    if beside is not None and all(beside.name() != other.name() for other in others):
        listed.append(Rejected(f"{beside.name()}; on the same devices", _with_seconds(beside, best)))
    listed += [layout for layout in rejected if layout.plan not in shown][:top]
    reasons = tuple(reasons_for(best, request, rejected, rule))
    return replace(best, reasons=reasons, rejected=tuple(listed), alternatives=tuple(others))


@dataclass(frozen=True)
class _Found:
    """The plans of one backend, the best first, and why others do not fit."""

    request: Request
    plans: list[Plan]
    rejected: list[Rejected]

    def obstacle(self, refusal: Refusal) -> str | None:
        """Return why the best plan cannot run or does not exist; None: it runs."""
        if not self.plans:
            return why_none(self.request, self.rejected)
        return next(iter(self.plans[0].not_runnable_because), None) or refusal(self.plans[0])


def _found(request: Request, prefer_runnable: bool) -> _Found:
    plans, rejected = feasible_plans(request)
    whole = request.cluster
    if request.workload.goal == "cheap" and not whole.is_cpu:  # more devices idle and communicate
        parts = [replace(whole, nodes=nodes) for nodes in search.powers(whole.nodes) if nodes < whole.nodes]
        sizes = [size for size in search.powers(whole.gpus_per_node) if size < whole.gpus_per_node]
        parts += [replace(whole, nodes=1, gpus_per_node=size) for size in sizes]
        plans += [plan for part in parts for plan in feasible_plans(replace(request, cluster=part))[0]]
        plans.sort(key=preference)
    if prefer_runnable:
        plans.sort(key=lambda plan: not plan.runnable)
    return _Found(request, believable(plans) if plans else plans, rejected)


def _of_either(request: Request, prefer_runnable: bool, refusal: Refusal) -> tuple[_Found, str]:
    """Return the default backend's result, or the other's if only that can run, and the reason. Raises ConfigError for
    a family that neither has."""
    if problem := _family_problem(request, request.backend):
        if neither := _family_problem(request, OTHER):
            raise ConfigError(f"{neither}.", ADDED)
        only = _found(replace(request, backend=OTHER), prefer_runnable)
        if only.plans and (also := only.obstacle(refusal)):
            reasons = (f"{request.backend}: {problem}", f"{OTHER}: {also.rstrip('.')}")
            only = replace(only, plans=[replace(plan, blocked=reasons[not plan.runnable :]) for plan in only.plans])
        return only, f"{request.backend} cannot: {problem}."
    usual = _found(request, prefer_runnable)
    if (obstacle := usual.obstacle(refusal)) is None:
        return usual, _against_the_other(request, usual.plans[0], refusal)
    other = _found(replace(request, backend=OTHER), prefer_runnable)
    if (also := other.obstacle(refusal)) is None:
        return other, f"{request.backend} cannot: {obstacle.rstrip('.')}."
    neither = (f"{request.backend}: {obstacle.rstrip('.')}", f"{OTHER}: {also.rstrip('.')}")
    plans = [replace(plan, blocked=neither[not plan.runnable :]) for plan in usual.plans]
    return replace(usual, plans=plans), f"No backend can run it. {'; '.join(neither)}."


def _family_problem(request: Request, backend: str) -> str | None:
    models = [request.facts, *([request.teacher] if request.teacher else [])]
    return next(filter(None, (family_problem(facts, backend) for facts in models)), None)


def _against_the_other(request: Request, best: Plan, refusal: Refusal) -> str:
    """Return why the usual backend comes before the other one, which may be able to run the plan too."""
    assert best.training is not None
    other, rejected = replace(request, backend=OTHER, cluster=best.cluster), list[str]()

    def reject(choice: Any, reason: str, over: float = math.inf) -> None:
        rejected.append(reason)

    devices = best.cluster.devices if best.cluster.is_cpu else best.training.parallel.world_size
    trainings = search.training_candidates(other, devices, best.colocated, request.budget, reject)
    if not trainings:
        return f"{OTHER} cannot: {rejected[0] if rejected else 'no layout divides the devices'}."
    fastest = trainings[0] if best.teacher is None else trainings[0].with_teacher(best.teacher)
    plan = assemble(other, fastest, best.generation, best.colocated, best.engine_devices)
    if because := refusal(plan):
        return f"{OTHER} cannot: {because.rstrip('.')}."
    if best.cluster.is_cpu:
        return ON_CPUS
    ours, theirs = (sum(name.seconds[phase] for phase in (Phase.TRAINING, Phase.LOGPROBS)) for name in (best, plan))
    unseen = "; no published run shows that dtensor is faster" if theirs < ours else ""
    return (
        f"{PUBLISHED} Predicted here, training and log-probs: {ours:.1f} s, with {OTHER} ({fastest.choice.name()}) "
        f"{theirs:.1f} s{unseen}."
    )


def _others(plans: list[Plan], best: Plan) -> list[Plan]:
    def kind(plan: Plan) -> object:
        return plan.cluster.gpus if plan.workload.goal == "cheap" else plan.name()

    able = [plan for plan in plans if plan.runnable or not best.runnable or plan.workload.goal != "cheap"]
    kinds = {kind(plan): plan for plan in sorted(able, key=score, reverse=True)}
    kinds.pop(kind(best), None)
    return sorted(kinds.values(), key=score)


SIDES = ("training", "generation")
NEXT = 3


def _next_best(side: str, plans: list[Plan], best: Plan, rejected: list[Rejected]) -> list[NextBest]:
    """Return the best other layouts of one side. The other side stays as chosen where a plan has both, so that the
    seconds differ by this side alone; else the name says what changes with it."""
    (other_side,) = (name for name in SIDES if name != side)

    def name_of(plan: Plan, half: str) -> str:
        choice = getattr(plan, half)
        return choice.name() if choice is not None else ""

    def changes_both(plan: Plan) -> bool:
        return plan.engine_devices != best.engine_devices or name_of(plan, other_side) != name_of(best, other_side)

    nearest = {name_of(best, side): best}
    for plan in sorted(plans, key=lambda plan: (changes_both(plan), score(plan))):
        if plan.cluster == best.cluster:
            nearest.setdefault(name_of(plan, side), plan)
    listed, phases = list[NextBest](), ("generation",) if side == "generation" else ("training", "logprobs")
    for plan in sorted((plan for plan in nearest.values() if plan is not best), key=score):
        memory = max(plan.memory[phase].total for phase in phases if phase in plan.memory) / GIB
        name = name_of(plan, side) + f" with {name_of(plan, other_side)}" * changes_both(plan)
        listed.append(NextBest(side, name, plan.total_s, memory, _why_not(plan, best)))
    for other in rejected:
        name = other.plan.removeprefix(f"{side} ")
        if name != other.plan and name not in nearest and math.isfinite(other.over):
            listed.append(NextBest(side, name, None, None, other.why))
    return listed[:NEXT]


def _beside(request: Request, plans: list[Plan], best: Plan) -> Plan | None:
    if best.waits is None:
        return None
    together = [plan for plan in plans if plan.colocated and plan.cluster == best.cluster]
    if not together:  # on the same devices the two sides take turns
        pins = {key: value for key, value in request.pins.items() if key not in (*APART, "refit.mover")}
        turns = replace(request.workload, staleness=None)
        turns_request = replace(
            request, pins=pins | {"generation.colocated": True}, workload=turns, cluster=best.cluster
        )
        together = feasible_plans(turns_request)[0]
    return min(together, key=lambda plan: (not plan.runnable, score(plan)), default=None)


APART = ("generation.colocated", "generation.devices")


def _check_devices(request: Request) -> None:
    devices, total, on_cpu = request.pin("generation.devices"), request.cluster.devices, request.cluster.is_cpu
    alone, kind = total < 2 and not on_cpu, "cores" if on_cpu else "GPUs"  # two sides share one core, and never a GPU
    if devices is None:
        if alone and request.pin("generation.colocated") is False and request.workload.engines:
            message = "generation.colocated = false needs separate GPUs for the engines, but there is only one GPU."
            raise ConfigError(message, "Leave it out: the two sides take turns on this one. Or use more GPUs.")
    elif request.pin("generation.colocated"):
        message = f"gives the engines separate {kind}, and generation.colocated is true."
        raise ConfigError(f"generation.devices = {devices} {message}", "Leave one of the two out.")
    elif devices >= (total if alone else max(2, total)):
        message = f"leaves the policy none of the {total} {kind if total > 1 else kind[:-1]}."
        hint = f"Give the engines at most {total - 1}." if total > 1 else "Leave it out: the two sides share this one."
        raise ConfigError(f"generation.devices = {devices} {message}", hint)


def _check_mover(request: Request) -> None:
    mover, colocated = request.pin("refit.mover"), request.pin("generation.colocated")
    apart = colocated is False or (colocated is None and request.pin("generation.devices") is not None)
    if mover is not None and request.workload.engines:
        transport_facts(mover).require_place(places_of(request.cluster, apart=apart))


def _with_seconds(plan: Plan, best: Plan) -> str:
    return f"{_why_not(plan, best)} ({plan.total_s:.1f} s{' a step' * (plan.training is not None)})"


def _why_not(plan: Plan, best: Plan) -> str:
    """Return how fast a plan is against the best one, and if it is not slower, why it was not chosen."""
    if plan.workload.goal == "cheap":
        more = device_seconds(plan) / device_seconds(best) - 1
        if more >= 0.005:
            return f"{100 * more:.0f}% more GPU seconds a step, on {plan.cluster.gpus} GPUs"
    ratio = plan.total_s / best.total_s - 1
    if best.runnable and not plan.runnable and ratio < 0.005:
        gain = f"{-100 * ratio:.0f}% faster" if ratio < -0.005 else "as fast"
        return f"{gain}, but cannot run yet: {plan.not_runnable_because[0]}"
    if ratio >= 0 and not plan.equals(best):
        return f"{100 * ratio:.0f}% slower"
    gain = (
        f"{-100 * ratio:.0f}% faster" if not plan.equals(best) else f"not clearly {'faster' if ratio < 0 else 'slower'}"
    )
    return "; ".join([gain, *_against(plan, best)])


def _against(plan: Plan, best: Plan) -> list[str]:
    """Return the first rule of `believable` or `score` that puts a plan behind the best one; empty: it is slower."""
    if kinds := [kind for kind in untried_kinds(plan) if kind not in untried_kinds(best)]:
        return [f"no published run confirms predictions for {kinds[0]}"]
    if plan.colocated != best.colocated:
        return [f"needs generation.colocated={str(plan.colocated).lower()}"]
    evidences = [evidence(each.facts, each.cluster, each.training, each.generation) for each in (plan, best)]
    if evidences[0] < evidences[1] and not best.cluster.is_cpu:
        return ["rarer in published runs"]
    if dimensions(plan) > dimensions(best):
        return ["more parallel dimensions, recomputation or offload"]
    if plan.total_s >= best.total_s:
        return []
    if plan.engine_devices != best.engine_devices:
        return [f"needs generation.devices={plan.engine_devices}"]
    return ["less free memory"]


def refuse_unrunnable(plan: Plan) -> None:
    """Raise ConfigError naming each key of a plan that rlctl cannot run yet."""
    if reasons := plan.not_runnable_because:
        hint = "Set those keys otherwise (--set section.key=value); `rlctl plan` shows the plan."
        raise ConfigError(f"The plan cannot be run yet: {'; '.join(reasons)}.", hint)
