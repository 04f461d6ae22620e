"""Memory of a device by phase and part. Activations follow Korthikanti et al. 2022 (arXiv:2205.05198), section 4, for
SwiGLU layers without dropout, with flash attention: tensors kept for the backward pass in the training dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from rlctl.models.facts import ModelFacts
from rlctl.models.quantized_base import packed_sizes
from rlctl.planner.choice import TrainingChoice
from rlctl.planner.costs.adapters import adapted_parameters, trained_parameters
from rlctl.planner.costs.communicators import communicators
from rlctl.planner.costs.parameters import RankParameters, Stage, distinct_stages, hidden_sizes, rank_parameters, stages
from rlctl.planner.costs.vision_tower import image_share, tower_activation_bytes
from rlctl.planner.inputs.cluster import GIB, ClusterFacts
from rlctl.planner.inputs.constants import DEFAULTS, MUON_ROUND_ELEMENTS, OPTIMIZER_PART_BYTES, Constants
from rlctl.planner.inputs.request import Request

DEQUANTIZED_BYTES = 3
"""Bytes per weight of the packed matrix in use: its bfloat16 weights, and the codes that they are made of."""
PINNED = 1 / math.log(2)
"""Pinned over requested bytes: torch rounds up to powers of two. vLLM pins sleeping weights."""


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes of one device (of one process, on a CPU) in one phase."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def gib(self) -> dict[str, float]:
        """By part in GiB, with `total`; parts below 5 MiB left out."""
        rounded = {name: round(value / GIB, 3) for name, value in self.parts.items() if value > 5 * 1024**2}
        return rounded | {"total": round(self.total / GIB, 3)}


def element_bytes(choice: TrainingChoice) -> int:
    """Bytes of a weight and of an activation element; FP8 and FP4 training keep BF16 weights and activations."""
    return 4 if choice.precision == "float32" else 2


def master_and_moments(choice: TrainingChoice) -> int:
    """Return optimizer bytes per parameter: a float32 weight next to bfloat16 ones, and two moments. FSDP2's weights
    are float32."""
    return choice.moment_bytes + (0 if choice.precision == "float32" or choice.sharding == "full" else 4)


def optimizer_bytes(params: RankParameters, choice: TrainingChoice) -> float:
    """Return bytes of the optimizer's states that a rank owns. Muon has one float32 momentum in place of two moments
    for a matrix of a layer."""
    saved = (choice.moment_bytes - 4) * params.owned_hidden(choice.parallel) if choice.muon_steps else 0.0
    return master_and_moments(choice) * params.owned(choice.parallel) - saved


def state_bytes(facts: ModelFacts, stage: Stage, choice: TrainingChoice) -> dict[str, float]:
    """Return bytes of a rank's weights, gradients and optimizer states (none if offloaded). BF16: 2 + `gradient_bytes`
    per parameter, and 12 (master and moments) divided by the ranks that share it; float32: 8 without master. With
    adapters, only these have gradients and states. A resident critic doubles the bytes."""
    params, trained = rank_parameters(facts, stage, choice), trained_parameters(facts, stage, choice)
    element, owned = element_bytes(choice), trained.owned(choice.parallel)
    gathered: dict[str, float] = {}
    if choice.sharding == "full":  # float32 shards of weights and gradients
        copy = _sharded_bytes(facts, params, choice)
        added = (
            replace(trained, dense=trained.dense - trained.tables).owned(choice.parallel) if choice.adapters else 0.0
        )
        weights, gradients = copy + 4 * added, 4 * owned
        gathered["gathered"] = _gathered_bytes(facts, params, choice)
        if facts.quantized is not None:
            gathered["dequantized"] = float(DEQUANTIZED_BYTES * packed_sizes(facts).largest)
    else:
        # FP8 keeps quantized copies of the layers' matrices next to the BF16 ones; embedding and head have none.
        copies = choice.float8_copies if choice.precision == "fp8" else 0.5 if choice.precision == "fp4" else 0
        copy = element * params.total
        weights = copy + copies * (params.total - params.tables)
        weights += element * trained.total if choice.adapters else 0.0
        gradients = (4 if choice.precision == "float32" else choice.gradient_bytes) * trained.total
    optimizer = 0.0 if choice.optimizer_offload else optimizer_bytes(trained, choice)
    states = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    # A critic that takes turns with the policy has its place meanwhile: it has the same states and no logits.
    critic = {"critic": sum(states.values())} if choice.critic and not choice.critic_offload else {}
    keeps_reference = choice.reference and choice.adapters is None and not choice.reference_offload
    reference = {"reference": copy} if keeps_reference else {}
    own_teacher = {"own teacher": copy} if choice.own_teacher else {}
    return states | gathered | critic | reference | own_teacher


def _sharded_bytes(facts: ModelFacts, params: RankParameters, choice: TrainingChoice) -> float:
    """Return bytes of FSDP2's float32 shards of a rank, and of packed layers, which every rank holds whole."""
    packed = packed_sizes(facts)
    plain = replace(params, dense=params.dense - packed.weights)
    return 4 * plain.owned(choice.parallel) + packed.trainer_bytes


