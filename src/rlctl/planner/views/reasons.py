"""The rule behind each value of a plan, in a sentence with its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from rlctl.models.constraints import unpacked_rule
from rlctl.planner.choice import TEACHER_SIZES, GenerationChoice, LoraChoice, TrainingChoice
from rlctl.planner.costs.engines import full_step, generation_time, plan_kv, weight_bytes
from rlctl.planner.costs.memory import waiting_adapter_bytes
from rlctl.planner.costs.time import change_time
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.inputs.constants import RESOLUTION
from rlctl.planner.inputs.request import HEADROOM, Request
from rlctl.planner.result import Plan, Reason, Rejected
from rlctl.planner.search.evidence import has_published_sizes
from rlctl.planner.search.policy_search import TeacherPlan
from rlctl.telemetry.phases import Phase
from rlctl.transport.available import transport_facts

Ruled = tuple[str, object, str]
"""A key, its value, and the rule that chose it where the key is not pinned."""


def reasons_for(plan: Plan, request: Request, rejected: list[Rejected], backend_rule: str) -> Iterator[Reason]:
    """Yield the reasons in the order of the plan's values; `backend_rule` explains the backend."""
    for key, value, rule in _ruled(plan, request, rejected, backend_rule):
        pin = "refit.mover" if key == "mover" else key
        text = str(value).lower() if isinstance(value, bool) else str(value)
        mentions_pin = key == "training.optimizer_offload"
        yield Reason(f"{key}={text}", rule if mentions_pin else _given(plan, pin) or rule)


def _ruled(plan: Plan, request: Request, rejected: list[Rejected], backend_rule: str) -> Iterator[Ruled]:
    training, generation, cluster = plan.training, plan.generation, plan.cluster
    if cluster != request.cluster:
        available = f"{request.cluster.nodes} x {request.cluster.gpus_per_node}"
        fewest = f"This part of the {available} GPUs uses the fewest GPU seconds a step."
        yield "cluster", f"{cluster.nodes} x {cluster.gpus_per_node}", fewest
    if cluster.device.note:
        yield "device", cluster.device.name, cluster.device.note
    if training is not None:
        yield "training.backend", plan.backend, backend_rule
        yield from _training_rules(plan, training, request, rejected)
    if plan.teacher is not None:
        yield from _teacher_rules(plan, plan.teacher)
    if generation is not None:
        yield from _generation_rules(plan, generation, request)
    if training is not None and generation is not None:
        together = "All devices work in every phase."
        if plan.workload.staleness is not None and not cluster.is_cpu:
            together = "Engines pause while the policy trains, and keep unfinished rollouts."
        yield "generation.colocated", plan.colocated, together if plan.colocated else _apart(plan)
        if plan.engine_devices:
            trains = plan.total_s - sum(plan.seconds[phase] for phase in (*ROLLOUT_PHASES, Phase.REFIT))
            shortest = "Of the divisions tried, this one has the shortest step: "
            shortest += f"{trains:.1f} s of work for the policy, {plan.rollouts_s:.1f} s for the engines."
            yield "generation.devices", plan.engine_devices, shortest
        assert plan.mover is not None  # weights go from the policy to the engines
        yield "mover", plan.mover, transport_facts(plan.mover).way
        if training.adapters is not None:
            yield "training.lora.refit", training.adapters.refit, training.adapters.why
        if (work := plan.workload).staleness is not None:
            rule = "Rollouts depend on run.seed only."
            if work.in_flight is not None:
                rule = f"Pinned: refit.in_flight={work.in_flight}."
            elif work.tools_s:
                tools = f"The longest episodes spend {work.tools_s:.0f} s in tools (environment.tool_s)"
                rule = f"{tools}; a step takes {plan.total_s:.0f} s."
            yield "refit.in_flight", plan.in_flight, rule


ROLLOUT_PHASES = (Phase.GENERATION, Phase.REWARD, Phase.WAITING)


def _apart(plan: Plan) -> str:
    if plan.workload.staleness is not None:
        return "Engines sample while the policy trains (rollouts.mode=async)."
    if "generation.devices" in plan.pins:
        return "generation.devices gives engines separate devices."
    return "No runnable plan with policy and engines on the same devices fits."


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _given(plan: Plan, key: str) -> str | None:
    return f"Pinned: {key}={plan.pins[key]}." if key in plan.pins else None


