"""The values that a plan decides: how training and generation are laid out over the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]
Precision = Literal["float32", "bf16", "fp8", "fp4"]


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters that are trained instead of the weights (arXiv:2106.09685)."""

    rank: int
    attention: bool = True
    mlp: bool = True
    """Of dense MLPs and shared experts; routed experts have none."""


@dataclass(frozen=True)
class TrainingChoice:
    """Layout of the policy. Sizes as Megatron names them."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    micro_batch_tokens: int = 4096
    """Tokens of one micro-batch over all context-parallel ranks."""
    recompute: Recompute = "none"
    optimizer_offload: bool = False
    """Optimizer states live in host memory, and visit the device for the update."""
    sharding: Literal["optimizer", "full"] = "optimizer"
    """`optimizer`: Megatron's DistributedOptimizer; `full`: FSDP2 shards weights and gradients too."""
    precision: Precision = "bf16"
    float8_copies: int = 1
    """In `fp8`, of the matrices in float8: 1, or 2 where they are held beside weights in bfloat16, transposed too."""
    gradient_bytes: int = 4
    """Bytes of an accumulated gradient element."""
    threads: int | None = None
    """Processor threads of each rank, on a CPU."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage; None: an even split, or as even as it goes."""
    last_stage_layers: int | None = None
    adapters: Adapters | None = None
    """None: all weights are trained."""
    reference: bool = False
    """A frozen copy of the weights is held beside them."""
    grouped_experts: bool = True
    """Experts of a rank run as one grouped matmul, not one after the other."""
    dispatcher: Literal["alltoall", "flex"] = "alltoall"
    """`flex`: DeepEP or HybridEP, which send a token once to each node."""
    logit_tokens: int | None = 1024
    """Most tokens whose logits exist at once; None: the whole micro-batch."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.tp * self.cp * self.dp // (self.ep * self.etp))

    def name(self) -> str:
        """Short name, sizes of 1 left out: `TP4 PP2 DP8, full recompute`."""
        sizes = [(k, getattr(self, k)) for k in ("tp", "pp", "vpp", "cp", "ep", "etp")]
        parts = [f"{k.upper()}{v}" for k, v in sizes if v > 1] + [f"DP{self.dp}"]
        extras = [f"{self.recompute} recompute"] if self.recompute != "none" else []
        extras += ["optimizer in host memory"] if self.optimizer_offload else []
        extras += ["FSDP"] if self.sharding == "full" else []
        extras += [f"LoRA rank {self.adapters.rank}"] if self.adapters else []
        return ", ".join([" ".join(parts), *extras])


@dataclass(frozen=True)
class GenerationChoice:
    """Layout of the vLLM engines. A replica of `tp` x `pp` devices; `dp` replicas form one engine with shared
    experts."""

    engines: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    """Expert parallel size: `tp` x `dp` where experts are spread, else 1."""
    memory_fraction: float | None = 0.6
    kv_cache_bytes: float = 0.0
    """Of one device (of the engine, on a CPU)."""
    kv_cache_tokens: int = 0
    """Of one replica."""
    max_concurrent: int = 256
    """Most sequences decoded at once by one replica."""
    max_batched_tokens: int = 8192
    threads: int | None = None
    weight_bytes: float = 2.0
    """Bytes of a weight: 2 bf16, 1 fp8, 4 float32."""

    @property
    def replica_gpus(self) -> int:
        return self.tp * self.pp

    @property
    def gpus(self) -> int:
        return self.engines * self.dp * self.tp * self.pp

    @property
    def replicas(self) -> int:
        return self.engines * self.dp

    def name(self) -> str:
        parts = [f"{self.engines} engine" + "s" * (self.engines > 1)]
        parts += [
            f"{k.upper()}{v}" for k, v in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp), ("ep", self.ep)) if v > 1
        ]
        return " ".join(parts)