def unadapted_bytes(facts: ModelFacts, choice: TrainingChoice) -> float:
    """Host memory of a rank for the adapted weights as training found them, where adapters are merged into others."""
    if facts.quantized is not None or (choice.adapters is not None and choice.adapters.adds):
        return 0.0
    counts = [adapted_parameters(facts, stage, choice) for stage in stages(facts, choice)]
    full = choice.sharding == "full"
    return element_bytes(choice) * max(counts.owned(choice.parallel) if full else counts.total for counts in counts)


def waiting_adapter_bytes(facts: ModelFacts, choice: TrainingChoice) -> float:
    """Return host bytes of one waiting adapter on the fullest rank: its weights, and the optimizer states that the rank
    owns."""
    full, sizes = choice.sharding == "full", list[float]()
    for stage in stages(facts, choice):
        trained = trained_parameters(facts, stage, choice)
        weights = 4 * trained.owned(choice.parallel) if full else element_bytes(choice) * trained.total
        sizes.append(weights + optimizer_bytes(trained, choice))
    return max(sizes)


def waiting_bytes(facts: ModelFacts, choice: TrainingChoice) -> float:
    """Return host bytes of a rank for adapters that wait for their turn, and for one more while two change places."""
    held = choice.adapters.held if choice.adapters is not None else 1
    return held * waiting_adapter_bytes(facts, choice) if held > 1 else 0.0


def _gathered_bytes(facts: ModelFacts, params: RankParameters, choice: TrainingChoice) -> float:
    """Return bytes gathered by FSDP2 in a backward pass: embedding and head with gradients, two layers, and a layer's
    gradients with a float32 copy."""
    if choice.parallel.fsdp_shards * choice.parallel.replicate == 1 and choice.precision == "float32":
        return 0.0  # one rank does without FSDP2
    element = element_bytes(choice)
    layer = params.largest_layer - packed_sizes(facts).weights / facts.layers
    weights = element * (params.tables + 2 * layer)
    gradients = element * params.tables + (element + 4) * layer
    return weights + (gradients if choice.adapters is None else 0.0)


def most_weight_bytes(facts: ModelFacts, choice: TrainingChoice) -> float:
    """Bytes of a model's weights on the fullest rank: FSDP2 keeps float32 shards."""
    counts = [rank_parameters(facts, stage, choice) for stage in stages(facts, choice)]
    full = choice.sharding == "full"
    return max(
        _sharded_bytes(facts, counts, choice) if full else element_bytes(choice) * counts.total for counts in counts
    )


def update_bytes(facts: ModelFacts, stage: Stage, choice: TrainingChoice) -> float:
    """Return device bytes of an update with offloaded states: one part or the largest parameter, and bfloat16 gradients
    that Megatron widens. FSDP2: all."""
    states, trained = master_and_moments(choice), trained_parameters(facts, stage, choice)
    owned = trained.owned(choice.parallel)
    if choice.sharding == "full":
        return optimizer_bytes(trained, choice)
    width = max(facts.intermediate, facts.vocab / 2 if stage.embedding or stage.head else 0.0)
    largest = 2 * width * facts.hidden / choice.parallel.tp if choice.adapters is None else 0.0
    widened = 4 * owned if choice.gradient_bytes == 2 and choice.precision != "float32" else 0.0
    part = min(states * owned, max(OPTIMIZER_PART_BYTES, states * largest))
    if choice.muon_steps:  # the matrices' weights and momentum visit together
        together = (states - choice.moment_bytes + 4) * trained.owned_hidden(choice.parallel)
        part = max(min(part, optimizer_bytes(trained, choice) - together), together)
    return part + widened


