"""Sections on training: backend, parallelism, optimizer, schedules."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rlctl.config.facts import CHOSEN, FOR_A_MACHINE, LAYOUT, PLANNED, REHEARSAL_DETAIL, SIZE, Flag, Unloadable
from rlctl.config.section import (
    NonNegative,
    NonNegativeNumber,
    PassThrough,
    PathText,
    Positive,
    PositiveNumber,
    Section,
    Threads,
    changed,
)

LogprobColumn = Literal["old_logprobs", "reference_logprobs", "teacher_logprobs"]
"""Log-probs of response tokens that the ranks of policy or teacher compute before training."""


LoraRefit = Literal["auto", "delta", "adapters", "merged"]
LORA_RANK = 16
"""Rank of `--lora` without a number."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA), trained instead of all weights."""

    rank: Annotated[
        NonNegative,
        Unloadable(),
        Flag("lora", f"Train LoRA adapters, not all weights; RANK defaults to {LORA_RANK}.", metavar="[RANK]"),
    ] = 0
    """Rank of the adapters; 0 trains all weights."""
    adapter: Annotated[
        PathText | None, Unloadable(), Flag("adapter", "Start from the adapter of this PEFT directory.")
    ] = None
    """PEFT directory to start from. Its adapter_config.json gives rank, alpha, targets and patterns, and every key here
    that says something else is refused."""
    alpha: PositiveNumber = 32.0
    """Scale of the adapters, as alpha / rank (`rslora`: alpha / sqrt(rank))."""
    targets: Annotated[str | Annotated[tuple[str, ...], Field(min_length=1)], Unloadable()] = ("attention", "mlp")
    """Layers with adapters: a list of `attention` and `mlp` (projections of attention, and of MLPs, dense and shared
    experts), `all-linear` (PEFT's word: also routers, routed experts and the down projections of latent attention),
    `peft-default` (the layers that PEFT adapts in this type of model where none are named, mostly q_proj and v_proj),
    and names of layers or ends of names as in PEFT's `target_modules` and `target_parameters` (`q_proj`); or one
    regular expression that matches whole names."""
    exclude: Annotated[str | tuple[str, ...], Unloadable()] = ()
    """Layers of the targets without adapters, named in the same way; entries may also be shell patterns
    (`*.out_proj`)."""
    rank_pattern: Annotated[dict[str, Positive], Unloadable()] = {}
    """Ranks of some layers, as in PEFT: by a regular expression that matches the end of a name from a dot on; the first
    match counts."""
    alpha_pattern: Annotated[dict[str, PositiveNumber], Unloadable()] = {}
    """Alphas of some layers, in the same way."""
    rslora: Annotated[bool, Unloadable()] = False
    """Scale adapters by alpha / sqrt(rank) (rank-stabilized LoRA, arXiv:2312.03732)."""
    dropout: Annotated[float, Field(ge=0, lt=1), Unloadable()] = 0.0
    """Share of the adapters' inputs that training passes set to 0, as PEFT's `lora_dropout`; in methods without
    rollouts. The other passes (reference, validation) have no dropout."""
    modules_to_save: Annotated[tuple[str, ...], Unloadable()] = ()
    """Modules that are trained whole beside the adapters, as in PEFT: the embedding (`embed_tokens`) and the output
    layer (`lm_head`); tied, both are one matrix. With --backend dtensor."""
    refit: Annotated[LoraRefit, PLANNED | LAYOUT] = "auto"
    """How adapters reach the engines: delta (send the base once, then A and B; engines keep the base and write base +
    alpha / rank B A over their weights), adapters (send the same; engines and trainer add alpha / rank B A x to each
    product, on CPUs) or merged (send all merged weights in each refit). auto: the planner chooses."""

    @property
    def adds(self) -> bool:
        """Whether trainer and engines add adapters to products, and merge nothing."""
        return self.refit == "adapters"

    @field_validator("targets", "exclude", "rank_pattern", "alpha_pattern")
    @classmethod
    def validate_patterns(cls, value: Any) -> Any:
        """Refuse invalid regular expressions in values that PEFT compiles."""
        for pattern in (value,) if isinstance(value, str) else value if isinstance(value, dict) else ():
            try:
                re.compile(pattern if isinstance(value, str) else rf"(.*\.)?({pattern})$")
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def validate_rank(self) -> LoraConfig:
        for key in ("rank_pattern", "alpha_pattern", "rslora", "dropout", "modules_to_save"):
            if getattr(self, key) and not self.rank and not self.adapter:
                raise ValueError(f"training.lora.{key} has no effect: training.lora.rank = 0 trains all weights")
        return self


