"""Whether a layout is valid for model, workload and cluster, and whether rlctl can run it. Rules of the model alone are
in `models/constraints.py`."""

from __future__ import annotations

from dataclasses import replace

from rlctl.config.parallel import ParallelSpec
from rlctl.models.constraints import (
    Problem,
    engine_problems,
    float8_problems,
    fsdp_problems,
    lone_problems,
    policy_problems,
)
from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.inputs.cluster import ClusterFacts
from rlctl.planner.inputs.request import Request, Workload


def training_problems(request: Request, choice: TrainingChoice, world: int | None = None) -> list[Problem]:
    """Return the backend's objections to a layout on `world` ranks (None: any number); empty: valid."""
    facts, workload, p, rows = request.facts, request.workload, choice.parallel, choice.micro_batch_tokens
    problems = []
    if world is not None and p.world_size != world:
        key = "training.dp" if world % p.model_size == 0 else "training.pp" if p.pp > 1 else "training.tp"
        reason = f"TP {p.tp} x PP {p.pp} x CP {p.cp} x DP {p.dp} makes {p.world_size:,} ranks, and there are {world:,}"
        problems.append(Problem(key, reason))
    problems += (fsdp_problems if choice.sharding == "full" else policy_problems)(facts, p)
    if facts.moe is None and p.etp == p.tp > 1:
        # It does no harm, but the planner chooses 1 for a dense model, so the user has set this value.
        problems.append(Problem("training.etp", "expert parallelism needs a model with experts"))
    if workload.lengths_differ and rows < workload.max_length:
        unit = "rollout" if workload.rollouts else "sequence"
        reason = f"{rows:,} is less than one {unit} of {workload.max_length:,} tokens (model.max_length)"
        problems.append(Problem("training.micro_batch_tokens", reason))
    rollouts = workload.samples // workload.optimizer_steps
    if rollouts < p.dp:
        problems.append(Problem("training.dp", f"{p.dp} ranks share {rollouts} rollouts of an optimizer step"))
    if p.cp > 1 and rows % (2 * p.cp):
        problems.append(Problem("training.cp", f"rows of {rows:,} tokens do not split into 2 x {p.cp} chunks"))
    if request.cluster.is_cpu and choice.precision in ("fp8", "fp4"):
        problems.append(Problem(f"megatron.{choice.precision}", f"{choice.precision} needs a GPU"))
    elif choice.precision == "fp8":
        problems += float8_problems(facts, p)
    return problems


def size_problem(facts: ModelFacts, key: str, value: int) -> Problem | None:
    """Return the rule that a single size breaks; None: none."""
    section, _, name = key.partition(".")
    if section == "generation":
        choice = replace(GenerationChoice(), **{name: value})
        problems = generation_problems(facts, choice, Workload(), 1 << 30)
    else:
        sizes: dict[str, int] = {"etp": 1, name: value}
        problems = lone_problems(facts, replace(ParallelSpec(), sequence_parallel=None, **sizes))
        problems = [problem for problem in problems if name != "vpp" or "need" not in problem.message]
    return next((problem for problem in problems if problem.key == key), None)


def generation_problems(facts: ModelFacts, choice: GenerationChoice, workload: Workload, devices: int) -> list[Problem]:
    """Return what vLLM would refuse of these engines on `devices` devices; empty: they are valid."""
    problems = []
    if choice.gpus > devices:
        reason = f"{choice.engines} engines of {choice.gpus // choice.engines} need more than {devices} devices"
        problems.append(Problem("generation.engines", reason))
    problems += engine_problems(facts, choice.tp, choice.pp, choice.dp, choice.ep)
    if choice.max_batched_tokens < choice.max_concurrent:
        reason = (
            f"{choice.max_batched_tokens:,} tokens a pass are fewer than the {choice.max_concurrent:,} sequences run "
            "at once (generation.max_concurrent)"
        )
        problems.append(Problem("generation.max_batched_tokens", reason))
    return problems


def not_runnable(
    training: TrainingChoice | None, generation: GenerationChoice | None, cluster: ClusterFacts
) -> list[str]:
    """Return the parts of a valid plan that rlctl cannot run yet, by key; empty: it runs."""
    reasons = []
    if training is not None and training.precision == "fp4":
        reasons.append("megatron.fp4: `train` runs float32, bfloat16 and float8")
    if generation is not None and not cluster.is_cpu:
        size, node = generation.replica_gpus, cluster.gpus_per_node
        if size > node and size % node:
            key = "generation.pp" if generation.pp > 1 else "generation.tp"
            sizes = f"engines of TP x PP = {size} do not fill nodes of {node} GPUs, and vLLM takes as many of each"
            reasons.append(f"{key} = {getattr(generation, key[-2:])}: {sizes}")
    return reasons