def _why_not(plan: Plan, rejected: list[Rejected], t: TrainingChoice, size: str) -> str | None:
    """Return why the layout with half of `size` and twice the data parallelism does not fit, alone or with the plan's
    engines; None: it fits."""
    engines = f"with {plan.generation.name()}:" if plan.generation else ""
    dp = t.parallel.dp * 2 if size in ("tp", "pp", "cp") else t.parallel.dp
    parallel = replace(t.parallel, **{size: getattr(t.parallel, size) // 2, "dp": dp, "vpp": 1})
    smaller = replace(t, parallel=parallel, recompute="none", optimizer_offload=False)
    for other in rejected:
        alone = not other.why.startswith("with ") or other.why.startswith(engines)
        if other.plan.startswith(f"training {smaller.name()}") and "GiB" in other.why and alone:
            return f"{smaller.name()} does not fit: {other.why}."
    return None


def _size_rule(plan: Plan, t: TrainingChoice, key: str, request: Request, rejected: list[Rejected]) -> str:
    if getattr(t.parallel, key) == 1:
        if key in ("pp", "vpp") and t.sharding == "full":
            return "FSDP2 has no pipeline stages."
        if key in ("ep", "etp") and plan.facts.moe is None:
            return "The model has no experts."
        if key != "vpp":
            cheap = request.workload.goal == "cheap"
            return "No larger size uses fewer GPU seconds." if cheap else "No larger size is clearly faster."
        if t.parallel.pp == 1:
            return "There are no pipeline stages to divide."
        return "More stages a rank would add more communication than they save of the pipeline bubble."
    if key == "vpp":
        return "It shortens the pipeline bubble."
    if reason := _why_not(plan, rejected, t, key):
        return reason
    if request.workload.goal != "fast":
        return f"Best layout that fits for --goal {request.workload.goal}."
    if not plan.cluster.is_cpu and has_published_sizes(plan.facts, plan.cluster, t):
        return f"Published runs have this size, and no other size is clearly faster (by more than {RESOLUTION:.0%})."
    if _slower_than_some(plan, "training"):
        return "No other size is clearly faster."
    return f"Fastest {'runnable ' * plan.runnable}layout that fits."


def _slower_than_some(plan: Plan, side: str) -> bool:
    """Whether another layout of a side has a shorter predicted step, within the prediction's error."""
    return any(
        alternative.side == side and (alternative.seconds or math.inf) < 0.995 * plan.total_s
        for alternative in plan.next_best
    )


def _training_rules(plan: Plan, t: TrainingChoice, request: Request, rejected: list[Rejected]) -> Iterator[Ruled]:
    parallel, cluster = t.parallel, plan.cluster
    for key in ("tp", "pp", "vpp", "cp", "ep", "etp"):
        yield f"training.{key}", getattr(parallel, key), _size_rule(plan, t, key, request, rejected)
    divided = f"{_number(parallel.world_size, 'rank')} / (TP x PP x CP = {parallel.model_size:,})."
    yield "training.dp", parallel.dp, divided
    sp = "It saves activations at no cost with TP." if parallel.tp > 1 else "It needs training.tp > 1."
    yield "training.sequence_parallel", parallel.sequence_parallel, sp
    number = f"{plan.micro_batches:,} micro-batch{'es' * (plan.micro_batches != 1)}"
    longest = "rollout" if request.workload.rollouts else "sequence"
    rows = f"A row holds the longest {longest} ({request.workload.max_length:,} tokens), or more if that is faster; "
    yield "training.micro_batch_tokens", t.micro_batch_tokens, f"{rows}{number} a rank and optimizer step."
    if plan.facts.unpacked:
        reason = unpacked_rule(plan.facts)
        yield "training.packing", False, f"{reason[0].upper()}{reason[1:]}."
    share, peak = HEADROOM[request.workload.goal], plan.memory["training"].total / GIB
    least = f"The least recomputation that keeps training ({peak:.1f} GiB) within {100 * share:.0f}% of "
    yield "training.recompute", t.recompute, f"{least}{cluster.device.memory / GIB:.1f} GiB."
    offload = "Nothing else fits." if t.optimizer_offload else "Optimizer states fit on the devices."
    if pin := _given(plan, "training.optimizer_offload"):
        useless = t.optimizer_offload and cluster.is_cpu
        offload = pin + " It saves nothing: a CPU's device memory is host memory." * useless
    yield "training.optimizer_offload", t.optimizer_offload, offload
    if t.reference_offload:
        yield "reference", "host memory", "Its weights swap with the policy's to compute log-probs."
    precision = "Set by model.dtype."
    if cluster.is_cpu and t.precision == "float32":
        precision = "A CPU trains in float32 unless a probe shows bfloat16 products to be 1.5 times as fast."
    if t.precision == "fp8":
        precision = "Linear layers multiply in float8 (megatron.fp8); weights, gradients and refits are in bfloat16."
    yield "precision", t.precision, precision
    request = plan.request
    if request.own_layers and not request.fsdp:
        slowdown = f"{request.constants.own_layers_slowdown:g} times the time of TransformerEngine's (one measurement)"
        yield "layers", "Megatron's own", f"Set, or TransformerEngine is not installed here: {slowdown}."
    if plan.generation is not None and not request.engine.graphs and not cluster.is_cpu:
        slow = request.constants.eager_layer_s / request.constants.decode_layer_s
        yield "CUDA graphs", "off", f"vllm.enforce_eager: the host launches each layer, {slow:.0f} times slower."
    if t.critic:
        turns = "; both do not fit together, so they take turns on the devices."
        how = turns if t.critic_offload else ", and fits next to it."
        yield "critic", "turns" if t.critic_offload else "resident", f"Same size and layout as the policy{how}"
    if t.adapters is not None and (held := t.adapters.held) > 1:
        each = waiting_adapter_bytes(plan.facts, t) / 2**20
        waits = f"{each:,.1f} MiB of weights and optimizer states each on a rank"
        changes = f"A change of adapters takes {change_time(request, t):.2f} s of each step"
        yield (
            "adapters",
            held,
            f"One for each run. {_number(held - 1, 'adapter')} in host memory, with {waits}. {changes}.",
        )
        if plan.generation is not None and plan.workload.rollouts:
            yield _engines_of_runs(plan, plan.generation, t.adapters)
    if t.own_teacher:
        yield "teacher", "own", "teacher.policy: one more copy of the weights on each rank, and a forward pass."
    if t.threads:
        yield "training.threads", t.threads, "A node's cores / its ranks."


def _engines_of_runs(plan: Plan, generation: GenerationChoice, adapters: LoraChoice) -> Ruled:
    """Return whether each run of a sweep has its own engines, and why."""
    if generation.runs > 1:
        rule = "They keep the run's adapter, and sample its next batch while the policy trains the other runs."
        return "engines of a run", generation.of_run, rule
    reason = adapters.why_turns
    if not reason and plan.colocated and not plan.cluster.is_cpu:
        reason = "engines on the policy's GPUs sleep while it trains; generation.colocated=false gives them others"
    pinned = plan.pins.get("generation.engines")
    if not reason and pinned is not None and pinned % adapters.held:
        reason = f"generation.engines = {pinned} is no multiple of {_number(adapters.held, 'run')}"
    reason = reason or "engines for each run do not fit, or are slower"
    return "engines of a run", "all in turn", f"They get the adapter of the run with a refit before its step: {reason}."


def _teacher_rules(plan: Plan, teacher: TeacherPlan) -> Iterator[Ruled]:
    parallel = teacher.choice.parallel
    size = f"{teacher.memory.total / GIB:.1f} GiB"
    where = "in separate processes" if plan.cluster.is_cpu else "next to the policy's states"
    if teacher.others:
        turns = "Together they do not fit next to the policy: the others wait in host memory."
        turns = "They fit next to each other and the policy." if teacher.together else turns
        yield "teacher.models", f"{1 + len(teacher.others)} architectures", turns
    for key in TEACHER_SIZES:
        value = getattr(parallel, key)
        rule = f"The {teacher.label} fits without; a larger size would only add communication."
        if key in ("ep", "etp") and value == 1 and teacher.facts.moe is None:
            rule = f"The {teacher.label} has no experts."
        elif key == "pp" and teacher.choice.sharding == "full":
            rule = "FSDP2 has no pipeline stages."
        elif key == "dp" and plan.cluster.is_cpu:
            rule = "One process, since it shares memory with the policy and the engines."
        elif key == "dp":
            rule = f"The policy's devices / (TP x PP x CP = {parallel.model_size:,})."
        elif value > 1:
            rule = f"Fastest layout of the {teacher.label} that fits: {size} a rank, {where}."
        yield f"{teacher.role}.{key}", value, rule


def _engine_size_rule(plan: Plan, g: GenerationChoice, key: str, best: str) -> str:
    if key == "dp" and g.dp > 1:
        weights_gib = weight_bytes(plan.facts, g) / GIB
        whole = weight_bytes(plan.facts, replace(g, dp=1, ep=1)) / GIB
        return f"{best}: a GPU holds and reads {weights_gib:.0f} GiB of weights, against {whole:.0f} with one replica."
    if key == "ep" and g.ep > 1 and g.dp > 1:
        return f"Replicas share the experts: TP x DP = {g.tp * g.dp}."
    if getattr(g, key) > 1:
        return f"{best}."
    if key != "pp" and plan.facts.moe is None:
        return "The model has no experts to share." if key == "dp" else "The model has no experts."
    return "A larger size would only add communication." if plan.cluster.is_cpu else f"{best}."


def _half_tp(plan: Plan, g: GenerationChoice, request: Request) -> str:
    """Return the time, or the missing room, of twice as many engines of half the size."""
    if g.tp == 1 or plan.cluster.is_cpu:
        return ""
    request = replace(request, cluster=plan.cluster)
    device, asleep = plan.cluster.device, plan.memory["generation"].parts.get("policy asleep", 0.0)
    half = replace(g, tp=g.tp // 2, ep=g.ep if g.ep == 1 else g.ep // 2)
    half = replace(
        half, engines=min(2 * g.engines, request.workload.prompts), memory_fraction=0.92 - asleep / device.memory
    )
    size, tokens = plan_kv(request, half)
    if tokens < request.workload.max_length:
        weights = weight_bytes(plan.facts, half) / GIB
        return f"; with TP{half.tp}, {weights:.0f} GiB of weights leave no room for one sequence"
    half = replace(half, kv_cache_bytes=size, kv_cache_tokens=tokens)
    whole_s, other = (generation_time(request, choice).total for choice in (g, half))
    return f" ({whole_s:.0f} s; TP{half.tp}: {other:.0f} s)"


def _generation_rules(plan: Plan, g: GenerationChoice, request: Request) -> Iterator[Ruled]:
    workload, cluster = request.workload, plan.cluster
    engines = f"{_number(plan.engine_devices or cluster.gpus, 'GPU')} / {g.engine_gpus:,} per engine."
    if cluster.is_cpu:
        engines = "One per node." if g.runs == 1 else "One for each run."
    elif g.gpus < (plan.engine_devices or cluster.gpus) and g.engines == workload.prompts:
        engines = "One per prompt: an engine generates all completions of a prompt."
    yield "generation.engines", g.engines, engines
    longest = workload.lengths(request.constants.length_sigma).longest
    share = workload.share(g.of_run, g.dp)
    rollouts = _number(share, "rollout")
    best = f"Best size for --goal {workload.goal}"
    if workload.goal == "fast":
        best = "No other size is clearly faster" if _slower_than_some(plan, "generation") else "Fastest size"
    for_load = f"{best} for {rollouts} an engine, of up to {longest:,.0f} tokens"
    yield "generation.tp", g.tp, f"{for_load}{_half_tp(plan, g, request)}."
    for key in ("pp", "dp", "ep"):
        yield f"generation.{key}", getattr(g, key), _engine_size_rule(plan, g, key, best)
    if (nodes := cluster.nodes_of(g.replica_gpus)) > 1:
        step, exchange = (1000 * seconds for seconds in full_step(replace(request, cluster=cluster), g))
        spent = f"communication takes {exchange:.1f} of the {step:.1f} ms of a decode step with all rollouts."
        yield "replica_nodes", nodes, f"A replica has {g.replica_gpus} ranks on {nodes} nodes; {spent}"
    if g.memory_fraction is not None:
        most = "the sleeping policy leaves" if plan.colocated else "vLLM should use"
        rule = f"Room for all rollouts of an engine at full length, but no more than {most}."
        yield "generation.memory_fraction", g.memory_fraction, rule
    cache = f"{g.kv_cache_tokens:,} tokens; the longest sequence has {workload.max_length:,}."
    yield "generation.kv_cache_bytes", int(g.kv_cache_bytes), cache
    every = "All rollouts of an engine run at once, up to 1,024 (256 on a CPU)."
    if (full := g.kv_cache_tokens // workload.max_length) < g.max_concurrent:
        every += f" The KV cache holds {full:,} of full length, or more shorter ones."
    yield "generation.max_concurrent", g.max_concurrent, every
