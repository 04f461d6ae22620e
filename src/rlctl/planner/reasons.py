"""For every value of a plan, the rule that chose it, in a sentence with its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlctl.planner.cluster import GIB
from rlctl.planner.result import Plan, Reason, Rejected
from rlctl.planner.search import HEADROOM, Request

PRECISION_RULES = {
    "float32": "float32 on a CPU",
    "fp8": "megatron.fp8: linear layers multiply in float8; weights, gradients and refits are those of bfloat16",
}


def reasons_for(plan: Plan, request: Request, rejected: list[Rejected]) -> Iterator[Reason]:
    """Reasons in the order of the plan's own values."""
    if plan.cluster != request.cluster:
        asked = request.cluster
        yield Reason(
            f"cluster={plan.cluster.nodes} x {plan.cluster.gpus_per_node}",
            f"the fewest GPU seconds a step; there are {asked.nodes} x {asked.gpus_per_node}",
        )
    if plan.training is not None:
        yield from _training_reasons(plan, request, rejected)
    if plan.generation is not None:
        yield from _generation_reasons(plan, request)
    if plan.training is not None and plan.generation is not None:
        yield Reason(
            f"generation.colocated={str(plan.colocated).lower()}",
            _given(plan, "generation.colocated")
            or ("all devices work in every phase" if plan.colocated else "no plan with both on the same devices fits"),
        )
        yield Reason(
            f"mover={plan.mover}",
            _given(plan, "refit.mover")
            or ("both engines share memory of the node" if plan.colocated else "weights cross the network"),
        )


def _given(plan: Plan, key: str) -> str | None:
    return f"pinned: {key}={plan.pins[key]}" if key in plan.pins else None


def _why_not(rejected: list[Rejected], plan: Plan, size: str) -> str | None:
    """Why the layout with half of `size` (and twice the data parallelism) does not fit; None: it does."""
    t = plan.training
    half = {size: getattr(t, size) // 2, "dp": t.dp * 2 if size in ("tp", "pp", "cp") else t.dp}
    smaller = replace(t, **half, vpp=1, recompute="none", optimizer_offload=False)
    for other in rejected:
        if other.plan.startswith(f"training {smaller.name()}") and "GiB" in other.why:
            return f"{smaller.name()} does not fit: {other.why}"
    return None


def _offload_rule(plan: Plan) -> str:
    t = plan.training
    given = _given(plan, "training.optimizer_offload")
    if given and t.optimizer_offload and plan.cluster.is_cpu:
        return f"{given}; saves nothing: on a CPU host memory is the same memory"
    return given or ("nothing fits otherwise" if t.optimizer_offload else "states fit on the devices")


def _training_reasons(plan: Plan, request: Request, rejected: list[Rejected]) -> Iterator[Reason]:
    t = plan.training
    fastest = (
        "fastest of the layouts that fit" + (" and that can be run" if plan.runnable else "")
        if request.workload.goal == "fast"
        else f"best of those that fit for --goal {request.workload.goal}"
    )
    for key in ("tp", "pp", "vpp", "cp", "ep", "etp"):
        value = getattr(t, key)
        if value == 1 and key in ("pp", "vpp") and t.sharding == "full":
            rule = "FSDP2 has no pipeline stages"
        elif value == 1:
            rule = "more would only add communication: everything fits without"
        elif key == "vpp":
            rule = "shortens the pipeline bubble"
        else:
            rule = _why_not(rejected, plan, key) or fastest
        yield Reason(f"training.{key}={value}", _given(plan, f"training.{key}") or rule)
    yield Reason(f"training.dp={t.dp}", _given(plan, "training.dp") or f"the {t.world_size} ranks by TP x PP x CP")
    yield Reason(
        f"training.sequence_parallel={str(t.sequence_parallel).lower()}",
        _given(plan, "training.sequence_parallel")
        or ("saves activations at no cost with TP" if t.tp > 1 else "needs TP"),
    )
    yield Reason(
        f"training.micro_batch_tokens={t.micro_batch_tokens}",
        _given(plan, "training.micro_batch_tokens")
        or (
            f"rows hold the longest rollout ({request.workload.max_length} tokens), or more where that is faster; "
            f"{plan.micro_batches} micro-batch{'es' * (plan.micro_batches > 1)} an optimizer step"
        ),
    )
    share = HEADROOM[request.workload.goal]
    peak = plan.memory["training"].total / GIB
    yield Reason(
        f"training.recompute={t.recompute}",
        _given(plan, "training.recompute")
        or (
            f"the least that keeps training's {peak:.1f} GiB within {100 * share:.0f}% of "
            f"{plan.cluster.device.memory / GIB:.1f} GiB"
        ),
    )
    yield Reason(
        f"training.optimizer_offload={str(t.optimizer_offload).lower()}",
        _offload_rule(plan),
    )
    yield Reason(f"precision={t.precision}", PRECISION_RULES.get(t.precision, "model.dtype"))
    if t.threads:
        yield Reason(
            f"training.threads={t.threads}", _given(plan, "training.threads") or "the cores by the ranks of a node"
        )


def _engines_rule(plan: Plan, request: Request) -> str:
    g = plan.generation
    assert g is not None
    if plan.cluster.is_cpu:
        return "one a node"
    if g.gpus < plan.cluster.gpus and g.engines == request.workload.prompts:
        return "one a prompt: the completions of a prompt are made by one engine"
    return f"the devices by {g.replica_gpus * g.dp} an engine"


def _generation_reasons(plan: Plan, request: Request) -> Iterator[Reason]:
    g = plan.generation
    assert g is not None
    longest = request.workload.lengths(request.constants.length_sigma).longest
    yield Reason(
        f"generation.engines={g.engines}",
        _given(plan, "generation.engines") or _engines_rule(plan, request),
    )
    yield Reason(
        f"generation.tp={g.tp}",
        _given(plan, "generation.tp")
        or (
            f"fastest for {request.workload.share(g.engines, g.dp)} rollouts an engine, the longest about "
            f"{longest:.0f} tokens"
        ),
    )
    for key in ("pp", "dp", "ep"):
        yield Reason(
            f"generation.{key}={getattr(g, key)}", _given(plan, f"generation.{key}") or "fastest of those that fit"
        )
    if g.memory_fraction is not None:
        yield Reason(
            f"generation.memory_fraction={g.memory_fraction}",
            _given(plan, "generation.memory_fraction")
            or "all rollouts of an engine at full length, at most what "
            + ("the sleeping policy leaves" if plan.colocated else "vLLM should take of a GPU"),
        )
    yield Reason(
        f"generation.kv_cache_bytes={int(g.kv_cache_bytes)}",
        _given(plan, "generation.kv_cache_bytes")
        or f"{g.kv_cache_tokens} tokens; one sequence needs {request.workload.max_length}",
    )
    yield Reason(
        f"generation.max_concurrent={g.max_concurrent}",
        _given(plan, "generation.max_concurrent") or "all rollouts of an engine at once, up to 1024 (256 on a CPU)",
    )
