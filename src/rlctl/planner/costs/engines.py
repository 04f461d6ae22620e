"""vLLM engines: memory, KV cache capacity, and time of a batch of rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import GenerationChoice
from rlctl.planner.costs.adapters import adapted_matrices
from rlctl.planner.costs.memory import PhaseMemory, graph_bytes
from rlctl.planner.costs.parameters import attended, count, kv_bytes_per_token
from rlctl.planner.costs.vision_tower import encoder_cache_bytes, tower_operations
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.inputs.constants import DEFAULTS, Constants
from rlctl.planner.inputs.request import Lengths, Request
from rlctl.weights.vllm import ENDS_EVERYWHERE

CPU_DECODE_EFFICIENCY = 0.42
"""Share of the processor's matmul rate that vLLM reaches (31, 135 and 145 million parameters on two AVX2 cores)."""
CPU_DECODE_LAYER_S, CPU_DECODE_SEQUENCE_S = 0.0003, 0.00015
"""Time of a layer in a decode step, and the part for each sequence (the same runs: 5 ms with 32 sequences)."""
CPU_ADDED_PRODUCTS = 1.06
"""Time of a CPU engine's products that adapters are added to, of those alone (rank 16, 8 to 256 tokens)."""
CPU_REDUCE_S = 3e-3
"""One all-reduce between two hosts over gloo (hosts that share two cores: 12 to 20 ms for five collectives)."""
CPU_ENGINE_BYTES = 0.7 * GIB
"""An engine's buffers in addition to weights and KV cache on a CPU."""


