"""Validity rules of Megatron-Core and vLLM, checked before anything starts: each names the key and the nearest
value."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.cluster import ClusterFacts
from rlctl.planner.stages import stage_layers
from rlctl.planner.workload import Workload


@dataclass(frozen=True)
class Problem:
    """A rule that a choice breaks."""

    key: str
    """The configuration key to blame, for example `training.tp`."""
    message: str
    over: float = math.inf
    """Memory needed over memory there is; infinite where the rule is about something else."""


def _shares_heads(kv_heads: int, tp: int) -> bool:
    """KV heads are split, or repeated where there are fewer than ranks."""
    return kv_heads % tp == 0 or tp % kv_heads == 0


def training_problems(
    facts: ModelFacts, choice: TrainingChoice, workload: Workload, cluster: ClusterFacts, world: int
) -> list[Problem]:
    """What Megatron-Core would refuse (or compute wrongly) of this layout on `world` ranks; empty: valid."""
    found = [*_mesh_problems(choice, world), *_tensor_problems(facts, choice), *_pipeline_problems(facts, choice)]
    if facts.moe is not None or choice.ep > 1 or choice.etp > 1:
        found += _expert_problems(facts, choice)
    if workload.rollouts and choice.micro_batch_tokens < workload.max_length:
        found.append(
            Problem(
                "training.micro_batch_tokens",
                f"{choice.micro_batch_tokens} is less than one rollout of {workload.max_length} tokens "
                "(model.max_length)",
            )
        )
    if workload.samples // workload.optimizer_steps < choice.dp:
        found.append(
            Problem(
                "training.dp",
                f"{choice.dp} ranks share {workload.samples // workload.optimizer_steps} rollouts of an optimizer step",
            )
        )
    if choice.cp > 1 and choice.micro_batch_tokens % (2 * choice.cp):
        found.append(
            Problem(
                "training.cp", f"rows of {choice.micro_batch_tokens} tokens do not split into 2 x {choice.cp} chunks"
            )
        )
    if cluster.is_cpu and choice.precision in ("fp8", "fp4"):
        found.append(Problem(f"megatron.{choice.precision}", f"{choice.precision} needs a GPU"))
    elif choice.precision == "fp8":
        found += _float8_problems(facts, choice)
    return found


def _mesh_problems(choice: TrainingChoice, world: int) -> list[Problem]:
    found = []
    if choice.world_size != world:
        product = choice.tp * choice.pp * choice.cp
        key = "training.dp" if world % product == 0 else "training.pp" if choice.pp > 1 else "training.tp"
        found.append(
            Problem(key, f"TP {choice.tp} x PP {choice.pp} x CP {choice.cp} x DP {choice.dp} is not the {world} ranks")
        )
    experts = choice.ep * choice.etp
    if (choice.tp * choice.cp * choice.dp) % experts:
        found.append(
            Problem(
                "training.ep",
                f"EP {choice.ep} x ETP {choice.etp} does not divide TP x CP x DP = {choice.tp * choice.cp * choice.dp}",
            )
        )
    if choice.sharding == "full" and choice.pp > 1:
        found.append(Problem("training.pp", "FSDP2 has no pipeline stages"))
    return found


def _tensor_problems(facts: ModelFacts, choice: TrainingChoice) -> list[Problem]:
    found = []
    if facts.heads % choice.tp:
        found.append(Problem("training.tp", f"{facts.heads} attention heads do not split over {choice.tp} ranks"))
    elif facts.mla is None and not _shares_heads(facts.kv_heads, choice.tp):
        found.append(Problem("training.tp", f"{facts.kv_heads} KV heads neither divide nor are divided by {choice.tp}"))
    if facts.intermediate % choice.tp:
        found.append(Problem("training.tp", f"MLP width {facts.intermediate} does not split over {choice.tp} ranks"))
    if choice.tp > 1 and facts.moe is not None and not choice.sequence_parallel:
        found.append(Problem("training.sequence_parallel", "experts with tensor parallelism need sequence parallelism"))
    if choice.sequence_parallel and choice.tp == 1:
        found.append(Problem("training.sequence_parallel", "sequence parallelism needs training.tp > 1"))
    return found


def _float8_problems(facts: ModelFacts, choice: TrainingChoice) -> list[Problem]:
    """Products in float8 take sides that are multiples of 16 (`assert_dim_for_fp8_exec` of TransformerEngine)."""
    sides = [
        ("training.tp", "hidden size", facts.hidden, 1),
        ("training.tp", "MLP width", facts.intermediate, choice.tp),
    ]
    if facts.mla is None:
        sides.append(("training.tp", "attention width", facts.heads * facts.head_dim, choice.tp))
    if facts.moe is not None:
        sides.append(("training.etp", "expert width", facts.moe.expert_intermediate, choice.etp))
    return [
        Problem(
            key if side % 16 == 0 else "megatron.fp8",
            f"float8 products take multiples of 16, and a rank has {side / ranks:g} of the {name} (megatron.fp8)",
        )
        for key, name, side, ranks in sides
        if side % (16 * ranks)
    ]


def _pipeline_problems(facts: ModelFacts, choice: TrainingChoice) -> list[Problem]:
    ends = (choice.first_stage_layers, choice.last_stage_layers)
    key = "training.first_stage_layers" if ends[0] is not None else "training.last_stage_layers"
    if choice.pp == 1:
        found = [Problem("training.vpp", "virtual stages need training.pp > 1")] if choice.vpp > 1 else []
        return found + ([Problem(key, f"{key} needs training.pp > 1")] if ends != (None, None) else [])
    if ends != (None, None):
        return _end_problems(facts, choice, key)
    if choice.pp * choice.vpp > facts.layers:
        key = "training.vpp" if choice.vpp > 1 else "training.pp"
        return [Problem(key, f"{facts.layers} layers are fewer than PP {choice.pp} x VPP {choice.vpp} stages")]
    if choice.vpp > 1 and facts.layers % (choice.pp * choice.vpp):
        return [Problem("training.vpp", f"{facts.layers} layers do not split into PP {choice.pp} x VPP {choice.vpp}")]
    if choice.vpp == 1 and stage_layers(facts.layers, choice.pp) is None:
        return [Problem("training.pp", f"{facts.layers} layers leave a stage of PP {choice.pp} empty")]
    return []


def _end_problems(facts: ModelFacts, choice: TrainingChoice, key: str) -> list[Problem]:
    """Where the first and the last stage are given."""
    first, last = choice.first_stage_layers, choice.last_stage_layers
    sizes = stage_layers(facts.layers, choice.pp, first, last)
    if sizes is None:
        given = [f"first {first}"] * (first is not None) + [f"last {last}"] * (last is not None)
        why = f"{facts.layers} layers with {' and '.join(given)} do not split evenly over the other stages of PP"
        return [Problem(key, f"{why} {choice.pp}")]
    uneven = next((size for size in sizes if size % choice.vpp), None)
    if uneven is not None:
        return [Problem("training.vpp", f"a stage of {uneven} layers does not split into {choice.vpp} virtual stages")]
    return []


def _expert_problems(facts: ModelFacts, choice: TrainingChoice) -> list[Problem]:
    if facts.moe is None:
        key = "training.ep" if choice.ep > 1 else "training.etp"
        return [Problem(key, "expert parallelism needs a model with experts")]
    found = []
    if facts.moe.experts % choice.ep:
        found.append(Problem("training.ep", f"{facts.moe.experts} experts do not split over {choice.ep} ranks"))
    if facts.moe.expert_intermediate % choice.etp:
        found.append(
            Problem("training.etp", f"expert width {facts.moe.expert_intermediate} does not split over {choice.etp}")
        )
    return found


def lone_problem(facts: ModelFacts, key: str, value: int) -> Problem | None:
    """The rule that one size breaks whatever the others are; None: none."""
    section, _, name = key.partition(".")
    if section == "generation":
        found = generation_problems(facts, replace(GenerationChoice(), **{name: value}), Workload(), 1 << 30)
    else:
        choice = replace(TrainingChoice(), **{name: value}, sequence_parallel=name == "tp" and value > 1)
        found = [*_tensor_problems(facts, choice), *_pipeline_problems(facts, choice)]
        found += _expert_problems(facts, choice) if name in ("ep", "etp") and value > 1 else []
        found = [problem for problem in found if name != "vpp" or "need" not in problem.message]
    return next((problem for problem in found if problem.key == key), None)


def generation_problems(facts: ModelFacts, choice: GenerationChoice, workload: Workload, devices: int) -> list[Problem]:
    """What vLLM would refuse of these engines on `devices` devices; empty: valid."""
    found = []
    if choice.gpus > devices:
        found.append(
            Problem(
                "generation.engines",
                f"{choice.engines} engines of {choice.gpus // choice.engines} need more than {devices} devices",
            )
        )
    if facts.heads % choice.tp:
        found.append(Problem("generation.tp", f"{facts.heads} attention heads do not split over {choice.tp} ranks"))
    elif facts.mla is None and not _shares_heads(facts.kv_heads, choice.tp):
        found.append(
            Problem("generation.tp", f"{facts.kv_heads} KV heads neither divide nor are divided by {choice.tp}")
        )
    width = facts.moe.expert_intermediate if facts.moe else facts.intermediate
    if choice.ep == 1 and width % choice.tp:
        found.append(Problem("generation.tp", f"MLP width {width} does not split over {choice.tp} ranks"))
    if choice.pp > facts.layers:
        found.append(Problem("generation.pp", f"{facts.layers} layers are fewer than {choice.pp} stages"))
    if choice.ep > 1 and facts.moe is None:
        found.append(Problem("generation.ep", "expert parallelism needs a model with experts"))
    elif choice.ep > 1 and choice.ep != choice.tp * choice.dp:
        found.append(Problem("generation.ep", f"expert parallelism spans TP x DP = {choice.tp * choice.dp}"))
    if choice.max_batched_tokens < choice.max_concurrent:
        found.append(
            Problem(
                "generation.max_batched_tokens",
                f"{choice.max_batched_tokens} tokens a pass are fewer than the {choice.max_concurrent} sequences run "
                "at once (generation.max_concurrent)",
            )
        )
    if choice.ep > 1 and facts.moe is not None and facts.moe.experts % choice.ep:
        found.append(Problem("generation.ep", f"{facts.moe.experts} experts do not split over {choice.ep} ranks"))
    return found


def family_problem(family: str) -> str | None:
    """Why a model family cannot be trained; None: it has a file in `models/`."""
    from rlctl.models.registry import FAMILIES

    return (
        None if family in FAMILIES else f"model.name: family {family} has no weight map yet; {', '.join(FAMILIES)} have"
    )


def not_runnable(
    training: TrainingChoice | None, generation: GenerationChoice | None, colocated: bool, backend: str
) -> list[str]:
    """What of a valid plan rlctl cannot run yet, by key; empty: it runs."""
    why = (
        [] if backend == "megatron" or training is None else [f"training.backend = {backend}: only megatron trains yet"]
    )
    if training is not None and training.precision == "fp4":
        why.append("megatron.fp4: `train` runs float32, bfloat16 and float8")
    for key in ("pp", "dp", "ep") if generation is not None else ():
        if getattr(generation, key) != 1:
            why.append(f"generation.{key} = {getattr(generation, key)}: not run yet; 1 is")
    if training is not None and not colocated:
        why.append("generation.colocated = false: `train` runs both engines on the same devices")
    return why
