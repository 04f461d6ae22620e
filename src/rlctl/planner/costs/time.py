"""Predicted seconds of training, log-probs and refits from operations, bytes and rates.

Communication volumes follow Narayanan et al. 2021 (arXiv:2104.04473) and Korthikanti et al. 2022 (arXiv:2205.05198).
Refits send boxes directly from the nearest replica.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.costs.adapters import adapter_elements, trained_parameters
from rlctl.planner.costs.engines import group_rate, kept_base_bytes, weight_bytes
from rlctl.planner.costs.memory import (
    element_bytes,
    layer_activation_bytes,
    master_and_moments,
    most_weight_bytes,
    optimizer_bytes,
    unadapted_bytes,
    waiting_adapter_bytes,
)
from rlctl.planner.costs.parameters import (
    RankParameters,
    Stage,
    attended,
    count,
    distinct_stages,
    hidden_sizes,
    layer_sizes,
    rank_parameters,
    score_width,
    stages,
)
from rlctl.planner.costs.vision_tower import image_share, tower_operations
from rlctl.planner.inputs.cluster import ClusterFacts
from rlctl.planner.inputs.request import Request
from rlctl.transport.available import transport_facts
from rlctl.transport.facts import Rates

CPU_MATMUL_EFFICIENCY = 0.65
"""Share of the CPU's matmul rate in a training step with packed rows (120 of 178 GFLOP/s on two AVX2 cores)."""
CPU_LAYER_S = 0.005
"""Time of one layer's forward pass on a CPU next to products and memory traffic: some sixty operations of torch, whose
threads meet after each (models of 8, 12 and 30 layers on two cores)."""
CPU_LOGIT_S = 1.1e-8
"""Core time of a logit's softmax, gathering and entropy in a forward pass (the same runs)."""
CPU_ADDED = 1.08
"""Time of a CPU's training products that adapters are added to, of those with merged weights (SmolLM2-135M in bfloat16,
rank 16: a step takes 0.5 CPU seconds more than with `delta`, although its refit takes 0.3 s less)."""
CPU_MERGED_BYTES_PER_S = 1.1e9
"""Bytes of a base to which a CPU adds adapters in a second (SmolLM2-135M, rank 16)."""
PASSES = {"none": 3.0, "selective": 3.15, "full": 4.0}
"""Training pass of a micro-batch in forward passes, by recomputation."""


@dataclass(frozen=True)
class MicroBatchTime:
    """Forward seconds of a micro-batch on the slowest stage, by part."""

    compute: float
    tensor: float
    expert: float
    context: float
    host: float
    """Kernel launch time of the host, beside the device's work."""
    matmul: float = 0.0
    """The part of `compute` that multiplies with weights."""
    exposed: float = 0.0
    """Share of the shorter of the host's and the device's times that the longer does not hide."""

    @property
    def device(self) -> float:
        """Seconds of compute and communication on the device."""
        return self.compute + self.tensor + self.expert + self.context

    @property
    def total(self) -> float:
        return max(self.device, self.host) + self.exposed * min(self.device, self.host)


@dataclass(frozen=True)
class TrainingTime:
    """Seconds of a step's training."""

    forward: MicroBatchTime
    compute: float
    """All micro-batches of the step on one stage."""
    bubble: float
    data: float
    """Gradient reduction and parameter gathering that is not hidden."""
    optimizer: float
    onload: float
    """Optimizer states back from host memory, where phases share the devices."""

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.data + self.optimizer + self.onload


