"""The engines' layouts: enumerate, set the cache, keep valid ones that fit, and rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from rlctl.models.constraints import Problem
from rlctl.planner.choice import GenerationChoice
from rlctl.planner.costs.engines import (
    CPU_ENGINE_BYTES,
    generation_time,
    kept_base_bytes,
    kv_bytes_per_token_on_device,
    overhead_bytes,
    plan_kv,
    weight_bytes,
)
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.inputs.request import Request
from rlctl.planner.search.layout_rules import generation_problems
from rlctl.planner.search.policy_search import SIMPLICITY, Reject, powers


def generation_choices(request: Request, devices: int) -> Iterator[GenerationChoice]:
    facts, cluster, workload = request.facts, request.cluster, request.workload
    batched = request.pin("generation.max_batched_tokens", 8192)
    base = {"weight_bytes": request.generation_bytes, "max_batched_tokens": batched, "numbers": request.engine}
    if cluster.is_cpu:
        pp, dp = request.pin("generation.pp", 1), request.pin("generation.dp", 1)
        for tp, (engines, runs) in product(request.values("generation.tp", [1]), engine_counts(request, cluster.nodes)):
            threads = request.pin("generation.threads", max(1, devices // engines))
            share = workload.most_at_once(engines // runs, dp)
            concurrent = request.pin("generation.max_concurrent", min(256, share))
            ep = request.pin("generation.ep", tp * dp if dp > 1 and facts.moe else 1)
            yield GenerationChoice(
                engines, tp, pp, dp, ep, memory_fraction=None, max_concurrent=concurrent, threads=threads, runs=runs,
                **base,
            )  # fmt: skip
        return
    experts = facts.moe.experts if facts.moe else 1
    for tp in request.values("generation.tp", powers(min(facts.heads, devices, 64))):
        for pp in request.values("generation.pp", [1] if tp < cluster.gpus_per_node else [1, 2, 4]):
            options = [(1, 1)] + ([(1, tp)] if experts > 1 and tp > 1 else [])
            if experts > 1:
                dps = [dp for dp in powers(64)[1:] if experts % (tp * dp) == 0 and tp * pp * dp <= devices]
                options += [(dp, tp * dp) for dp in dps]
                options += [(dp, 1) for dp in dps] if request.pin("generation.ep") == 1 else []
            else:  # the rule says why not
                options += [(dp, 1) for dp in (request.pin("generation.dp", 1),) if dp > 1]
            for dp, ep in options:
                if dp != request.pin("generation.dp", dp) or ep != request.pin("generation.ep", ep):
                    continue
                for engines, runs in engine_counts(request, devices // (tp * pp * dp)):
                    share = workload.most_at_once(engines // runs, dp)
                    concurrent = request.pin("generation.max_concurrent", max(8, min(1024, share)))
                    yield GenerationChoice(engines, tp, pp, dp, ep, max_concurrent=concurrent, runs=runs, **base)


def engine_counts(request: Request, places: int) -> Iterator[tuple[int, int]]:
    """Yield (engines, runs with their own engines): all for one run at a time, and as many for each run of a sweep.
    `places`: engines that there are devices for, or nodes of CPUs, where each run may have a core."""
    prompts, pinned = request.workload.prompts, request.pin("generation.engines")
    if engines := pinned or min(places, prompts):
        yield engines, 1
    if (adapters := request.adapters) is None or adapters.why_turns or not request.workload.rollouts:
        return
    if (runs := adapters.held) == 1:
        return
    shared = request.cluster.is_cpu and runs <= request.cluster.devices
    for_each = min(max(places // runs, int(shared)), prompts)
    total = for_each * runs if pinned is None else pinned * (pinned % runs == 0)
    if total:
        yield total, runs


def ruled_engines(request: Request, devices: int) -> Iterator[tuple[GenerationChoice, list[Problem]]]:
    """Yield layouts and the rules that they break; on a CPU engines share cores, unless they have separate ones."""
    shares = request.cluster.is_cpu and request.pin("generation.devices") is None
    for choice in generation_choices(request, devices):
        there = max(devices, choice.gpus) if shares else devices
        yield choice, generation_problems(request.facts, choice, request.workload, there)


def memory_fraction(request: Request, choice: GenerationChoice, colocated: bool, asleep: float) -> float:
    """Share of a device for vLLM: enough for all rollouts at full length, within the sleeping policy's remainder."""
    pinned = request.pin("generation.memory_fraction")
    if pinned is not None:
        return pinned
    memory = request.cluster.device.memory
    ceiling = 0.92 if request.workload.goal != "safe" else 0.85
    if colocated:
        ceiling = min(ceiling, 1 - asleep / memory - 0.04)
    cache = choice.max_concurrent * request.workload.max_length * kv_bytes_per_token_on_device(request.facts, choice)
    fraction = (_fixed_bytes(request, choice) + cache) / memory + 0.02
    return max(0.2, int(min(ceiling, fraction) * 100) / 100)


