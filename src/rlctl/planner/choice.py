"""The values that a plan decides: how training and generation are laid out over the devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlctl.config.facts import Fact
from rlctl.config.parallel import ParallelSpec
from rlctl.config.schema import keys_with
from rlctl.settings.generation import GenerationConfig
from rlctl.settings.other_models import ModelSizes
from rlctl.settings.training import TrainingConfig

TRAINING_CHOSEN = keys_with(TrainingConfig, Fact.EVERY_PLAN)
"""Keys of `training` that every plan of a training decides."""
GENERATION_CHOSEN = keys_with(GenerationConfig, Fact.EVERY_PLAN)
"""Keys of `generation` that every plan with engines decides."""
TEACHER_SIZES = keys_with(ModelSizes, Fact.EVERY_PLAN)
"""Keys of `teacher` or `reward_model` that every plan with such a model decides."""

Recompute = Literal["none", "selective", "full"]
Precision = Literal["float32", "bf16", "fp8", "fp4"]


@dataclass(frozen=True)
class EngineNumbers:
    """The numbers of an engine that its settings change: they determine memory and speed."""

    matrix_bytes: float | None = None
    """Bytes of a weight of the layers; None: as embedding and head."""
    cache_element_bytes: float | None = None
    """Bytes of an element of the KV cache; None: as of an activation."""
    graphs: bool = True
    """Whether a GPU decodes with CUDA graphs."""


PLAIN_ENGINE = EngineNumbers()
"""An engine with defaults only."""


LoraRefit = Literal["delta", "adapters", "merged"]
Split = Literal["outputs", "inputs", "none", "experts"]


@dataclass(frozen=True)
class AdaptedKind:
    """Adapters of one shape, which some layers of a kind have."""

    split: Split
    """The dimension of the matrix that tensor parallelism divides; experts are divided by expert parallelism."""
    inputs: int
    outputs: int
    rank: int
    dense: int = 0
    """Number of such adapters in all dense layers."""
    moe: int = 0
    """Number of such adapters in all layers of experts."""


@dataclass(frozen=True)
class LoraChoice:
    """Low-rank adapters that are trained instead of the weights (arXiv:2106.09685)."""

    rank: int
    kinds: tuple[AdaptedKind, ...] = ()
    tables: tuple[bool, bool] = (False, False)
    """Whether embedding and output layer are trained whole (`modules_to_save`)."""
    refit: LoraRefit = "merged"
    """How they reach the engines (`training.lora.refit`)."""
    held: int = 1
    """Adapters of these shapes over one base, each with optimizer states; all but one wait in host memory."""
    why: str = field(default="", compare=False)
    """The rule that chose `refit`."""
    why_turns: str = field(default="", compare=False)
    """Why runs of a sweep cannot have their own engines; empty: they can."""
    others: tuple[LoraChoice, ...] = field(default=(), compare=False)
    """The same adapters with the other ways that the planner compares by the time of a step."""

    @property
    def adds(self) -> bool:
        """Whether trainer and engines add adapters to products, and merge nothing."""
        return self.refit == "adapters"


@dataclass(frozen=True)
class TrainingChoice:
    """The training half of a plan: parallel sizes, memory savings and precision."""

    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    micro_batch_tokens: int = 4096
    """Tokens of one micro-batch over all context-parallel ranks."""
    recompute: Recompute = "none"
    optimizer_offload: bool = False
    """Optimizer states live in host memory, and visit the device for the update."""
    sharding: Literal["optimizer", "full"] = "optimizer"
    """`optimizer`: Megatron's DistributedOptimizer; `full`: FSDP2 shards weights and gradients too."""
    precision: Precision = "bf16"
    float8_copies: int = 1
    """Float8 copies of matrices in `fp8`: 1, or 2 with transposes, next to bfloat16 weights."""
    gradient_bytes: int = 4
    """Bytes of an accumulated gradient element."""
    moment_bytes: int = 8
    """Bytes of an optimizer's moments of a parameter: Adam has two, in float32 unless set otherwise."""
    muon_steps: int = 0
    """Newton-Schulz steps of Muon, which has one momentum per element of a layer's matrix; 0: all are AdamW's."""
    threads: int | None = None
    """Processor threads of each rank, on a CPU."""
    adapters: LoraChoice | None = None
    """None: all weights are trained."""
    reference: bool = False
    """A frozen copy of the weights is held next to them."""
    reference_offload: bool = False
    """The reference's weights wait in host memory and change places with the policy's for its log-probs."""
    valued: bool = False
    """The model returns a value per position in place of logits."""
    own_teacher: bool = False
    """The policy of an earlier step is a second model in its processes (`teacher.policy`)."""
    teacher_average: bool = False
    """That model is an average, which a narrow format keeps in float32 in host memory."""
    critic: bool = False
    """A value model of the same size is trained on the same devices."""
    critic_offload: bool = False
    """Policy and critic take turns on the devices; each waits in host memory while the other computes."""
    grouped_experts: bool = True
    """Experts of a rank run as one grouped matmul, not one after the other."""
    dispatcher: Literal["alltoall", "flex"] = "alltoall"
    """`flex`: DeepEP or HybridEP, which send a token once to each node."""
    logit_tokens: int | None = 1024
    """Most tokens whose logits exist at once; None: the whole micro-batch."""

    def chosen(self) -> dict[str, Any]:
        """Return the keys of `training` that every plan decides, with their values."""
        values = vars(self.parallel) | vars(self)
        return {key: values[key] for key in TRAINING_CHOSEN}

    def name(self) -> str:
        """Return a short name that leaves out sizes of 1: `TP4 PP2 DP8, full recompute`."""
        extras = [f"{self.recompute} recompute"] if self.recompute != "none" else []
        extras += ["optimizer in host memory"] if self.optimizer_offload else []
        extras += ["FSDP"] if self.sharding == "full" else []
        extras += [f"LoRA rank {self.adapters.rank}"] if self.adapters else []
        return ", ".join([self.parallel.name(), *extras])


