"""Constants of the memory and time model that are no property of a device: each with its source and physical bounds."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.planner.inputs.cluster import GIB

MUON_ROUND_ELEMENTS = 1 << 27
"""Most elements of the matrices that a rank orthogonalizes at once with Muon (a larger matrix is alone): 256 MiB in
bfloat16."""
OPTIMIZER_PART_BYTES = 256 * 1024**2
"""Most optimizer bytes on the device at once with `training.optimizer_offload` (a large parameter may exceed it)."""


@dataclass(frozen=True)
class Constants:
    """Efficiencies are shares of a peak rate; seconds and bytes otherwise."""

    # Training
    matmul_efficiency: float = 0.65
    """Share of the BF16 peak, for large matrices (cuBLAS on H100 reaches 0.65-0.75; fitted, see `FITTED`)."""
    traffic: float = 2.5
    """Times that a layer's activations cross the memory bus in a forward pass."""
    logit_traffic_bytes: float = 30.0
    """Bytes that a logit moves over the memory bus in a forward pass: written and read in bfloat16, widened, shifted by
    the maximum, and exponentiated in float32 (`backends/logprobs.py`)."""
    fp8_efficiency: float = 0.60
    """Share of the FP8 peak, for large matrices; scaling is inside."""
    fp4_efficiency: float = 0.45
    attention_efficiency: float = 0.45
    """Share of the BF16 peak, in causal flash attention forward and backward (FlashAttention-3 reports 0.4-0.75)."""
    half_width: int = 200
    """Columns of a split weight matrix at which a matmul runs at half its efficiency."""
    half_tokens: int = 300
    """Rows of a matmul at half its efficiency."""
    link_efficiency: float = 0.75
    """Share of NVLink, in ring collectives of hundreds of megabytes (nccl-tests: 0.75-0.85)."""
    network_efficiency: float = 0.53
    hbm_efficiency: float = 0.80
    tensor_overlap: float = 0.3
    """Share of tensor-parallel communication hidden behind matmuls without user buffers."""
    expert_overlap: float = 0.0
    """Share of expert all-to-all hidden behind computation."""
    data_overlap: float = 0.5
    """Share of gradient reduction and parameter gathering hidden behind the backward and forward pass."""
    gather_overlap: float = 0.4
    """Share of FSDP2's gathering of weights hidden behind a forward pass (no publication separates it)."""
    backward_overlap: float = 0.0
    """Share of FSDP2's communication hidden behind a backward pass (published training times of 38 s and 97 s with 28 s
    of computation)."""
    layer_host_s: float = 0.00082
    """Host time to launch one layer's forward pass, next to the device's work."""
    expert_host_s: float = 0.00025
    """Host time to launch one local expert's forward pass where experts run one after the other."""
    moe_layer_host_s: float = 0.0025
    """Host time of a layer's routing, permutation and dispatch, including the wait for token counts per expert."""
    micro_batch_host_s: float = 0.0021
    """Host time of a forward pass outside the layers: packing a row, copying it, the loss."""
    host_exposed: float = 0.6
    """Exposed share of host time when the device has more work (or vice versa): ends of passes, and host reads."""
    context_step_s: float = 0.0006
    """Host time of a context-parallel ring step in a layer, across nodes with packed rows split by sequence. A step
    launches a part of the kernels of a layer, which `layer_host_s` bounds, and an exchange."""
    expert_imbalance: float = 1.25
    """Tokens of the busiest rank over the mean."""
    packing_fill: float = 0.93
    """Share of a packed row that is tokens."""
    dynamic_padding: float = 0.04
    """Padding over tokens where rollouts of like length are padded to the longest (docs/training.md)."""
    step_imbalance: float = 1.05
    """Slowest data-parallel rank over the mean."""
    optimizer_step_s: float = 0.15
    """Host time of gradient norm, clipping and the update."""
    # Generation
    length_sigma: float = 1.0
    """Standard deviation of the logarithm of completion lengths (log-normal, cut at the limit)."""
    grown_together: float = 0.7
    """Mean share of a rollout's final length when the KV cache is full: 1/2 with all ages, 1 if all began together."""
    decode_bandwidth_efficiency: float = 0.8
    """Share of HBM bandwidth, reading weights and KV cache in a decode step."""
    decode_step_s: float = 0.0032
    """Scheduling, sampling and detokenization of one decode step, not hidden behind the GPU."""
    decode_sequence_s: float = 3e-05
    """The part of it that grows with the sequences in the batch."""
    decode_layer_s: float = 1e-05
    """Kernel launches and gaps of one layer in a CUDA graph."""
    moe_decode_layer_s: float = 1.5e-05
    """Routing, permutation and small grouped matmuls of one layer with experts."""
    replica_step_s: float = 1.2e-4
    """Messages between an engine's replicas per decode step (0.45 ms of CPU per four steps, measured with Ray)."""
    allreduce_latency_s: float = 1.5e-5
    """One small all-reduce over NVLink (nccl-tests, custom all-reduce)."""
    network_latency_s: float = 6e-05
    """One small all-reduce over the network."""
    nodes_step_s: float = 0.0075
    """The share of a decode step in which a multi-node engine distributes work and collects results."""
    prefill_efficiency: float = 0.45
    sampler_bytes: float = 16.0
    """vLLM 0.17 and later: bytes per sequence and vocabulary entry in the sampler's profile run (published profiles; 40
    before)."""
    # Refit
    refit_fixed_s: float = 0.5
    """Calls to all ranks, mapping memory, sleeping and cache reset, where policy and engines share devices (a whole
    refit of 1.24 billion parameters, offloading included, took 0.5 s on one H100, benchmarks/RESULTS.md)."""
    refit_handshake_s: float = 0.2
    """Starting and ending a transfer on all ranks (a published 8 GB shard-to-shard refit takes 0.21 to 0.34 s)."""
    refit_piece_s: float = 1e-5
    """Launching the copy of one tensor's part (kernel launch). Of it rlctl's own
    host time is 1.2 microseconds (28,000 copies, `benchmarks/refit_boxes.py`)."""
    refit_quantize_s: float = 0.0003
    """Scaling and casting one tensor to float8 blocks in the engine: about ten kernels, and Python around them."""
    refit_link_efficiency: float = 0.4
    """Share of a link used by boxes of many tensors (published refits over 400 Gb/s: 0.06 for 1 GB per receiver, 0.15
    for 8, 0.30 and 0.46 for 42 and 50)."""
    disk_bytes_per_s: float = 2e9
    """Through a file system that every node sees (a parallel file system gives one client 1 to 4 GB/s)."""
    pageable_copy: float = 0.25
    """Share of the host link that copies from and to pageable memory reach."""
    pinned_copy: float = 0.8
    """Share of the host link that copies from and to pinned memory reach while all devices of a node copy (one H100
    alone: 54.5 GB/s, its whole rate)."""
    # Everything else
    reward_s: float = 1.0
    other_s: float = 0.5
    # Memory
    runtime_bytes: float = 1.6 * GIB
    """CUDA context, cuBLAS workspaces and allocator of one process."""
    communicator_bytes: float = 0.25 * GIB
    """NCCL buffers of one communicator."""
    # From the one GPU run on record (1.24 billion parameters, one H100, benchmarks/RESULTS.md): training without
    # TransformerEngine took 2.7 times the prediction, and an engine without CUDA graphs twice.
    own_layers_slowdown: float = 2.7
    eager_layer_s: float = 0.0018
    fragmentation: float = 0.05
    """Share of the memory that the allocator hands out and takes back in a phase."""
    engine_asleep_bytes: float = 7 * GIB
    """Bytes of a sleeping vLLM engine: context, CUDA graphs, NCCL (6.8 to 7.2 GiB with graphs and TP, published, e.g.
    vLLM issue 47654; below 1 GiB without)."""
    cpu_policy_bytes: float = 0.45 * GIB
    """Resident size of a policy's process without a model (`benchmarks/policy_memory.py`)."""
    cpu_library_bytes: float = 0.17 * GIB
    """Its part that is pages of library files, which processes share. Kernels differ in how many they map at once: 0.33
    GiB with Linux 6.18."""
    cpu_activation_copies: float = 1.4
    """Extra bytes of a Megatron layer on a CPU, compared with fused kernels: attention gathers the units of a row, and
    freed memory has gaps (the same benchmark)."""
    cpu_module_copies: float = 2.3
    """The same of transformers' modules (dtensor): torch's norms, rotations and gates keep what goes in and comes out
    of each operation."""
    cpu_kept: float = 0.38
    """Part of training's activations and logits that the C library keeps for the process."""
    cpu_process_bytes: float = 1.1 * GIB
    """Resident size of a Python process with torch and vLLM loaded."""
    logit_copy_bytes: float = 4.0
    """A logit's float32 copy, and the same again for its gradient; 0 where a fused loss works in place."""
    staging_bytes: float = 0.25 * GIB
    # Host memory of processes. Measured with CPU builds: imports of a trainer 0.5 GiB and of an engine 0.6 GiB, Ray's
    # processes on one machine 0.5 GiB, next to an object store of at most 0.5 GiB. CUDA's context and libraries, pinned
    # buffers and compiled graphs are an estimate (2.5 and 3.4 GiB): the GPU run on record did not measure host memory.
    trainer_host_bytes: float = 3.0 * GIB
    engine_host_bytes: float = 4.0 * GIB
    session_host_bytes: float = 3.0 * GIB
    cluster_host_bytes: float = 10.0 * GIB
    """Refit bytes per side: two buffers, forwarded boxes and views; set by `refit.staging_mb`."""