class QuantizationConfig(Section):
    """Quantization-aware training: policy and engines compute with weights rounded to a grid and stored in model.dtype;
    gradients update the optimizer's float32 weights (straight-through)."""

    format: Literal["none", "nvfp4"] = "none"
    """Grid of the weights: nvfp4 has 4-bit numbers (E2M1), a scale (E4M3) for each block along the inputs, and a
    float32 scale for each matrix; activations are not rounded."""
    block: Literal[16, 32] = 16
    """Weights of a row that share a scale; NVFP4's tensor cores take 16."""
    tensors: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Published names of weights to round, as patterns such as `*.mlp.*`. Embeddings, the output layer and routers are
    never rounded."""
    exclude: tuple[str, ...] = ()
    """Patterns of weights to leave out of `tensors`."""


class TrainingConfig(Section):
    """Training of the policy: backend, parallelism, packing, memory."""

    backend: Annotated[str, CHOSEN, Flag("backend", "megatron, dtensor (FSDP2), or auto: megatron if it can.")] = "auto"
    """Training backend; auto is megatron if it can run the configuration, else dtensor. dtensor trains transformers'
    modules with FSDP2, which shards weights, gradients and optimizer states over the data parallel ranks."""
    tp: Annotated[Positive | None, SIZE, Flag("tp", "Tensor parallel size of training.")] = None
    """Tensor parallel size."""
    pp: Annotated[Positive | None, SIZE] = None
    """Pipeline parallel size."""
    vpp: Annotated[Positive | None, SIZE] = None
    """Virtual pipeline stages on each pipeline rank."""
    first_stage_layers: Annotated[Positive | None, CHOSEN] = None
    """Layers of the first pipeline stage, which also has the embedding; unset: an even split."""
    last_stage_layers: Annotated[Positive | None, CHOSEN] = None
    """Layers of the last pipeline stage, which also has the output layer; unset: an even split."""
    cp: Annotated[Positive | None, SIZE] = None
    """Context parallel size: number of ranks that share one row of tokens."""
    ep: Annotated[Positive | None, SIZE] = None
    """Expert parallel size."""
    etp: Annotated[Positive | None, SIZE] = None
    """Tensor parallel size of the experts."""
    dp: Annotated[Positive | None, SIZE, Flag("dp", "Data parallel size of training.")] = None
    """Data parallel size."""
    replicate: Annotated[Positive | None, CHOSEN] = None
    """Number of copies of the weights that FSDP2 keeps (dtensor), each sharded over dp / replicate ranks; unset: 1."""
    sequence_parallel: Annotated[bool | None, SIZE | REHEARSAL_DETAIL] = None
    """Split norms and residuals over the tensor parallel ranks (sequence parallelism)."""
    recompute: Annotated[Literal["none", "selective", "full"] | None, SIZE] = None
    """Activation recomputation: none, attention and norms (selective), or whole layers (full). With `selective`,
    `megatron.recompute_modules` can name other parts of a layer (core_attn, layernorm, mla_up_proj, mlp, moe,
    shared_experts)."""
    optimizer_offload: Annotated[bool | None, SIZE] = None
    """Keep optimizer states in host memory; the update moves them to the device in parts."""
    micro_batch_tokens: Annotated[Positive | None, SIZE] = None
    """Maximum number of tokens in one packed row (micro-batch) of a rank."""
    packing: Annotated[bool, FOR_A_MACHINE] = True
    """Sequence packing: put rollouts of different lengths into one row; false: one row per rollout."""
    dynamic_batching: Annotated[bool, FOR_A_MACHINE] = False
    """Replace packing: pad rollouts of similar length to the longest, as many as fit `micro_batch_tokens`."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all its rollouts in a row (needs packing); gradients are the same."""
    offload: bool | None = None
    """Move weights and optimizer to host memory while the engines generate; unset: on shared GPUs. With a critic, true
    also offloads policy and critic while the other computes; unset: if both together do not fit."""
    router_replay: bool = False
    """Route each token to the experts that the engine chose during generation; expert weights are still the
    policy's."""
    freeze_router: bool = False
    """Freeze the routers of experts. Routing still changes as the layers below train."""
    lora: LoraConfig = LoraConfig()
    quantization: QuantizationConfig = QuantizationConfig()
    threads: Annotated[Threads | None, CHOSEN | REHEARSAL_DETAIL] = None
    """Number of CPU threads of each training process."""
    env: dict[str, str] = {}
    """Environment variables of the training processes."""

    @model_validator(mode="after")
    def validate_one_way_of_batching(self) -> TrainingConfig:
        if self.packing and self.dynamic_batching:
            raise ValueError("training.dynamic_batching replaces training.packing: set training.packing=false")
        return self

    @model_validator(mode="after")
    def validate_quantization(self) -> TrainingConfig:
        settings = self.quantization
        if settings.format == "none" and settings != QuantizationConfig():
            odd = next(iter(dict(changed(settings, QuantizationConfig(), "training.quantization."))))
            raise ValueError(f"{odd} has no effect: training.quantization.format = none")
        if settings.format != "none" and self.lora.rank > 0:
            raise ValueError(
                f"training.quantization.format = {settings.format} does not go with this: training.lora.rank > 0 "
                "trains adapters of weights that stay"
            )
        return self


