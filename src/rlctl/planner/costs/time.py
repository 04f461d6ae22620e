"""Predicted seconds of training, log-probs and refits, from operations, bytes and rates.

Communication volumes follow Narayanan et al. 2021 (arXiv:2104.04473) and Korthikanti et al. 2022 (arXiv:2205.05198).
In a refit trainers send boxes straight to the workers that need them, from the nearest replica.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.costs.generation import weight_bytes
from rlctl.planner.costs.memory import layer_activation_bytes, master_and_moments, most_weight_bytes
from rlctl.planner.costs.parameters import (
    Stage,
    attended,
    count,
    distinct_stages,
    layer_sizes,
    rank_parameters,
    score_width,
    stages,
    trained_parameters,
)
from rlctl.planner.inputs.cluster import ClusterFacts
from rlctl.planner.inputs.constants import DEFAULTS, Constants
from rlctl.planner.inputs.workload import Workload

CPU_MATMUL_EFFICIENCY = 0.65
"""Share of the processor's matmul rate, inside a training step with packed rows (120 of 178 GFLOP/s on two AVX2
cores)."""
PASSES = {"none": 3.0, "selective": 3.15, "full": 4.0}
"""Training pass of a micro-batch in forward passes, by recomputation."""


@dataclass(frozen=True)
class MicroBatchTime:
    """Seconds of one micro-batch on the slowest stage, by what they are spent on. Forward pass only."""

    compute: float
    tensor: float
    expert: float
    context: float
    host: float
    """Floor: time to launch the kernels."""
    matmul: float = 0.0
    """The part of `compute` that multiplies with weights."""

    @property
    def total(self) -> float:
        return max(self.compute + self.tensor + self.expert + self.context, self.host)


@dataclass(frozen=True)
class TrainingTime:
    """Seconds of a step's training."""

    micro_batches: int
    """Number for one optimizer step on one data-parallel rank."""
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