@dataclass(frozen=True)
class GenerationChoice:
    """Layout of the vLLM engines: a replica has `tp` x `pp` devices, an engine `dp` replicas with shared experts."""

    engines: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    """Expert parallel size: `tp` x `dp` where experts are spread, else 1."""
    memory_fraction: float | None = 0.6
    kv_cache_bytes: float = 0.0
    """Bytes on one device (of the engine, on a CPU)."""
    kv_cache_tokens: int = 0
    """Tokens that the cache of one replica holds."""
    max_concurrent: int = 256
    """Most sequences decoded at once by one replica."""
    max_batched_tokens: int = 8192
    threads: int | None = None
    weight_bytes: float = 2.0
    """Bytes of a weight: 2 bf16, 1 fp8, 4 float32."""
    numbers: EngineNumbers = PLAIN_ENGINE
    runs: int = 1
    """Runs of a sweep that have their own engines, as many each; 1: all engines serve one run at a time."""

    @property
    def of_run(self) -> int:
        """Engines that sample the rollouts of one run."""
        return self.engines // self.runs

    @property
    def matrix_bytes(self) -> float:
        return self.numbers.matrix_bytes or self.weight_bytes

    @property
    def cache_element_bytes(self) -> float:
        return self.numbers.cache_element_bytes or (4.0 if self.weight_bytes == 4 else 2.0)

    @property
    def replica_gpus(self) -> int:
        return self.tp * self.pp

    @property
    def engine_gpus(self) -> int:
        return self.dp * self.replica_gpus

    @property
    def gpus(self) -> int:
        return self.engines * self.engine_gpus

    def name(self) -> str:
        sizes = (("TP", self.tp), ("PP", self.pp), ("DP", self.dp), ("EP", self.ep))
        engines = f"{self.engines} engine" + "s" * (self.engines > 1)
        engines += f" ({self.of_run} for each run)" if self.runs > 1 else ""
        return " ".join([engines, *(f"{name}{size}" for name, size in sizes if size > 1)])