def weight_bytes(facts: ModelFacts, choice: GenerationChoice) -> float:
    """Weights on the device that holds most: of the largest pipeline stage, with the embeddings that stand there."""
    parts, most = count(facts), -(-facts.layers // choice.pp) / facts.layers
    both = choice.pp == 1 or facts.tied_embeddings or facts.family in ENDS_EVERYWHERE
    ends = parts.embedding + parts.head if both else max(parts.embedding, parts.head)
    return most * _layers_bytes(facts, choice) + choice.weight_bytes * (ends / choice.tp + parts.seeing)


def _layers_bytes(facts: ModelFacts, choice: GenerationChoice) -> float:
    """Return bytes of layer weights on a device of a stage. Experts are split by TP x DP or spread over `ep`; MTP
    layers are not loaded."""
    parts = count(facts)
    dense = (parts.layers - parts.experts) / choice.tp
    if facts.mla is not None:
        mla = facts.mla
        replicated = facts.layers * facts.hidden * ((mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim)
        dense += replicated * (1 - 1 / choice.tp)
    return choice.matrix_bytes * (dense + parts.experts / (choice.tp * choice.dp))


def kept_base_bytes(request: Request, choice: GenerationChoice) -> float:
    """Return bytes of the second copy of adapted matrices that a device keeps with `training.lora.refit` = delta."""
    if request.adapters is None or request.adapters.refit != "delta":
        return 0.0
    return choice.matrix_bytes * adapted_matrices(request.facts, request.adapters, choice.tp) / choice.pp


def kv_bytes_per_token_on_device(facts: ModelFacts, choice: GenerationChoice) -> float:
    """KV cache bytes of one token on one device: heads are split or repeated by TP; MLA's latent is on every device."""
    share = 1.0 if facts.mla is not None else 1 / min(choice.tp, facts.kv_heads)
    return kv_bytes_per_token(facts, choice.cache_element_bytes) * share / choice.pp


def overhead_bytes(facts: ModelFacts, choice: GenerationChoice, constants: Constants = DEFAULTS) -> dict[str, float]:
    """Bytes of an engine on a GPU next to weights and KV cache; `activations`: the sampler's or a pass's, if larger."""
    sampler = constants.sampler_bytes * choice.max_concurrent * facts.vocab
    width = 2 * facts.intermediate / choice.tp + 4 * facts.hidden
    if facts.moe is not None:
        width = max(width, facts.moe.experts_per_token * (facts.moe.expert_intermediate * 2 / choice.tp + facts.hidden))
    forward = 2.0 * choice.max_batched_tokens * width
    return {
        "activations": max(sampler, forward) + encoder_cache_bytes(facts, choice.max_batched_tokens),
        "runtime": 0.13 * GIB + (0.42 * GIB if choice.replica_gpus > 1 else 0.0),
        "CUDA graphs": graph_bytes(facts) if choice.numbers.graphs else 0.0,
    }


def plan_kv(request: Request, choice: GenerationChoice) -> tuple[float, int]:
    """(bytes of KV cache on one device, tokens that one replica can hold); negative bytes: the engine does not fit."""
    facts, device = request.facts, request.cluster.device
    per_token = kv_bytes_per_token_on_device(facts, choice)
    if device.is_cpu:
        return choice.kv_cache_bytes, int(choice.kv_cache_bytes / (per_token * choice.engine_gpus))
    free = (choice.memory_fraction or 0.9) * device.memory
    free = free - weight_bytes(facts, choice) - sum(overhead_bytes(facts, choice, request.constants).values())
    free -= kept_base_bytes(request, choice)
    return free, max(0, int(free / per_token))


def generation_memory(request: Request, choice: GenerationChoice, policy_asleep: float) -> PhaseMemory:
    """Return the generation phase's memory on a device; `policy_asleep`: the offloaded policy's remainder."""
    facts, constants = request.facts, request.constants
    if request.cluster.is_cpu:
        parts = {"weights": weight_bytes(facts, choice), "KV": choice.kv_cache_bytes / choice.engine_gpus}
        parts |= {"base of adapters": kept} if (kept := kept_base_bytes(request, choice)) else {}
        return PhaseMemory(parts | {"engine": CPU_ENGINE_BYTES + constants.cpu_process_bytes})
    parts = {"weights": weight_bytes(facts, choice), "KV": choice.kv_cache_bytes}
    parts |= {"base of adapters": kept} if (kept := kept_base_bytes(request, choice)) else {}
    return PhaseMemory(parts | overhead_bytes(facts, choice, constants) | {"policy asleep": policy_asleep})


def group_rate(request: Request, apart: int, ranks: int) -> float:
    """Return bytes per second of each of `ranks` ranks in a collective. Across nodes, a ring uses the network device of
    each rank."""
    cluster, constants = request.cluster, request.constants
    inside = max(1, cluster.link_domain)
    link = cluster.bandwidth(1) * constants.link_efficiency
    if apart * ranks <= inside:
        return link
    return min(link, max(1, inside // apart) * cluster.bandwidth(apart * ranks) * constants.network_efficiency)


@dataclass(frozen=True)
class GenerationTime:
    """Seconds of a step's generation by part."""

    decode: float
    prefill: float
    steps: float
    """Decode steps of the busiest replica."""
    first_step: float
    last_step: float

    @property
    def total(self) -> float:
        return self.decode + self.prefill


Seconds = Callable[..., float]


def decode_step(request: Request, choice: GenerationChoice) -> Seconds:
    """Return a function (sequences, tokens of each) -> seconds of a decode step: the larger of reading and computing,
    plus latencies. A search asks it hundreds of times about one layout."""
    facts, cluster, constants = request.facts, request.cluster, request.constants
    if cluster.is_cpu:
        return _cpu_decode_step(request, choice)
    device, parts = cluster.device, count(facts)
    weights = _layers_bytes(facts, choice) / choice.pp
    weights += choice.weight_bytes * (parts.embedding + parts.head) / choice.tp / choice.pp
    experts = choice.matrix_bytes * parts.experts / (choice.tp * choice.dp) / choice.pp
    layer_s = (constants.decode_layer_s if choice.numbers.graphs else constants.eager_layer_s) * facts.layers
    if facts.moe is not None:
        layer_s += facts.layers * constants.moe_decode_layer_s
        unused = 1 - facts.moe.experts_per_token / facts.moe.experts
    cache_bytes = kv_bytes_per_token_on_device(facts, choice)
    bandwidth = device.memory_bandwidth * constants.decode_bandwidth_efficiency
    flops = device.flops("fp8" if choice.matrix_bytes <= 1 else "bf16") * constants.prefill_efficiency
    communication = communication_seconds(request, choice)
    network_s = constants.nodes_step_s * (cluster.nodes_of(choice.replica_gpus) > 1)
    replicas_s = constants.replica_step_s * (choice.dp - 1)

    def seconds(sequences: float, context: float) -> float:
        read = weights
        if facts.moe is not None:
            read -= experts * (1 - (1 - unused ** (sequences * choice.dp)))
        read = (read + sequences * attended(facts, context) * cache_bytes) / bandwidth
        compute = 2.0 * parts.active * sequences / choice.tp / choice.pp / flops
        host = constants.decode_step_s + constants.decode_sequence_s * sequences
        host += layer_s if not choice.numbers.graphs else 0.0
        fixed = device.host_factor * host + (layer_s if choice.numbers.graphs else 0.0)
        return choice.pp * max(read, compute) + (fixed + network_s + replicas_s) + communication(sequences)

    return seconds


def _cpu_decode_step(request: Request, choice: GenerationChoice) -> Seconds:
    facts, device, active = request.facts, request.cluster.device, count(request.facts).active
    together = _engines_together(request, choice)
    share = min(1 / together, (choice.threads or device.cores) / max(1, device.cores))
    flops = device.flops("float32") * share * CPU_DECODE_EFFICIENCY
    added = CPU_ADDED_PRODUCTS if request.adapters is not None and request.adapters.adds else 1.0
    communication = communication_seconds(request, choice)

    def seconds(sequences: float, context: float) -> float:
        compute = 2.0 * active * sequences / flops
        cache = sequences * context * kv_bytes_per_token(facts, choice.cache_element_bytes)
        read = choice.weight_bytes * active + cache
        layer = CPU_DECODE_LAYER_S + CPU_DECODE_SEQUENCE_S * sequences
        step = added * max(compute, together * read / device.memory_bandwidth) + facts.layers * layer + 0.004
        return step + communication(sequences)

    return seconds


def _engines_together(request: Request, choice: GenerationChoice) -> int:
    """Return the engines that share the cores of a node."""
    return max(1, choice.engines // request.cluster.nodes)


def communication_seconds(request: Request, choice: GenerationChoice) -> Seconds:
    """Return a function of the sequences: the seconds of a decode step's all-reduces (two per layer) or expert
    all-to-alls, and stage hand-overs. On a CPU only between hosts."""
    facts, cluster, constants = request.facts, request.cluster, request.constants
    if cluster.is_cpu:
        apart = cluster.nodes_of(choice.replica_gpus) > 1
        between_hosts = CPU_REDUCE_S * apart * (2 * facts.layers * (choice.tp > 1) + choice.pp - 1)
        return lambda sequences: between_hosts
    group, domain = choice.tp * choice.dp, cluster.link_domain
    latency = constants.allreduce_latency_s * (1 + 0.1 * max(0, min(group, domain) - 2) / 2)
    if group > max(1, domain):
        latency += constants.network_latency_s * math.log2(cluster.nodes_of(group))
    rate, stage_rate = group_rate(request, 1, group), cluster.bandwidth(choice.replica_gpus)

    def seconds(sequences: float) -> float:
        # An all-reduce sends everything twice; replicas gather each other's inputs, and scatter the sums.
        hidden = 2 * choice.dp * sequences * facts.hidden * 2
        reduces = 2 * facts.layers * (latency + hidden / rate) if group > 1 else 0.0
        states = 2 * sequences * facts.hidden * 2  # the hidden and the residual one
        return reduces + (choice.pp - 1) * (2e-4 + states / stage_rate)

    return seconds


def full_step(request: Request, choice: GenerationChoice) -> tuple[float, float]:
    """(seconds of a decode step with all concurrent sequences, the communication part of it)."""
    load = _load(request, choice)
    running = min(load.rollouts, load.capacity)
    return decode_step(request, choice)(running, load.context), communication_seconds(request, choice)(running)


@dataclass(frozen=True)
class _Load:
    """The work of the busiest replica of an engine."""

    rollouts: float
    lengths: Lengths
    context: float
    """Mean tokens of a sequence while it is sampled."""
    capacity: float
    """Sequences that run at once."""
    prefill: float
    """Seconds to process the prompts, which the rollouts of a prompt share."""


def _load(request: Request, choice: GenerationChoice, steps: int = 1) -> _Load:
    """Return the work of `steps` steps whose rollouts are sampled at the same time."""
    workload, cluster, constants = request.workload, request.cluster, request.constants
    rollouts = float(steps * workload.share(choice.of_run, choice.dp))
    lengths = workload.lengths(constants.length_sigma)
    context = workload.prompt_tokens + lengths.second_moment / lengths.mean / 2
    # Rollouts that start together reach their full lengths together; rollouts of several versions have all ages.
    grown = 0.5 if steps > 1 else constants.grown_together
    mean_tokens = workload.prompt_tokens + grown * lengths.second_moment / lengths.mean
    capacity = max(1.0, min(float(choice.max_concurrent), choice.kv_cache_tokens / max(1.0, mean_tokens)))
    tokens = rollouts * workload.prompt_tokens / max(1.0, min(workload.generations, rollouts))
    rate = cluster.device.flops("bf16") * constants.prefill_efficiency * choice.replica_gpus
    if cluster.is_cpu:
        rate = cluster.device.flops("float32") * CPU_DECODE_EFFICIENCY / _engines_together(request, choice)
    seeing = workload.image_share * tower_operations(request.facts)
    prefill = (2.0 * count(request.facts).active + seeing) * tokens / rate
    if choice.tp > max(1, cluster.link_domain) and not cluster.is_cpu:  # inside a node it is part of the efficiency
        volume = 4 * (choice.tp - 1) / choice.tp * tokens * request.facts.hidden * 2 * request.facts.layers / choice.pp
        prefill += volume / group_rate(request, 1, choice.tp)
    return _Load(rollouts, lengths, context, capacity, prefill)


def generation_time(request: Request, choice: GenerationChoice, steps: int = 1) -> GenerationTime:
    """Return seconds until the busiest replica finishes the rollouts of `steps` concurrent steps. The replica runs full
    while sequences wait; then the batch drains along the tail of lengths, at least one step per token."""
    load = _load(request, choice, steps)
    # steps run at the average batch size while the queue is not empty
    seconds = decoded = 0.0
    running = min(load.rollouts, load.capacity)
    step_seconds = decode_step(request, choice)
    first = step_seconds(running, load.context)
    if load.rollouts > load.capacity:
        waiting = (load.rollouts - load.capacity) * load.lengths.mean / load.capacity
        seconds, decoded = waiting * first, waiting
    reached, left = 0.0, 1.0
    step = first
    for length, share in load.lengths.buckets:
        context = request.workload.prompt_tokens + (reached + length) / 2
        step = step_seconds(max(1.0, running * left), context)
        seconds += (length - reached) * step
        reached, left = length, left - share
    return GenerationTime(seconds, load.prefill, decoded + reached, first, step)


def steady_generation_time(request: Request, choice: GenerationChoice) -> float:
    """Return seconds per step of rollouts that continue under new weights: steps in flight are sampled together and
    share the tail."""
    steps = request.workload.steps_under_way
    return generation_time(request, choice, steps).total / steps
