"""Puts a plan together from chosen layouts: its memory, seconds and what else follows from them."""

from __future__ import annotations

from rlctl.planner import memory as mem
from rlctl.planner import search
from rlctl.planner import time as timing
from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.cluster import GIB
from rlctl.planner.generation import generation_memory, generation_time, weight_bytes
from rlctl.planner.refit import refit_time
from rlctl.planner.result import Plan
from rlctl.planner.search import Request
from rlctl.telemetry.phases import Phase


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
    policy = policy_asleep(request, training.choice) if colocated else 0.0
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
        return mem.host_memory(
            request.facts, training.choice, request.cluster, colocated and generation is not None, weights
        )
    engine = 0.0
    if generation is not None:
        per_node = max(1, generation.engines // request.cluster.nodes) * generation.tp
        engine = per_node * generation_memory(request.facts, generation, request.cluster, 0.0, request.constants).total
    policy = max(1, training.choice.world_size // request.cluster.nodes) * training.peak.total if training else 0.0
    return policy + engine


def _seconds(
    request: Request, training: search.TrainingCandidate | None, generation: GenerationChoice | None, colocated: bool
) -> dict[Phase, float]:
    constants, cluster = request.constants, request.cluster
    seconds = dict.fromkeys(Phase, 0.0)
    if generation is not None:
        seconds[Phase.GENERATION] = generation_time(
            request.facts, generation, request.workload, cluster, constants
        ).total
    if training is None:
        return seconds
    seconds |= {Phase.TRAINING: training.seconds, Phase.LOGPROBS: training.logprobs}
    seconds[Phase.OTHER] = 0.1 if cluster.is_cpu else constants.other_s
    if generation is not None:
        seconds[Phase.REWARD] = 0.05 if cluster.is_cpu else constants.reward_s
        seconds[Phase.REFIT] = refit_time(
            request.facts, training.choice, generation, cluster, colocated, constants, mover=_mover(request, colocated)
        )
    return seconds


def _mfu(request: Request, training: search.TrainingCandidate) -> float:
    """Of the training phase, against the peak of the training precision."""
    frozen = training.choice.adapters is not None
    flops = timing.model_flops(request.facts, request.workload, request.constants, frozen=frozen)
    devices = training.choice.world_size if not request.cluster.is_cpu else request.cluster.nodes
    return flops / training.seconds / devices / request.cluster.device.flops(request.precision)


def policy_asleep(request: Request, choice: TrainingChoice) -> float:
    """What the offloaded policy's process keeps on the device: context, communicators, allocator."""
    if request.cluster.is_cpu:
        return 0.0
    return mem.runtime_bytes(request.cluster, choice, request.constants) + 0.5 * GIB