def micro_batches(choice: TrainingChoice, workload: Workload, constants: Constants = DEFAULTS) -> tuple[int, float]:
    """(micro-batches of one optimizer step on one data-parallel rank, tokens in each, all context ranks together)."""
    if workload.rollouts and (workload.packing or workload.dynamic):
        tokens = workload.trained_tokens(constants.length_sigma) * constants.step_imbalance
        tokens *= 1 + constants.dynamic_padding * workload.dynamic
        tokens /= workload.optimizer_steps * choice.parallel.dp
        number = max(1, math.ceil(tokens / (choice.micro_batch_tokens * constants.packing_fill)))
        fill = constants.packing_fill if number > 1 else 1
        return number, min(tokens / number, float(choice.micro_batch_tokens)) / fill
    rows = max(1, choice.micro_batch_tokens // workload.max_length)
    sequences = math.ceil(workload.samples / workload.optimizer_steps / choice.parallel.dp)
    return max(1, math.ceil(sequences / rows)), float(rows * workload.max_length)


def forward_time(
    facts: ModelFacts,
    choice: TrainingChoice,
    cluster: ClusterFacts,
    tokens: float,
    mean_keys: float,
    constants: Constants = DEFAULTS,
) -> MicroBatchTime:
    """Forward pass of one micro-batch of `tokens` on the slowest pipeline stage."""
    chosen = distinct_stages(facts, choice)
    times = [_stage_forward(facts, stage, choice, cluster, tokens, mean_keys, constants) for stage in chosen]
    return max(times, key=lambda time: time.total)


def _stage_forward(
    facts: ModelFacts,
    stage: Stage,
    choice: TrainingChoice,
    cluster: ClusterFacts,
    tokens: float,
    mean_keys: float,
    constants: Constants,
) -> MicroBatchTime:
    local = tokens / choice.parallel.cp
    dense_sizes, moe_sizes = layer_sizes(facts)
    dense_flops = stage.dense_layers * dense_sizes.total
    expert_flops = 0.0
    if moe_sizes is not None and facts.moe is not None:
        dense_flops += stage.moe_layers * moe_sizes.dense
        expert_flops = stage.moe_layers * moe_sizes.experts * facts.moe.experts_per_token / facts.moe.experts
    head_flops = facts.vocab * facts.hidden if stage.head else 0.0
    rate = matmul_rate(facts, choice, cluster, local, constants)
    seconds = 2 * local * (dense_flops + head_flops) / choice.parallel.tp / rate
    if expert_flops and facts.moe is not None:
        routed = local / choice.parallel.tp * (constants.expert_imbalance if choice.parallel.ep > 1 else 1.0)
        seconds += 2 * routed * expert_flops / expert_rate(facts, choice, cluster, local, constants)
    if choice.adapters is not None:
        narrow = _shaped(choice, cluster, constants, choice.adapters.rank, local) if not cluster.is_cpu else None
        seconds += 2 * local * trained_parameters(facts, stage, choice).total / (narrow or rate)
    matmul = seconds
    attention = 2 * local * stage.layers * score_width(facts) * attended(facts, mean_keys) / choice.parallel.tp
    seconds += _traffic_seconds(facts, stage, choice, cluster, local, constants)
    efficiency = CPU_MATMUL_EFFICIENCY / 3 if cluster.is_cpu else constants.attention_efficiency
    attention /= _peak(choice, cluster, "bf16") * efficiency
    exposed = 1 - constants.tensor_overlap
    return MicroBatchTime(
        compute=seconds + attention,
        tensor=exposed * _tensor_seconds(facts, stage, choice, cluster, local, constants),
        expert=(1 - constants.expert_overlap) * _expert_seconds(facts, stage, choice, cluster, local, constants),
        context=max(0.0, _context_seconds(facts, stage, choice, cluster, tokens, constants) - attention),
        host=_host_seconds(facts, stage, choice, cluster, constants),
        matmul=matmul,
    )


def _traffic_seconds(
    facts: ModelFacts, stage: Stage, choice: TrainingChoice, cluster: ClusterFacts, tokens: float, constants: Constants
) -> float:
    """Memory traffic of what is no matmul: norms, RoPE, activation functions, permutations, casts."""
    if cluster.is_cpu:
        return 0.0
    whole = replace(choice, recompute="none", precision="bf16")
    moved = stage.dense_layers * layer_activation_bytes(facts, whole, False, constants)
    if facts.moe is not None:
        moved += stage.moe_layers * layer_activation_bytes(facts, whole, True, constants)
    rate = cluster.device.memory_bandwidth * constants.hbm_efficiency
    return constants.traffic * tokens * moved / rate


def _peak(choice: TrainingChoice, cluster: ClusterFacts, precision: str) -> float:
    """Peak rate of one rank; ranks on a CPU share its cores."""
    if not cluster.is_cpu:
        return cluster.device.flops(precision)
    cores, ranks = cluster.device.cores, -(-choice.parallel.world_size // cluster.nodes)
    return cluster.device.flops("float32") * min(choice.threads or cores, cores / ranks, cores) / cores


def matmul_rate(
    facts: ModelFacts, choice: TrainingChoice, cluster: ClusterFacts, tokens: float, constants: Constants
) -> float:
    """Floating-point operations a second of one rank in the dense matrices."""
    if cluster.is_cpu:
        return _peak(choice, cluster, "float32") * CPU_MATMUL_EFFICIENCY
    width = max(facts.intermediate if facts.moe is None else facts.hidden, 1) / choice.parallel.tp
    return _shaped(choice, cluster, constants, width, tokens)


def expert_rate(
    facts: ModelFacts, choice: TrainingChoice, cluster: ClusterFacts, tokens: float, constants: Constants
) -> float:
    """The same in the experts, whose matrices are narrow and see few tokens each."""
    assert facts.moe is not None
    if cluster.is_cpu:
        return _peak(choice, cluster, "float32") * CPU_MATMUL_EFFICIENCY / 2
    p, moe = choice.parallel, facts.moe
    rows = tokens / p.tp * moe.experts_per_token * p.ep * p.etp / moe.experts
    return _shaped(choice, cluster, constants, moe.expert_intermediate / p.etp, rows)


def _shaped(choice: TrainingChoice, cluster: ClusterFacts, constants: Constants, width: float, rows: float) -> float:
    scaled = {"fp8": constants.fp8_efficiency, "fp4": constants.fp4_efficiency}
    efficiency = scaled.get(choice.precision, constants.matmul_efficiency)
    shape = width / (width + constants.half_width) * rows / (rows + constants.half_tokens)
    return cluster.device.flops(choice.precision) * efficiency * shape


def _tensor_seconds(
    facts: ModelFacts, stage: Stage, choice: TrainingChoice, cluster: ClusterFacts, tokens: float, constants: Constants
) -> float:
    """Two all-reduces a layer (or the all-gathers and reduce-scatters of sequence parallelism: the same bytes)."""
    if choice.parallel.tp == 1:
        return 0.0
    element = 4 if choice.precision == "float32" else 2
    volume = 4 * (choice.parallel.tp - 1) / choice.parallel.tp * tokens * facts.hidden * element
    moe_share = 0.5 if facts.moe is not None and choice.parallel.etp == 1 else 1.0
    layers = stage.dense_layers + stage.moe_layers * moe_share
    latency = 4 * 3e-5 * stage.layers
    return layers * volume / (cluster.bandwidth(choice.parallel.tp) * constants.link_efficiency) + latency


def _expert_seconds(
    facts: ModelFacts, stage: Stage, choice: TrainingChoice, cluster: ClusterFacts, tokens: float, constants: Constants
) -> float:
    """Dispatch and combine all-to-all of each layer with experts."""
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


def _context_seconds(
    facts: ModelFacts, stage: Stage, choice: TrainingChoice, cluster: ClusterFacts, tokens: float, constants: Constants
) -> float:
    """Keys and values travel once around the ring of context-parallel ranks."""
    if choice.parallel.cp == 1:
        return 0.0
    width = 2 * facts.kv_heads * facts.head_dim / choice.parallel.tp
    volume = (choice.parallel.cp - 1) / choice.parallel.cp * tokens * width * 2 * stage.layers
    span = choice.parallel.tp * choice.parallel.cp
    return volume / (cluster.bandwidth(span) * constants.link_efficiency)


def _host_seconds(
    facts: ModelFacts, stage: Stage, choice: TrainingChoice, cluster: ClusterFacts, constants: Constants
) -> float:
    seconds = stage.layers * constants.layer_host_s
    if facts.moe is not None and not cluster.is_cpu:
        experts = 0.0 if choice.grouped_experts else facts.moe.experts / choice.parallel.ep * constants.expert_host_s
        seconds += stage.moe_layers * (constants.moe_layer_host_s + experts)
    return seconds


def training_time(
    facts: ModelFacts,
    choice: TrainingChoice,
    workload: Workload,
    cluster: ClusterFacts,
    colocated: bool = True,
    constants: Constants = DEFAULTS,
) -> TrainingTime:
    """The training phase of a step: all its optimizer steps."""
    number, tokens = micro_batches(choice, workload, constants)
    forward = forward_time(facts, choice, cluster, tokens, workload.mean_keys(constants.length_sigma), constants)
    # Frozen weights need no gradient: of a backward pass's two multiplications with each one is left.
    spared = forward.matmul if choice.adapters else 0.0
    micro = forward.total * PASSES[choice.recompute] - spared
    compute = number * micro
    bubble = (choice.parallel.pp - 1) / choice.parallel.vpp * micro
    data, optimizer = _data_seconds(facts, choice, cluster, micro, number, constants)
    steps = workload.optimizer_steps
    onload = offload_seconds(facts, choice, cluster, constants) if colocated and workload.rollouts else 0.0
    return TrainingTime(number, forward, steps * compute, steps * bubble, steps * data, steps * optimizer, onload)


def _data_seconds(
    facts: ModelFacts, choice: TrainingChoice, cluster: ClusterFacts, micro: float, number: int, constants: Constants
) -> tuple[float, float]:
    """(exposed gradient and parameter communication, optimizer update) of one optimizer step of `number` micro-batches
    that take `micro` seconds each."""
    params = max((trained_parameters(facts, s, choice) for s in stages(facts, choice)), key=lambda p: p.total)
    ranks = choice.parallel.dp * choice.parallel.cp
    gradient = 4 if choice.precision == "float32" else choice.gradient_bytes
    element = 4 if choice.precision == "float32" else 2
    owned = params.owned(choice.parallel)
    if choice.sharding == "full":
        exposed = _sharded_seconds(facts, choice, cluster, micro, number, constants)
    else:
        shared = params.dense * (ranks - 1) / ranks + params.experts * (1 - 1 / choice.parallel.expert_dp)
        span = choice.parallel.tp * ranks
        inside = span <= max(1, cluster.link_domain)
        rate = cluster.bandwidth(span) * (constants.link_efficiency if inside else constants.network_efficiency)
        exposed = (1 - constants.data_overlap) * (shared * (gradient + element)) / rate
    update = owned * 28 / (cluster.device.memory_bandwidth * constants.hbm_efficiency)
    update += owned * state_traffic(choice) / (cluster.device.host_link * constants.pinned_copy)
    return exposed, update + (0.0 if cluster.is_cpu else constants.optimizer_step_s)


def _group_rate(apart: int, ranks: int, cluster: ClusterFacts, constants: Constants) -> float:
    """Bytes a second of each of `ranks` ranks, `apart` from each other, in a collective over all of them. Over nodes a
    ring goes through the network device of each of its ranks in a node."""
    inside = max(1, cluster.link_domain)
    link = cluster.bandwidth(1) * constants.link_efficiency
    if apart * ranks <= inside:
        return link
    return min(link, max(1, inside // apart) * cluster.bandwidth(apart * ranks) * constants.network_efficiency)


def _sharded_seconds(
    facts: ModelFacts, choice: TrainingChoice, cluster: ClusterFacts, micro: float, number: int, constants: Constants
) -> float:
    """FSDP2's communication in one optimizer step, as far as it is not hidden.

    Each micro-batch gathers the weights for its forward and once more for its backward pass, and adds its float32
    gradients up over the shards; copies of the weights (`training.replicate`) add theirs up once.
    """
    gathers = _gather_seconds(facts, choice, cluster, constants)
    sums = _reduce_seconds(facts, choice, cluster, constants)
    forward = micro / PASSES[choice.recompute]
    exposed = gathers - min(constants.gather_overlap * gathers, forward)
    exposed += (gathers + sums) - min(constants.backward_overlap * (gathers + sums), micro - forward)
    return number * exposed + _copies_seconds(facts, choice, cluster, constants)


def _shards(choice: TrainingChoice, dense: float, experts: float) -> float:
    """Parameters that a rank receives where each of these is gathered from (or summed over) its shards."""
    shards = choice.parallel.fsdp_shards
    return dense * (1 - 1 / shards) + experts * (1 - min(1.0, choice.parallel.ep / shards))


def _gather_seconds(facts: ModelFacts, choice: TrainingChoice, cluster: ClusterFacts, constants: Constants) -> float:
    """Seconds in which FSDP2 gathers all weights of a rank once, in the training dtype."""
    params = rank_parameters(facts, stages(facts, choice)[0], choice)
    element = 4 if choice.precision == "float32" else 2
    received = element * _shards(choice, params.dense, params.experts)
    return received / _group_rate(choice.parallel.tp, choice.parallel.fsdp_shards, cluster, constants)


def _reduce_seconds(facts: ModelFacts, choice: TrainingChoice, cluster: ClusterFacts, constants: Constants) -> float:
    """Seconds in which FSDP2 adds up the float32 gradients of a micro-batch over the shards."""
    params = trained_parameters(facts, stages(facts, choice)[0], choice)
    sent = 4 * _shards(choice, params.dense, params.experts)
    return sent / _group_rate(choice.parallel.tp, choice.parallel.fsdp_shards, cluster, constants)


def _copies_seconds(facts: ModelFacts, choice: TrainingChoice, cluster: ClusterFacts, constants: Constants) -> float:
    """Seconds in which copies of the weights add up the gradients of their shards."""
    copies, params = choice.parallel.replicate, trained_parameters(facts, stages(facts, choice)[0], choice)
    shard = params.owned(choice.parallel)
    rate = _group_rate(choice.parallel.tp * choice.parallel.fsdp_shards, copies, cluster, constants)
    return 2 * 4 * shard * (1 - 1 / copies) / rate


def state_traffic(choice: TrainingChoice) -> int:
    """Bytes of a parameter's optimizer states that cross the host link in an update: to the device and back."""
    return 2 * master_and_moments(choice) if choice.optimizer_offload else 0


def offload_seconds(facts: ModelFacts, choice: TrainingChoice, cluster: ClusterFacts, constants: Constants) -> float:
    """Optimizer states from device to host memory or back."""
    if cluster.is_cpu or choice.optimizer_offload:
        return 0.0
    params = max((trained_parameters(facts, s, choice) for s in stages(facts, choice)), key=lambda p: p.total)
    return (
        master_and_moments(choice)
        * params.owned(choice.parallel)
        / (cluster.device.host_link * constants.pageable_copy)
    )


def logprobs_time(
    facts: ModelFacts,
    choice: TrainingChoice,
    workload: Workload,
    cluster: ClusterFacts,
    constants: Constants = DEFAULTS,
) -> float:
    """Seconds of the log-prob phase: a forward pass over all rollouts for the old policy and one for the reference."""
    passes = int(workload.old_logprobs) + int(workload.reference)
    if not passes or not workload.rollouts:
        return 0.0
    number, tokens = micro_batches(choice, workload, constants)
    forward = forward_time(facts, choice, cluster, tokens, workload.mean_keys(constants.length_sigma), constants)
    seconds = forward.total
    if choice.sharding == "full":
        gathers = _gather_seconds(facts, choice, cluster, constants)
        seconds += gathers - min(constants.gather_overlap * gathers, forward.total)
    fixed = 0.0 if cluster.is_cpu else 1.0
    return passes * (number * workload.optimizer_steps + choice.parallel.pp - 1) * seconds + fixed


def critic_time(
    facts: ModelFacts,
    choice: TrainingChoice,
    workload: Workload,
    cluster: ClusterFacts,
    colocated: bool = True,
    constants: Constants = DEFAULTS,
) -> float:
    """Seconds of the critic's phase: values of all tokens, and the training of a model of the policy's size. Between
    device and host memory go, where policy and critic take turns, both models both ways, and where they share devices
    with engines alone, the critic both ways; 0 without a critic."""
    if not choice.critic:
        return 0.0
    own = replace(workload, old_logprobs=True, reference=False)
    values = logprobs_time(facts, choice, own, cluster, constants)
    training = training_time(facts, choice, workload, cluster, False, constants).total
    if cluster.is_cpu or not (colocated and workload.rollouts):
        return values + training
    states = offload_seconds(facts, choice, cluster, constants)
    weights = most_weight_bytes(facts, choice) / (cluster.device.host_link * constants.pageable_copy)
    return values + training + (4 if choice.critic_offload else 2) * (states + weights)


def model_flops(
    facts: ModelFacts, workload: Workload, constants: Constants = DEFAULTS, *, frozen: bool = False
) -> float:
    """Operations that a step's training needs (no recomputation): for MFU. `frozen`: adapters alone are trained."""
    keys = attended(facts, workload.mean_keys(constants.length_sigma))
    per_token = (4 if frozen else 6) * count(facts).active + 6 * facts.layers * score_width(facts) * keys
    return per_token * workload.trained_tokens(constants.length_sigma)


def tensor_count(facts: ModelFacts) -> int:
    """Tensors of the published checkpoint, about."""
    dense, moe = 9 + 3 * facts.qkv_bias + 2 * facts.qk_norm, 3 * facts.moe.experts + 1 if facts.moe else 0
    moe_layers = sum(facts.is_moe_layer(layer) for layer in range(facts.layers))
    return facts.layers * dense + moe_layers * moe + 3


def remote_share(choice: TrainingChoice, cluster: ClusterFacts, colocated: bool) -> float:
    """Share of what a worker needs that no device of its node holds."""
    node = max(cluster.link_domain, cluster.gpus_per_node)
    if cluster.gpus <= node:
        return 0.0
    if not colocated:
        return 1.0
    parallel = choice.parallel
    once = parallel.pp * max(parallel.tp, parallel.expert_size)  # devices that hold the model once
    if choice.sharding == "full":
        once = parallel.tp * parallel.fsdp_shards
    return max(0.0, 1 - node / once)


def refit_time(
    facts: ModelFacts,
    choice: TrainingChoice,
    generation: GenerationChoice,
    cluster: ClusterFacts,
    colocated: bool,
    constants: Constants = DEFAULTS,
    *,
    mover: str | None = None,
) -> float:
    """Seconds to refit the engines, offloading before and waking after included. `mover` None: the fastest there is."""
    payload = count(facts).total * (4 if choice.precision == "float32" else 2)
    detour = _detour_seconds(payload, cluster, mover, constants)
    if cluster.is_cpu:
        far = payload / cluster.device.network if cluster.nodes > 1 and not colocated else 0.0
        # Measured: 0.8 to 1.6 GB/s through shared memory, 50 ms of handshakes.
        return detour + far + 0.05 + payload / 1.0e9
    received = weight_bytes(facts, generation)
    far = remote_share(choice, cluster, colocated) * received
    near = received - far
    moved = far / (cluster.device.network * constants.refit_link_efficiency)
    moved += near / (cluster.device.link * constants.refit_link_efficiency)
    pieces = constants.refit_handshake_s + tensor_count(facts) * constants.refit_piece_s
    around = constants.refit_fixed_s + offload_seconds(facts, choice, cluster, constants) if colocated else 0.0
    return detour + moved + pieces + around


def _detour_seconds(payload: float, cluster: ClusterFacts, mover: str | None, constants: Constants) -> float:
    """Seconds of a mover that goes around the devices' memory: one copy written and read."""
    if mover == "disk":
        return 2 * payload / constants.disk_bytes_per_s
    if mover == "shared-memory" and not cluster.is_cpu:
        return 2 * payload / (cluster.device.host_link * constants.pageable_copy)
    return 0.0