DEFAULTS = Constants()
FITTED = {
    "matmul_efficiency": (0.5, 0.8),
    "layer_host_s": (0.0004, 0.003),
    "moe_layer_host_s": (0.001, 0.006),
    "micro_batch_host_s": (0.001, 0.06),
    "host_exposed": (0.0, 0.6),
    "context_step_s": (1e-5, 0.0006),
    "decode_step_s": (0.001, 0.008),
    "decode_sequence_s": (1e-6, 3e-5),
    "nodes_step_s": (0.0005, 0.02),
    "network_latency_s": (3e-6, 6e-5),
    "network_efficiency": (0.4, 0.9),
}
"""Constants fitted by `benchmarks/planner.py --fit` to published step times, with physical bounds; others come from
data sheets, papers and measurements."""

RANGES = {
    "total": (0.73, 1.31),
    "training": (0.86, 1.29),
    "generation": (0.92, 1.14),
    "refit": (0.55, 2.11),
    "logprobs": (0.72, 1.55),
}
"""Prediction factors that contain nine of ten published times (per phase, all but the extremes), cross-validated by
`benchmarks/planner.py --fit`. Refits: the lower end is rlctl's on one H100, the upper that of trainers that gather."""
CPU_RANGE = (0.5, 2.0)
"""The same on a CPU, for all phases. Phases of five runs of three models on two cores took 0.8 to 1.4 times the
predicted seconds; these cores had set the constants (`benchmarks/RESULTS.md`)."""
CALIBRATED_RANGE = (0.8, 1.25)
"""The same for phases that a run on this machine calibrated: steps of one model or length, predicted after a run of
another (`benchmarks/RESULTS.md`)."""
RESOLUTION = 0.18
"""Plans whose seconds differ by less are equal: six of ten published steps are within this part of a prediction that
leaves their publication out."""
