"""Constants of the memory and time model that are no property of a device: each with its source and physical bounds."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.planner.inputs.cluster import GIB

OPTIMIZER_PART_BYTES = 256 * 1024**2
"""Most bytes of an optimizer's states that are on the device at once where they live in host memory
(`training.optimizer_offload`); a single parameter's may be more."""


@dataclass(frozen=True)
class Constants:
    """Efficiencies are shares of a peak rate; seconds and bytes otherwise."""

    # Training
    matmul_efficiency: float = 0.72
    """Share of the BF16 peak, for large matrices (cuBLAS on H100 reaches 0.65-0.75)."""
    traffic: float = 2.5
    """Times that a layer's activations cross the memory bus in a forward pass."""
    fp8_efficiency: float = 0.60
    """Share of the FP8 peak, for large matrices; scaling is inside."""
    fp4_efficiency: float = 0.45
    attention_efficiency: float = 0.45
    """Share of the BF16 peak, in causal flash attention forward and backward (FlashAttention-3 reports 0.4-0.75)."""
    half_width: int = 200
    """Columns of a split weight matrix at which a matmul runs at half its efficiency."""
    half_tokens: int = 300
    """Rows of a matmul at which it runs at half its efficiency."""
    link_efficiency: float = 0.75
    """Share of NVLink, in ring collectives of hundreds of megabytes (nccl-tests: 0.75-0.85)."""
    network_efficiency: float = 0.75
    hbm_efficiency: float = 0.80
    tensor_overlap: float = 0.3
    """Share of tensor-parallel communication hidden behind matmuls without user buffers."""
    expert_overlap: float = 0.0
    """Share of expert all-to-all hidden behind computation."""
    data_overlap: float = 0.5
    """Share of gradient reduction and parameter gathering hidden behind the backward and forward pass."""
    gather_overlap: float = 0.5
    """Share of FSDP2's gathering of weights hidden behind a forward pass (published log-probs of 8B and 70B models
    by DTensor, in `benchmarks/data/published_recipes.csv`)."""
    backward_overlap: float = 0.0
    """Share of FSDP2's gathering of weights and summing of gradients hidden behind a backward pass (the same runs'
    training: 38 s and 97 s of steps whose computation takes 28 s)."""
    layer_host_s: float = 0.0006
    """Host time to launch one layer's forward pass: a floor under its computation."""
    expert_host_s: float = 0.00025
    """Host time to launch one local expert's forward pass where experts run one after the other."""
    moe_layer_host_s: float = 0.0010
    """Host time of routing, permutation and dispatch of one layer's forward pass."""
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
    decode_bandwidth_efficiency: float = 0.72
    """Share of HBM bandwidth, reading weights and KV cache in a decode step."""
    decode_step_s: float = 0.0035
    """Scheduling, sampling and detokenization of one decode step, not hidden behind the GPU."""
    decode_sequence_s: float = 6e-6
    """The part of it that grows with the sequences in the batch."""
    decode_layer_s: float = 2.0e-5
    """Kernel launches and gaps of one layer in a CUDA graph."""
    moe_decode_layer_s: float = 6.0e-5
    """Routing, permutation and small grouped matmuls of one layer with experts."""
    replica_step_s: float = 1.2e-4
    """Messages between the first replica of an engine and one of the others, by decode step (0.45 ms of a processor for
    each four steps, measured with Ray on a CPU machine)."""
    allreduce_latency_s: float = 1.5e-5
    """One small all-reduce over NVLink (nccl-tests, custom all-reduce)."""
    network_latency_s: float = 6e-5
    """One small all-reduce over the network."""
    prefill_efficiency: float = 0.45
    sampler_bytes: float = 16.0
    """vLLM 0.17 and later: bytes per sequence and vocabulary entry that the sampler's profile run holds
    (published memory profiles; 40 before 0.17)."""
    # Refit
    refit_fixed_s: float = 2.0
    """Waking, sleeping and cache reset, where policy and engines share devices."""
    refit_handshake_s: float = 0.2
    """Starting and ending a transfer on all ranks (a published 8 GB shard-to-shard refit takes 0.21 to 0.34 s)."""
    refit_piece_s: float = 1e-5
    """Launching the copy of one tensor's part (kernel launch)."""
    refit_link_efficiency: float = 0.4
    """Share of a link, by boxes of many tensors (published shard-to-shard refits over 400 Gb/s a device: 0.06 for 1 GB
    a receiver, 0.15 for 8, 0.30 and 0.46 for 42 and 50)."""
    disk_bytes_per_s: float = 2e9
    """Through a file system that every node sees (a parallel file system gives one client 1 to 4 GB/s)."""
    pageable_copy: float = 0.25
    """Share of the host link that copies from and to pageable memory reach."""
    pinned_copy: float = 0.8
    """Share of the host link that copies from and to pinned memory reach while all devices of a node copy."""
    # Everything else
    reward_s: float = 1.0
    other_s: float = 1.5
    # Memory
    runtime_bytes: float = 1.6 * GIB
    """CUDA context, cuBLAS workspaces and allocator of one process."""
    communicator_bytes: float = 0.25 * GIB
    """NCCL buffers of one communicator."""
    fragmentation: float = 0.05
    """Share of the memory that the allocator hands out and takes back in a phase."""
    engine_asleep_bytes: float = 7 * GIB
    """Bytes that a sleeping vLLM engine keeps: context, CUDA graphs, NCCL (6.8 to 7.2 GiB with graphs and tensor
    parallelism, in published measurements, vLLM's issue 47654 among them; less than 1 GiB with neither)."""
    cpu_process_bytes: float = 1.1 * GIB
    """Resident size of a Python process with torch and Megatron or vLLM loaded."""
    logit_copy_bytes: float = 4.0
    """A logit's float32 copy, and the same again for its gradient; 0 where a fused loss works in place."""
    staging_bytes: float = 0.25 * GIB
    """Bytes that a refit holds on each side: two buffers, boxes of other ranks on their way, and views of what is
    packed. `refit.staging_mb` sets it."""


DEFAULTS = Constants()