def _fixed_bytes(request: Request, choice: GenerationChoice) -> float:
    weights = weight_bytes(request.facts, choice) + kept_base_bytes(request, choice)
    return weights + sum(overhead_bytes(request.facts, choice, request.constants).values())


def generation_candidates(
    request: Request, devices: int, colocated: bool, asleep: float, budget: float, rejected: Reject
) -> list[GenerationChoice]:
    """Return all valid engine layouts that fit, best first. `asleep`: the offloaded policy's remainder."""
    candidates = []

    def score(sized: GenerationChoice) -> float:
        kinds = sum(size > 1 for size in (sized.tp, sized.pp, sized.dp, sized.ep))
        return generation_time(request, sized).total / sized.runs * (1 + SIMPLICITY * kinds)

    for choice, problems in ruled_engines(request, devices):
        if choice.runs > 1 and colocated and not request.cluster.is_cpu:
            continue  # all engines sleep while the policy trains
        if problems:
            rejected(choice, problems[0].message)
            continue
        sized = _with_cache(request, choice, colocated, asleep, budget)
        if isinstance(sized, Problem):
            rejected(choice, sized.message, sized.over)
            continue
        candidates.append(sized)
    return sorted(candidates, key=score)


def _with_cache(
    request: Request, choice: GenerationChoice, colocated: bool, asleep: float, budget: float
) -> GenerationChoice | Problem:
    """The choice with its memory fraction and KV cache, or why it does not fit."""
    longest, per_token = request.workload.max_length, kv_bytes_per_token_on_device(request.facts, choice)
    if request.cluster.is_cpu:
        return _cpu_cache(request, choice, budget)
    have, fixed, pinned = request.cluster.device.memory, _fixed_bytes(request, choice), "generation.kv_cache_bytes"
    if (size := request.pin(pinned)) is not None:  # a KV cache of given size; the memory fraction follows from it
        need, asleep = size + fixed, asleep if colocated else 0.0
        if need + asleep > have:
            reason = (
                f"with {size / GIB:.0f} GiB of KV cache an engine takes {need / GIB:.0f} GiB of a GPU and the sleeping "
                f"policy {asleep / GIB:.0f}; there are {have / GIB:.0f}"
            )
            return Problem(pinned, reason, (need + asleep) / have)
        tokens = int(size / per_token)
        if tokens < longest:
            needs = f"one sequence needs {longest:,}: {int(longest * per_token):,} bytes"
            return Problem(pinned, f"{size:,.0f} bytes hold {tokens:,} tokens, and {needs}")
        fraction = min(0.99, math.ceil(100 * need / have) / 100)
        return replace(choice, memory_fraction=fraction, kv_cache_bytes=size, kv_cache_tokens=tokens)
    fraction = memory_fraction(request, choice, colocated, asleep)
    choice = replace(choice, memory_fraction=fraction)
    free, tokens = plan_kv(request, choice)
    if tokens < longest:
        need, may = fixed + longest * per_token, fraction * have
        reason = f"one sequence of {longest:,} tokens needs {need / GIB:.0f} GiB, and vLLM may use {may / GIB:.0f}"
        return Problem("generation.tp", reason, need / may)
    if colocated and fraction * have + asleep > have:
        reason = f"{fraction} leaves less than the {asleep / GIB:.1f} GiB of the sleeping policy"
        return Problem("generation.memory_fraction", reason)
    return replace(choice, kv_cache_bytes=free, kv_cache_tokens=tokens)


def _cpu_cache(request: Request, choice: GenerationChoice, budget: float) -> GenerationChoice | Problem:
    ranks = choice.engine_gpus
    per_token = kv_bytes_per_token_on_device(request.facts, choice) * ranks
    cache_bytes = choice.max_concurrent * request.workload.max_length * per_token * 1.1
    least = request.workload.max_length * per_token * 1.1
    process = CPU_ENGINE_BYTES + request.constants.cpu_process_bytes
    fixed = ranks * (process + weight_bytes(request.facts, choice) + kept_base_bytes(request, choice))
    free = budget / max(1, choice.engines // request.cluster.nodes) - fixed
    size = request.pin("generation.kv_cache_bytes", min(max(cache_bytes, 256 * 1024**2), free))
    if size < least or size > free:
        reason = f"engines need {fixed / GIB:.1f} GiB and {least / GIB:.2f} for one sequence; "
        return Problem("generation.kv_cache_bytes", f"{reason}{max(0.0, budget) / GIB:.1f} are left")
    size = int(size) // 2**20 * 2**20 if size > 2**20 else int(size)
    return replace(choice, kv_cache_bytes=size, kv_cache_tokens=int(size / per_token))