Rounding = Literal["unbiased", "nearest"]


def _optimizer_name(name: Any) -> Any:
    return {"adam": "adamw", "dist_muon": "muon"}.get(name, name)


class OptimizerConfig(PassThrough, section="optimizer"):
    """AdamW, or Muon. Further keys are fields of Megatron's OptimizerConfig."""

    optimizer: Annotated[Literal["adamw", "muon"], BeforeValidator(_optimizer_name), Unloadable()] = "adamw"
    """Optimizer: adamw, or muon (arXiv:2502.16982) for the matrices of hidden layers, with AdamW for the embedding,
    head, norms and biases. Megatron's name `adam` is adamw."""
    lr: Annotated[PositiveNumber, Flag("lr", "Learning rate.")] = 1e-6
    """Learning rate; with a schedule, its peak. SFT, reward models and distillation on texts default to 1e-5."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the mean of squared gradients."""
    eps: PositiveNumber = 1e-8
    """Constant that is added to the denominator."""
    weight_decay: NonNegativeNumber = 0.0
    """Weight decay; by default it is decoupled from the gradient (AdamW)."""
    clip_grad: NonNegativeNumber = 1.0
    """Largest norm of the gradient; 0 turns clipping off."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of Muon's mean of gradients."""
    muon_nesterov: bool = True
    """Nesterov momentum: orthogonalize the mean of gradients one step ahead."""
    muon_steps: Annotated[Positive, Field(le=20)] = 5
    """Newton-Schulz iterations of Muon's orthogonalization."""
    muon_scale: PositiveNumber = 0.2
    """Size of Muon's updates: an orthogonal [rows, columns] update is multiplied by this and by
    sqrt(max(rows, columns)). 0.2 gives AdamW's root mean square, so `lr` and `weight_decay` of AdamW apply."""
    rounding: Rounding = "unbiased"
    """Rounding of the optimizer's float32 weights to bfloat16 or float16: unbiased keeps the mean; nearest loses
    updates that are small relative to a weight."""


class SchedulerConfig(Section):
    """Learning rate and weight decay over the steps of a run, as in Megatron's OptimizerParamScheduler."""

    warmup_steps: NonNegative = 0
    """Number of steps over which the learning rate rises linearly from `init_lr`."""
    init_lr: NonNegativeNumber = 0.0
    """Learning rate at the start of the warm-up."""
    decay: Literal["constant", "linear", "cosine", "inverse-square-root", "wsd"] = "constant"
    """Decay of the learning rate after the warm-up; wsd (warm-up, stable, decay) decays only at the end."""
    decay_steps: Positive | None = None
    """Step at which `min_lr` is reached; unset: run.steps."""
    min_lr: NonNegativeNumber = 0.0
    """Learning rate at the end of the decay."""
    wsd_steps: Positive | None = None
    """Number of steps of the decay at the end of wsd; unset: the last fifth."""
    wsd_decay: Literal["linear", "cosine", "exponential", "minus-sqrt"] = "linear"
    """Form of the decay at the end of wsd."""
    start_weight_decay: NonNegativeNumber | None = None
    """Weight decay of the first step; unset: optimizer.weight_decay in all steps."""
    end_weight_decay: NonNegativeNumber | None = None
    """Weight decay after `weight_decay_steps`."""
    weight_decay_steps: Positive | None = None
    """Number of steps over which the weight decay changes; unset: run.steps."""
    weight_decay_style: Literal["constant", "linear", "cosine"] = "linear"
    """Form of the change of the weight decay."""

    @model_validator(mode="after")
    def validate_ends_of_the_weight_decay(self) -> SchedulerConfig:
        if (self.start_weight_decay is None) != (self.end_weight_decay is None):
            raise ValueError("scheduler.start_weight_decay and scheduler.end_weight_decay must be set together")
        if self.weight_decay_style == "constant" and self.start_weight_decay != self.end_weight_decay:
            raise ValueError("scheduler.weight_decay_style = constant needs equal start_ and end_weight_decay")
        return self


class DdpConfig(PassThrough, section="ddp"):
    """Fields of Megatron's DistributedDataParallelConfig: storage and reduction of gradients."""


class MegatronConfig(PassThrough, section="megatron"):
    """Fields of Megatron's TransformerConfig, which override rlctl's values."""