def muon_bytes(facts: ModelFacts, stage: Stage, choice: TrainingChoice) -> float:
    """Return device bytes of the matrices that a rank orthogonalizes at once: as received, together, and two products
    (a gram matrix and the next iterate are at most that large)."""
    if not choice.muon_steps:
        return 0.0
    layers = (stage.dense_layers, stage.moe_layers)
    largest = max((hidden_sizes(facts, bool(moe)).most for moe, count in enumerate(layers) if count), default=0.0)
    elements = sum(rank_parameters(facts, stage, choice).hidden) * choice.parallel.tp
    ranks = choice.parallel.world_size / choice.parallel.pp
    return 5 * element_bytes(choice) * max(min(MUON_ROUND_ELEMENTS, elements / ranks), largest)


def layer_activation_bytes(facts: ModelFacts, choice: TrainingChoice, moe: bool, constants: Constants) -> float:
    """Bytes that one layer keeps for its backward pass, for each token of a rank's context-parallel part."""
    element = element_bytes(choice)
    h, tp = facts.hidden, choice.parallel.tp
    hidden_split = tp if choice.parallel.sequence_parallel else 1
    # TransformerEngine keeps the inputs of FP8 matmuls quantized: norms, attention output, activated MLP.
    kept = 1 if choice.precision in ("fp8", "fp4") else element
    residuals, norms = 2 * h * element / hidden_split, 2 * h * kept / hidden_split
    if facts.mla is not None:
        mla = facts.mla
        qk = facts.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        projections = element * (2 * qk + facts.heads * mla.v_head_dim) / tp
        latent = (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim
        attention = kept * facts.heads * mla.v_head_dim / tp + 2 * element * latent / hidden_split
        # selective: the up-projections are computed again from the latent
        attention += projections if choice.recompute != "selective" else 0.0
    else:
        projections = element * (facts.heads + 2 * facts.kv_heads) * facts.head_dim / tp
        attention = projections + kept * facts.heads * facts.head_dim / tp
        # query and key before their norms
        attention += element * (facts.heads + facts.kv_heads) * facts.head_dim / tp if facts.qk_norm else 0.0
    if moe and facts.moe is not None:
        imbalance = constants.expert_imbalance if choice.parallel.ep > 1 else 1.0
        routed = facts.moe.experts_per_token * imbalance / hidden_split
        width = facts.moe.expert_intermediate * routed + facts.moe.shared_expert_intermediate / tp
        gates, activated = (element + kept) * h * routed + 2 * element * width, kept * width  # buffers of the dispatch
    else:
        gates, activated = 2 * element * facts.intermediate / tp, kept * facts.intermediate / tp
    if choice.recompute == "selective":
        # norms and the activation function are computed again in the backward pass
        return residuals + attention + gates
    return residuals + norms + attention + gates + activated


def activation_bytes(
    facts: ModelFacts, stage: Stage, choice: TrainingChoice, micro_batches: int, constants: Constants = DEFAULTS
) -> float:
    """Activations of one rank at the peak of 1F1B (interleaved where vpp > 1)."""
    p, tokens = choice.parallel, choice.micro_batch_tokens / choice.parallel.cp
    dense = layer_activation_bytes(facts, choice, False, constants)
    moe = layer_activation_bytes(facts, choice, True, constants) if facts.moe else 0.0
    in_flight = float(min(stage.in_flight, micro_batches))
    if p.vpp > 1 and p.pp > 1:
        in_flight = min(in_flight * (1 + (p.pp - 1) / (p.pp * p.vpp)), float(micro_batches))
    if choice.recompute != "full":
        return tokens * (stage.dense_layers * dense + stage.moe_layers * moe) * in_flight
    inputs = element_bytes(choice) * facts.hidden / (p.tp if p.sequence_parallel else 1) * stage.layers
    return tokens * (inputs * in_flight + max(dense if stage.dense_layers else 0.0, moe if stage.moe_layers else 0.0))


def logit_bytes(
    facts: ModelFacts, choice: TrainingChoice, tokens: float, gradient: bool, constants: Constants = DEFAULTS
) -> float:
    """Vocabulary-parallel logits: output in the training dtype, its float32 copy, and their gradient."""
    present = min(tokens, choice.logit_tokens or tokens)
    copies = (2 if gradient else 1) - (element_bytes(choice) == 4)  # float32 logits are that copy themselves
    per_entry = element_bytes(choice) + constants.logit_copy_bytes * copies
    return present * facts.vocab / choice.parallel.tp * per_entry


def runtime_bytes(request: Request, choice: TrainingChoice, *, trains: bool = True) -> float:
    """Return the bytes that a process holds in addition to the model's tensors: a policy's, or (`trains` False) a
    teacher's."""
    if request.cluster.is_cpu:
        return request.constants.cpu_policy_bytes
    groups = communicators(request.facts, choice, trains=trains)
    return request.constants.runtime_bytes + groups * request.constants.communicator_bytes


def _hosted_bytes(request: Request, stage: Stage, choice: TrainingChoice) -> float:
    if not request.cluster.is_cpu or not choice.optimizer_offload:
        return 0.0
    whole = state_bytes(request.facts, stage, replace(choice, optimizer_offload=False))
    return (1 + choice.critic) * whole["optimizer"]


def likely_tokens_bytes(request: Request, choice: TrainingChoice, each: int) -> float:
    """Return bytes of a teacher's likely tokens on a rank, `each` (index and log-prob) per entry."""
    workload = request.workload
    return each * workload.teacher_top * workload.tokens(request.constants.length_sigma) / choice.parallel.dp


def row_tokens(request: Request, choice: TrainingChoice) -> float:
    """Return the tokens of a full row on a rank. A CPU's rows exceed most steps, so there the step's tokens count."""
    if not request.cluster.is_cpu:
        return choice.micro_batch_tokens / choice.parallel.cp
    workload, parallel = request.workload, choice.parallel
    step = workload.trained_tokens(request.constants.length_sigma) / workload.optimizer_steps / parallel.dp
    return min(float(choice.micro_batch_tokens), step) / parallel.cp


def training_memory(request: Request, choice: TrainingChoice, asleep: float, micro_batches: int) -> PhaseMemory:
    """Return training memory of the fullest stage. `asleep`: a sleeping engine's remainder on the device."""
    facts, constants, by_rows = request.facts, request.constants, list[PhaseMemory]()
    tokens, on_cpu = row_tokens(request, choice), request.cluster.is_cpu
    for stage in distinct_stages(facts, choice):
        parts = state_bytes(facts, stage, choice)
        if on_cpu:  # torch's operations keep float32 copies also where they compute in bfloat16
            wide = replace(choice, precision="float32", micro_batch_tokens=math.ceil(tokens * choice.parallel.cp))
            parts["activations"] = activation_bytes(facts, stage, wide, micro_batches, constants)
            whole = choice.sharding == "full"  # transformers' modules, of dtensor
            parts["activations"] *= constants.cpu_module_copies if whole else constants.cpu_activation_copies
        else:
            parts["activations"] = activation_bytes(facts, stage, choice, micro_batches, constants)
        if stage.embedding:
            seen = tokens * image_share(facts, request.workload, constants.length_sigma)
            parts["activations"] += seen * tower_activation_bytes(facts, choice, element_bytes(choice))
        predicted = tokens * (request.workload.predicted_share(constants.length_sigma) if on_cpu else 1.0)
        parts["logits"] = logit_bytes(facts, choice, predicted, True, constants) if stage.head else 0.0
        dynamic = parts["activations"] + parts["logits"]
        if choice.optimizer_offload:  # the update has the room that activations had
            parts["optimizer"] = max(0.0, update_bytes(facts, stage, choice) - dynamic)
            parts["optimizer"] += _hosted_bytes(request, stage, choice)
        if choice.muon_steps:
            parts["muon"] = max(0.0, muon_bytes(facts, stage, choice) - dynamic)
        parts["fragmentation"] = (0.0 if on_cpu else constants.fragmentation) * dynamic
        if top := request.workload.teacher_top:  # the policy's log-probs of a row's tokens, and their gradient
            lists = request.teaching.compared
            parts["likely tokens"] = lists * (likely_tokens_bytes(request, choice, 12) + 8.0 * top * tokens)
        parts["runtime"] = runtime_bytes(request, choice)
        parts["engine asleep"] = asleep
        parts["staging"] = constants.staging_bytes if asleep else 0.0  # it is there from the first refit on
        parts["weights without adapters"] = unadapted_bytes(facts, choice) if on_cpu else 0.0
        parts["waiting adapters"] = waiting_bytes(facts, choice) if on_cpu else 0.0
        by_rows.append(PhaseMemory(parts))
    return max(by_rows, key=lambda memory: memory.total)


def logprobs_memory(request: Request, choice: TrainingChoice, asleep: float) -> PhaseMemory:
    """Return memory of the log-prob phase (forward only). Offloaded states count only on a CPU."""
    facts, constants = request.facts, request.constants
    stage, tokens = stages(facts, choice)[-1], row_tokens(request, choice)
    states = state_bytes(facts, stage, choice)
    states["optimizer"] += _hosted_bytes(request, stage, choice)
    kinds = (False, True) if facts.moe else (False,)
    states["activations"] = tokens * max(layer_activation_bytes(facts, choice, moe, constants) for moe in kinds)
    states["logits"] = logit_bytes(facts, choice, tokens, False, constants)
    if request.cluster.is_cpu:  # the allocator gives back a part of what training had
        trained = training_memory(request, choice, asleep, 1).parts
        states["activations"] = constants.cpu_kept * trained["activations"]
        states["logits"] = constants.cpu_kept * trained["logits"]
    states |= {"engine asleep": asleep, "staging": constants.staging_bytes if asleep else 0.0}
    return PhaseMemory(states | {"runtime": runtime_bytes(request, choice)})


def split_refit_memory(
    request: Request, choice: TrainingChoice, generation: PhaseMemory, workers: int, beside: dict[str, float]
) -> PhaseMemory:
    """Return refit bytes between separate devices, on the fuller one (`generation`: the engine's, `beside`: others' on
    the policy's). There is a communicator per engine with `workers`; a policy rank may join all. A policy rank's
    channels share `staging`; a worker has two message buffers and two assembly buffers."""
    facts, constants = request.facts, request.constants
    each = 0.0 if request.cluster.is_cpu else constants.communicator_bytes
    fullest = max((state_bytes(facts, stage, choice) for stage in stages(facts, choice)), key=lambda s: sum(s.values()))
    runtime, staging = {"runtime": runtime_bytes(request, choice)}, constants.staging_bytes
    buffers = {"staging": staging, "refit communicators": workers * each} | beside
    policy = PhaseMemory(fullest | runtime | buffers)
    engine = PhaseMemory(generation.parts | {"staging": 2 * staging, "refit communicators": each})
    return max(policy, engine, key=lambda memory: memory.total)


def exchange_bytes(request: Request, choice: TrainingChoice) -> float:
    """Return bytes for forwarding boxes in a colocated refit: two receive buffers, and two per message, within a
    refit's usual size."""
    p = choice.parallel
    split = (
        p.fsdp_shards > 1 if choice.sharding == "full" else p.pp * p.expert_size * (request.facts.moe is not None) > 1
    )
    split = split or p.tp * p.pp > 1
    return 2 * request.constants.staging_bytes if split and not request.cluster.is_cpu else 0.0


def graph_bytes(facts: ModelFacts) -> float:
    return (1.0 if facts.moe else 0.5) * GIB


def engine_asleep_bytes(request: Request) -> float:
    without = 0.0 if request.engine.graphs else graph_bytes(request.facts)
    return request.constants.engine_asleep_bytes - without


def refit_memory(request: Request, choice: TrainingChoice, engine_weights: float) -> PhaseMemory:
    """Return bytes of a colocated refit: policy and engine weights; gradients and optimizer offloaded, no KV cache or
    float8 copies."""
    facts, constants, on_cpu = request.facts, request.constants, request.cluster.is_cpu
    plain = replace(choice, float8_copies=0)
    return PhaseMemory(
        {
            "weights": max(state_bytes(facts, stage, plain)["weights"] for stage in stages(facts, choice)),
            "engine weights": engine_weights,
            "staging": (0.5 if on_cpu else 2) * constants.staging_bytes,
            "exchange": exchange_bytes(request, choice),
            "runtime": runtime_bytes(request, choice),
            "engine runtime": constants.cpu_process_bytes if on_cpu else engine_asleep_bytes(request),
        }
    )


def snapshot_bytes(facts: ModelFacts, choice: TrainingChoice, gpus: int) -> float:
    """Return host bytes of a save's snapshot on a node with `gpus`: weights (one copy, as Megatron) and optimizer
    states."""
    p = choice.parallel
    trained, ranks = (
        [trained_parameters(facts, stage, choice) for stage in stages(facts, choice)],
        min(gpus, p.world_size),
    )
    owned, states = (max(counts.owned(p) for counts in trained), max(optimizer_bytes(c, choice) for c in trained))
    if choice.sharding == "full":
        return ranks * (4 * (1 + choice.own_teacher) * owned + states)
    dense, experts = min(ranks, p.tp * p.pp), min(ranks, p.expert_size * p.pp)
    weights = max(dense * counts.dense + experts * counts.experts for counts in trained)
    return ranks * states + element_bytes(choice) * (1 + choice.own_teacher) * weights


def memory_checkpoint_bytes(facts: ModelFacts, choice: TrainingChoice, cluster: ClusterFacts) -> float:
    """Return host bytes of a node's checkpoints in memory: the newest one and the next, with several nodes also those
    of another node."""
    ranks = max(1, cluster.gpus_per_node)
    local = 2 * (1 + choice.critic) * snapshot_bytes(facts, choice, ranks)
    return local * (2 if choice.parallel.world_size > ranks else 1)


def host_memory(
    facts: ModelFacts,
    choice: TrainingChoice,
    cluster: ClusterFacts,
    colocated: bool,
    engine_weights: float,
    *,
    saves: bool = True,
    constants: Constants = DEFAULTS,
) -> float:
    """Return host bytes of a node: offloaded states, waiting adapters, sleeping engines, processes, object store and
    snapshots (`saves`: saves copy their states)."""
    ranks = max(1, cluster.gpus_per_node)
    trained = [trained_parameters(facts, stage, choice) for stage in stages(facts, choice)]
    worst = max(optimizer_bytes(params, choice) for params in trained)
    copies = 1 + (choice.reference and choice.adapters is None) + choice.critic + choice.own_teacher
    weights = most_weight_bytes(facts, choice) * copies
    offloaded = worst * (1 + choice.critic) if (colocated or choice.optimizer_offload) else 0.0
    offloaded += unadapted_bytes(facts, choice) + waiting_bytes(facts, choice)
    if choice.teacher_average and choice.sharding != "full" and choice.precision != "float32":
        offloaded += 4 * max(rank_parameters(facts, stage, choice).total for stage in stages(facts, choice))
    offloaded += most_weight_bytes(facts, choice) if choice.reference_offload and not colocated else 0.0
    asleep = weights + engine_weights * (1 if cluster.is_cpu else PINNED) if colocated else 0.0
    process = constants.trainer_host_bytes + (constants.engine_host_bytes if colocated else 0.0)
    snapshot = (1 + choice.critic) * snapshot_bytes(facts, choice, ranks) if saves else 0.0
    return ranks * (offloaded + asleep + process) + snapshot + node_bytes(cluster, constants)


def node_bytes(cluster: ClusterFacts, constants: Constants) -> float:
    """Return host bytes of a node's driver, scorers, Ray and object store. A cluster's Ray has a larger store."""
    return constants.session_host_bytes if cluster.nodes == 1 else constants.cluster_host_bytes