def micro_batches(request: Request, choice: TrainingChoice) -> tuple[int, float]:
    """(micro-batches of one optimizer step on one data-parallel rank, tokens in each, all context ranks together)."""
    workload, constants = request.workload, request.constants
    sequences = math.ceil(workload.samples / workload.optimizer_steps / choice.parallel.dp)
    if workload.lengths_differ:
        tokens = workload.trained_tokens(constants.length_sigma) * constants.step_imbalance
        tokens *= 1 + constants.dynamic_padding * workload.dynamic
        tokens /= workload.optimizer_steps * choice.parallel.dp
        if not (workload.packing or workload.dynamic):  # each has a row of its length
            return sequences, tokens / sequences
        number = max(1, math.ceil(tokens / (choice.micro_batch_tokens * constants.packing_fill)))
        fill = constants.packing_fill if number > 1 else 1
        return number, min(tokens / number, float(choice.micro_batch_tokens)) / fill
    rows = max(1, choice.micro_batch_tokens // workload.max_length)
    return max(1, math.ceil(sequences / rows)), float(rows * workload.max_length)


def forward_time(request: Request, choice: TrainingChoice, tokens: float) -> MicroBatchTime:
    times = [_stage_forward(request, stage, choice, tokens) for stage in distinct_stages(request.facts, choice)]
    return max(times, key=lambda time: time.total)


def _stage_forward(request: Request, stage: Stage, choice: TrainingChoice, tokens: float) -> MicroBatchTime:
    facts, cluster, constants, p = request.facts, request.cluster, request.constants, choice.parallel
    local = tokens / p.cp
    dense_sizes, moe_sizes = layer_sizes(facts)
    dense_flops = stage.dense_layers * dense_sizes.total
    expert_flops = 0.0
    if moe_sizes is not None and facts.moe is not None:
        dense_flops += stage.moe_layers * moe_sizes.dense
        expert_flops = stage.moe_layers * moe_sizes.experts * facts.moe.experts_per_token / facts.moe.experts
    predicted = request.workload.predicted_share(constants.length_sigma)
    head_flops = facts.vocab * facts.hidden * predicted if stage.head else 0.0
    rate = matmul_rate(request, choice, local)
    seconds = 2 * local * (dense_flops + head_flops) / p.tp / rate
    if stage.embedding:  # every tensor-parallel rank computes the tower
        share = image_share(facts, request.workload, constants.length_sigma)
        seconds += local * share * tower_operations(facts) / rate
    if expert_flops and facts.moe is not None:
        routed = local / p.tp * (constants.expert_imbalance if p.ep > 1 else 1.0)
        seconds += 2 * routed * expert_flops / expert_rate(request, choice, local)
    if choice.adapters is not None:
        narrow = rate if cluster.is_cpu else _shaped(request, choice, choice.adapters.rank, local)
        trained = trained_parameters(facts, stage, choice)
        seconds += 2 * local * (trained.total - trained.tables) / narrow
        seconds *= CPU_ADDED if cluster.is_cpu and choice.adapters.adds else 1.0
    matmul = seconds
    keys = attended(facts, request.workload.mean_keys(constants.length_sigma))
    attention = 2 * local * stage.layers * score_width(facts) * keys / p.tp
    efficiency = CPU_MATMUL_EFFICIENCY / 3 if cluster.is_cpu else constants.attention_efficiency
    attention /= _peak(request, choice, "bf16") * efficiency
    if cluster.is_cpu and stage.head and not choice.valued:
        seconds += local * predicted * facts.vocab / p.tp * CPU_LOGIT_S / _cores(request, choice)
    whole = replace(choice, recompute="none", precision=choice.precision if cluster.is_cpu else "bf16")
    # Memory traffic of norms, RoPE, activation functions and casts.
    moved = stage.dense_layers * layer_activation_bytes(facts, whole, False, constants)
    if facts.moe is not None:
        moved += stage.moe_layers * layer_activation_bytes(facts, whole, True, constants)
    moved *= constants.traffic
    if stage.head and not choice.valued and not cluster.is_cpu:
        moved += constants.logit_traffic_bytes * facts.vocab * predicted / p.tp
    sharing = _ranks_of_node(request, choice) if cluster.is_cpu else 1  # of the bus of a node
    seconds += local * moved * sharing / (cluster.device.memory_bandwidth * constants.hbm_efficiency)
    slowdown = constants.own_layers_slowdown if request.own_layers and not (cluster.is_cpu or request.fsdp) else 1.0
    seconds, attention, matmul = seconds * slowdown, attention * slowdown, matmul * slowdown
    return MicroBatchTime(
        compute=seconds + attention,
        tensor=(1 - constants.tensor_overlap) * _tensor_seconds(request, stage, choice, local),
        expert=(1 - constants.expert_overlap) * _expert_seconds(request, stage, choice, local),
        context=max(0.0, _context_seconds(request, stage, choice, tokens) - attention),
        host=_host_seconds(request, stage, choice),
        matmul=matmul,
        exposed=1.0 if cluster.is_cpu else constants.host_exposed,  # the same processor does both
    )


def _host_seconds(request: Request, stage: Stage, choice: TrainingChoice) -> float:
    facts, cluster, constants, p = request.facts, request.cluster, request.constants, choice.parallel
    if cluster.is_cpu:
        return stage.layers * CPU_LAYER_S / min(1.0, _cores(request, choice))
    layers = stage.layers * constants.layer_host_s
    if facts.moe is not None:
        experts = 0.0 if choice.grouped_experts else facts.moe.experts / p.ep * constants.expert_host_s
        layers += stage.moe_layers * (constants.moe_layer_host_s + experts)
    if p.cp > 1 and request.workload.lengths_differ:
        far = p.tp * p.cp > max(1, cluster.link_domain)  # inside, the exchange is hidden
        layers += stage.layers * p.cp * constants.context_step_s * far
    return cluster.device.host_factor * (layers + constants.micro_batch_host_s)


def _ranks_of_node(request: Request, choice: TrainingChoice) -> int:
    return -(-choice.parallel.world_size // request.cluster.nodes)


def _cores(request: Request, choice: TrainingChoice) -> float:
    """Return the cores of a CPU that a rank has, below 1 where several share one."""
    cores = request.cluster.device.cores
    return min(choice.threads or cores, cores / _ranks_of_node(request, choice), cores)


def _peak(request: Request, choice: TrainingChoice, precision: str) -> float:
    device = request.cluster.device
    if not device.is_cpu:
        return device.flops(precision)
    return device.flops("float32") * _cores(request, choice) / device.cores


def matmul_rate(request: Request, choice: TrainingChoice, tokens: float) -> float:
    """Floating-point operations a second of one rank in the dense matrices."""
    facts = request.facts
    if request.cluster.is_cpu:
        return _peak(request, choice, "float32") * CPU_MATMUL_EFFICIENCY
    width = max(facts.intermediate if facts.moe is None else facts.hidden, 1) / choice.parallel.tp
    return _shaped(request, choice, width, tokens)


def expert_rate(request: Request, choice: TrainingChoice, tokens: float) -> float:
    """The same in the experts, whose matrices are narrow and see few tokens each."""
    p, moe = choice.parallel, request.facts.moe
    assert moe is not None
    if request.cluster.is_cpu:
        return _peak(request, choice, "float32") * CPU_MATMUL_EFFICIENCY / 2
    rows = tokens / p.tp * moe.experts_per_token * p.ep * p.etp / moe.experts
    return _shaped(request, choice, moe.expert_intermediate / p.etp, rows)


def _shaped(request: Request, choice: TrainingChoice, width: float, rows: float) -> float:
    constants = request.constants
    scaled = {"fp8": constants.fp8_efficiency, "fp4": constants.fp4_efficiency}
    efficiency = scaled.get(choice.precision, constants.matmul_efficiency)
    shape = width / (width + constants.half_width) * rows / (rows + constants.half_tokens)
    return request.cluster.device.flops(choice.precision) * efficiency * shape


def _tensor_seconds(request: Request, stage: Stage, choice: TrainingChoice, tokens: float) -> float:
    """Two all-reduces a layer (or the all-gathers and reduce-scatters of sequence parallelism: the same bytes)."""
    facts, tp = request.facts, choice.parallel.tp
    if tp == 1:
        return 0.0
    volume = 4 * (tp - 1) / tp * tokens * facts.hidden * element_bytes(choice)
    moe_share = 0.5 if facts.moe is not None and choice.parallel.etp == 1 else 1.0
    layers = stage.dense_layers + stage.moe_layers * moe_share
    latency = 4 * 3e-5 * stage.layers
    return layers * volume / (request.cluster.bandwidth(tp) * request.constants.link_efficiency) + latency


def _expert_seconds(request: Request, stage: Stage, choice: TrainingChoice, tokens: float) -> float:
    """Dispatch and combine all-to-all of each layer with experts."""
    facts, cluster, constants = request.facts, request.cluster, request.constants
    if facts.moe is None or choice.parallel.ep == 1:
        return 0.0
    span = choice.parallel.ep * choice.parallel.etp
    element = 1.5 if choice.precision in ("fp8", "fp4") else 2  # FP8 dispatch, BF16 combine
    one_copy = 2 * tokens / choice.parallel.tp * facts.hidden * element * constants.expert_imbalance
    copies = facts.moe.experts_per_token
    inside = max(1, cluster.link_domain)
    if span <= inside:
        volume = one_copy * copies * (span - 1) / span / (cluster.bandwidth(span) * constants.link_efficiency)
    else:
        nodes = span / inside
        remote = copies * (nodes - 1) / nodes
        if choice.dispatcher == "flex":  # each token crosses the network once a node
            remote = (nodes - 1) * (1 - (1 - 1 / nodes) ** copies)
        volume = one_copy * remote / (cluster.device.network * constants.network_efficiency)
    return stage.moe_layers * (volume + 4e-5)


def _context_seconds(request: Request, stage: Stage, choice: TrainingChoice, tokens: float) -> float:
    facts, tp, cp = request.facts, choice.parallel.tp, choice.parallel.cp
    if cp == 1:
        return 0.0
    volume = (cp - 1) / cp * tokens * (2 * facts.kv_heads * facts.head_dim / tp) * 2 * stage.layers
    return volume / (request.cluster.bandwidth(tp * cp) * request.constants.link_efficiency)


def training_time(request: Request, choice: TrainingChoice, colocated: bool = True) -> TrainingTime:
    """The training phase of a step: all its optimizer steps."""
    number, tokens = micro_batches(request, choice)
    forward = forward_time(request, choice, tokens)
    # Frozen weights need no gradient: of a backward pass's two multiplications with each one is left.
    micro = forward.total * PASSES[choice.recompute] - (forward.matmul if choice.adapters else 0.0)
    bubble = (choice.parallel.pp - 1) / choice.parallel.vpp * micro
    data, optimizer = _data_seconds(request, choice, micro, number)
    steps = request.workload.optimizer_steps * request.workload.epochs
    onload = offload_seconds(request, choice) if colocated and request.workload.rollouts else 0.0
    return TrainingTime(forward, steps * (number * micro), steps * bubble, steps * data, steps * optimizer, onload)


def _most_trained(request: Request, choice: TrainingChoice) -> RankParameters:
    counts = (trained_parameters(request.facts, stage, choice) for stage in stages(request.facts, choice))
    return max(counts, key=lambda params: params.total)


def _data_seconds(request: Request, choice: TrainingChoice, micro: float, number: int) -> tuple[float, float]:
    """(exposed gradient and parameter communication, update) seconds of a step of `number` micro-batches of `micro`
    seconds."""
    cluster, constants, parallel = request.cluster, request.constants, choice.parallel
    params, ranks = _most_trained(request, choice), parallel.dp * parallel.cp
    gradient = 4 if choice.precision == "float32" else choice.gradient_bytes
    owned = params.owned(parallel)
    if choice.sharding == "full":
        exposed = _sharded_seconds(request, choice, micro, number)
    else:
        shared = params.dense * (ranks - 1) / ranks + params.experts * (1 - 1 / parallel.expert_dp)
        moved = shared * (gradient + element_bytes(choice))
        exposed = (1 - constants.data_overlap) * moved / group_rate(request, parallel.tp, ranks)
    update = owned * 28 / (cluster.device.memory_bandwidth * constants.hbm_efficiency)
    update += _muon_seconds(request, choice)
    through_host = 2.0 * optimizer_bytes(params, choice) if choice.optimizer_offload else 0.0
    through_host += unadapted_bytes(request.facts, choice)
    update += through_host / (cluster.device.host_link * constants.pinned_copy)
    update += unadapted_bytes(request.facts, choice) / CPU_MERGED_BYTES_PER_S if cluster.is_cpu else 0.0
    return exposed, update + (0.0 if cluster.is_cpu else constants.optimizer_step_s)


def _muon_seconds(request: Request, choice: TrainingChoice) -> float:
    """Return seconds of Newton-Schulz steps on the rank with the most work, and of sending matrices to these ranks and
    back."""
    if not choice.muon_steps:
        return 0.0
    facts, p = request.facts, choice.parallel
    ranks, seconds = p.world_size // p.pp, 0.0
    for stage in distinct_stages(facts, choice):
        dense, moe = hidden_sizes(facts, False), hidden_sizes(facts, True)
        work = (stage.dense_layers * dense.cost + stage.moe_layers * moe.cost) / ranks
        work = max(work, dense.largest * (stage.dense_layers > 0), moe.largest * (stage.moe_layers > 0))
        if request.cluster.is_cpu:
            rate = _peak(request, choice, "float32") * CPU_MATMUL_EFFICIENCY
        else:
            precision = "float32" if choice.precision == "float32" else "bf16"
            rate = request.cluster.device.flops(precision) * request.constants.matmul_efficiency
        in_dense, in_experts = trained_parameters(facts, stage, choice).hidden
        moved = in_dense / (p.dp * p.cp) * (1 - 1 / ranks)
        moved += in_experts / p.expert_dp * (1 - 1 / (p.etp * p.expert_dp))
        exchange = 2 * element_bytes(choice) * moved * p.replicate / group_rate(request, 1, ranks)
        seconds = max(seconds, 2 * choice.muon_steps * work / rate + exchange)
    return seconds


def _sharded_seconds(request: Request, choice: TrainingChoice, micro: float, number: int) -> float:
    """Exposed seconds of FSDP2's communication per step. Each micro-batch gathers weights twice and reduces float32
    gradients; copies (`training.replicate`) reduce once."""
    constants, parallel = request.constants, choice.parallel
    gathers = _gather_seconds(request, choice)
    trained = trained_parameters(request.facts, stages(request.facts, choice)[0], choice)
    sums = 4 * _shards(choice, trained) / group_rate(request, parallel.tp, parallel.fsdp_shards)
    forward = micro / PASSES[choice.recompute]
    exposed = gathers - min(constants.gather_overlap * gathers, forward)
    exposed += (gathers + sums) - min(constants.backward_overlap * (gathers + sums), micro - forward)
    copies = parallel.replicate
    rate = group_rate(request, parallel.tp * parallel.fsdp_shards, copies)
    return number * exposed + 2 * 4 * trained.owned(parallel) * (1 - 1 / copies) / rate


def _shards(choice: TrainingChoice, params: RankParameters) -> float:
    shards = choice.parallel.fsdp_shards
    return params.dense * (1 - 1 / shards) + params.experts * (1 - min(1.0, choice.parallel.ep / shards))


def _gather_seconds(request: Request, choice: TrainingChoice) -> float:
    params = rank_parameters(request.facts, stages(request.facts, choice)[0], choice)
    rate = group_rate(request, choice.parallel.tp, choice.parallel.fsdp_shards)
    return element_bytes(choice) * _shards(choice, params) / rate


def state_traffic(choice: TrainingChoice) -> int:
    """Bytes of a parameter's optimizer states that cross the host link in an update: to the device and back."""
    return 2 * master_and_moments(choice) if choice.optimizer_offload else 0


def offload_seconds(request: Request, choice: TrainingChoice) -> float:
    """Optimizer states from device to host memory or back."""
    if choice.optimizer_offload:
        return 0.0
    return _pinned_seconds(request, optimizer_bytes(_most_trained(request, choice), choice))


def _pinned_seconds(request: Request, moved: float) -> float:
    """Seconds of bytes between a device and pinned host memory (rlctl's `HostMemory`, vLLM's sleep mode)."""
    device = request.cluster.device
    return 0.0 if device.is_cpu else moved / (device.host_link * request.constants.pinned_copy)


def logprobs_time(request: Request, choice: TrainingChoice, passes: int | None = None) -> float:
    """Return seconds of the log-prob phase. `passes` None: old policy and reference, as needed."""
    workload = request.workload
    if passes is None:
        passes = int(workload.old_logprobs) + int(workload.reference) + int(workload.own_teacher)
    if not passes or not workload.lengths_differ:
        return 0.0
    number, tokens = micro_batches(request, choice)
    seconds = forward = forward_time(request, choice, tokens).total
    if choice.sharding == "full":
        gathers = _gather_seconds(request, choice)
        seconds += gathers - min(request.constants.gather_overlap * gathers, forward)
    fixed = 0.0 if request.cluster.is_cpu else 1.0
    if choice.reference_offload:  # both models cross the link, before and after
        copied = most_weight_bytes(request.facts, choice)
        fixed += 4 * copied / (request.cluster.device.host_link * request.constants.pinned_copy)
    return passes * (number * workload.optimizer_steps + choice.parallel.pp - 1) * seconds + fixed


def critic_time(request: Request, choice: TrainingChoice, colocated: bool = True) -> float:
    """Return seconds of the critic's phase: values and training. Host transfers: both models both ways if they
    alternate, the critic if it shares with engines; 0 without a critic."""
    if not choice.critic:
        return 0.0
    values, training = logprobs_time(request, choice, passes=1), training_time(request, choice, False).total
    device = request.cluster.device
    if device.is_cpu or not (colocated and request.workload.rollouts):
        return values + training
    states = offload_seconds(request, choice)
    weights = _pinned_seconds(request, most_weight_bytes(request.facts, choice))
    return values + training + (4 if choice.critic_offload else 2) * (states + weights)


def model_flops(request: Request, frozen: bool = False) -> float:
    """Operations of a step's training without recomputation, for MFU. `frozen`: only adapters train."""
    facts, workload, sigma = request.facts, request.workload, request.constants.length_sigma
    keys = attended(facts, workload.mean_keys(sigma))
    per_token = (4 if frozen else 6) * count(facts).active + 6 * facts.layers * score_width(facts) * keys
    return per_token * workload.trained_tokens(sigma)


def tensor_count(facts: ModelFacts) -> int:
    """Tensors of the published checkpoint, about."""
    dense, moe = 9 + 3 * facts.qkv_bias + 2 * facts.qk_norm, 3 * facts.moe.experts + 1 if facts.moe else 0
    moe_layers = sum(facts.is_moe_layer(layer) for layer in range(facts.layers))
    return facts.layers * dense + moe_layers * moe + 3


def remote_share(choice: TrainingChoice, cluster: ClusterFacts, colocated: bool) -> float:
    """Share of a worker's weights that no device of its node holds."""
    node = cluster.near_devices
    if cluster.gpus <= node:
        return 0.0
    if not colocated:
        return 1.0
    parallel = choice.parallel
    once = parallel.pp * max(parallel.tp, parallel.expert_size)  # devices that hold the model once
    if choice.sharding == "full":
        once = parallel.tp * parallel.fsdp_shards
    return max(0.0, 1 - node / once)


def _adapter_bytes(facts: ModelFacts, choice: TrainingChoice) -> float:
    assert choice.adapters is not None
    return adapter_elements(facts, choice.adapters) * element_bytes(choice)


def change_time(request: Request, choice: TrainingChoice) -> float:
    """Return seconds of a step in which adapters of several runs change places in the policy: one's weights and states
    leave for host memory, another's come back and are merged. 0 for one adapter."""
    facts, cluster, device = request.facts, request.cluster, request.cluster.device
    if choice.adapters is None or choice.adapters.held == 1:
        return 0.0
    rate = device.memory_bandwidth / 2 if cluster.is_cpu else device.host_link * request.constants.pageable_copy
    moved = 2 * waiting_adapter_bytes(facts, choice) / rate
    merged_rate = CPU_MERGED_BYTES_PER_S if cluster.is_cpu else device.host_link * request.constants.pinned_copy
    return moved + unadapted_bytes(facts, choice) / merged_rate


def refit_time(
    request: Request, choice: TrainingChoice, generation: GenerationChoice, colocated: bool, mover: str | None = None
) -> float:
    """Return the sum of `refit_terms`."""
    return sum(refit_terms(request, choice, generation, colocated, mover).values())


def refit_terms(
    request: Request, choice: TrainingChoice, generation: GenerationChoice, colocated: bool, mover: str | None = None
) -> dict[str, float]:
    """Seconds to refit the engines by what takes them, offloading before and waking after included. `mover` None: the
    fastest there is."""
    facts, cluster, device, constants = request.facts, request.cluster, request.cluster.device, request.constants
    alone = choice.adapters is not None and choice.adapters.refit != "merged"
    payload = _adapter_bytes(facts, choice) if alone else count(facts).total * element_bytes(choice)
    host = math.inf if cluster.is_cpu else device.host_link * constants.pageable_copy
    detour = transport_facts(mover).detour_s(payload, Rates(constants.disk_bytes_per_s, host)) if mover else 0.0
    if cluster.is_cpu:
        far = payload / device.network if cluster.nodes > 1 and not colocated else 0.0
        # Measured: 0.8 to 1.6 GB/s through shared memory, 0.1 s of handshakes.
        # Adapters alone: 0.04 s, and the base to add them and pack the sums (benchmarks/RESULTS.md).
        merged_s = kept_base_bytes(request, generation) / CPU_MERGED_BYTES_PER_S
        return {"handshakes": 0.04 if alone else 0.1, "copies": detour + far + payload / 1.35e9 + merged_s}
    received = payload if alone else weight_bytes(facts, generation)
    # The base is read, widened, added to, and narrowed: ten times its bytes.
    detour += 10 * kept_base_bytes(request, generation) / device.memory_bandwidth
    if generation.matrix_bytes <= 1 and element_bytes(choice) > 1:  # the engine makes float8 blocks of each matrix
        detour += tensor_count(facts) * constants.refit_quantize_s
    far = remote_share(choice, cluster, colocated) * received
    moved = far / (device.network * constants.refit_link_efficiency)
    moved += (received - far) / (device.link * constants.refit_link_efficiency)
    terms = {"links": moved, "other copies": detour}
    if not colocated:
        return terms | {
            "handshakes": constants.refit_handshake_s, "boxes": tensor_count(facts) * constants.refit_piece_s
        }  # fmt: skip
    # Into and out of the staging buffer: two reads and two writes.
    terms["other copies"] += 4 * received / (device.memory_bandwidth * constants.hbm_efficiency)
    return {
        "offloading": offload_seconds(request, choice),
        "waking": 0.0 if request.discards else _pinned_seconds(request, weight_bytes(facts, generation)),
        "handshakes": constants.refit_fixed_s,
        "boxes": handed_boxes(facts, choice, generation) * constants.refit_piece_s,
    } | terms


def handed_boxes(facts: ModelFacts, choice: TrainingChoice, generation: GenerationChoice) -> float:
    """Return the most copies that a policy rank launches in a refit on shared devices: into messages for other ranks,
    out of messages from other ranks, and from its own weights into the staging buffer of its device's engine worker."""
    parallel, experts = choice.parallel, 3 * facts.moe.experts if facts.moe else 0
    experts *= sum(facts.is_moe_layer(layer) for layer in range(facts.layers))
    split, split_experts = (max(1, tp // generation.tp) for tp in (parallel.tp, parallel.etp))
    return 3 * ((tensor_count(facts) - experts) * split + experts * split_experts)
