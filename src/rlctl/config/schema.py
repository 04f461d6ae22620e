"""The one schema: every configuration section, its keys, its defaults and what they mean.

A key that is `None` by default is decided by the planner (parallelism, batches) or by the model (lengths, dtype).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A part of the configuration: immutable, and no key that nobody reads."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class PassThrough(Section):
    """A section that, besides its own keys, takes every field of a class of the installed Megatron-Core or vLLM.

    Which fields there are is checked where the configuration is resolved (`config.passthrough`).
    """

    model_config = ConfigDict(extra="allow")

    @property
    def passed(self) -> dict[str, Any]:
        """The fields that are handed on, by their own names."""
        return dict(self.model_extra or {})


class ModelConfig(Section):
    name: str | None = None
    """A local Hugging Face directory or a hub name."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: str | None = None
    """Directory or hub name of another tokenizer."""
    chat_template: str | None = None
    """A Jinja chat template: a file, or the text itself."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of training and generation; auto is float32 on a CPU and bfloat16 on a GPU."""
    convert: bool = True
    """Convert the model once into the checkpoint directory, where every run starts; false: start from its own files."""
    max_length: Positive | None = None
    """Most tokens of prompt and completion together."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class DataConfig(Section):
    name: str | None = None
    """`reasoning-gym:<task>`, a .jsonl or .parquet file, or a Hugging Face dataset name."""
    params: dict[str, Any] = {}
    """Parameters of a reasoning-gym task, for example `max_terms: 2`."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    prompt_field: str = "prompt"
    """Field that holds the prompt: a text, or a list of chat messages."""
    answer_field: str = "answer"
    """Field that holds the reference answer."""
    system_prompt: str | None = None
    """System message put before every prompt; an empty text suppresses the template's own."""
    prompt_suffix: str | None = None
    """Text appended to every prompt, for example how to state the answer."""
    shuffle: bool = True
    """Draw the prompts in an order that `run.seed` fixes."""
    size: Positive | None = None
    """Number of prompts to make (reasoning-gym) or to keep."""


class RewardTerm(Section):
    name: str
    """`task`, `exact-match`, `math-verify`, or `path/to/file.py:function`."""
    weight: float = 1.0


class RewardConfig(Section):
    terms: tuple[RewardTerm, ...] = ()
    """Scorers whose weighted sum is the reward."""
    extract: Literal["auto", "last-number", "last-line", "boxed", "answer-tag", "full"] = "auto"
    """How the answer is taken out of the completion; auto is what the task calls for."""
    timeout_s: float = Field(60.0, gt=0)
    """Limit for scoring one step's rollouts."""


class GrpoConfig(Section):
    steps: Positive = 100
    prompts: Positive = 8
    """Prompts a step."""
    generations: Annotated[int, Field(ge=2)] = 8
    """Rollouts a prompt (the group)."""
    baseline: Literal["mean", "leave-one-out"] = "mean"
    normalize_std: bool = True
    """Divide advantages by the standard deviation of their group."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """PPO lower bound: the ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """PPO upper bound: the ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Lower bound c of the loss for negative advantages (dual-clip PPO); unset: off."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the reference policy; 0 holds no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    loss_level: Literal["token", "sequence"] = "token"
    """Average over all tokens of the batch, or over sequences of their token averages."""
    importance_correction: Literal["off", "truncated", "masked"] = "truncated"
    """Correction for the difference between the engine's and the trainer's log-probs."""
    importance_cap: float = Field(2.0, gt=1)
    """Truncation bound of the importance weight; `masked` drops tokens outside [1/cap, cap]."""
    optimizer_steps: Positive = 1
    """Optimizer steps a batch (PPO mini-batches)."""
    logprob_diff_warning: float | None = Field(None, gt=0)
    """Mean absolute difference between the engine's and the trainer's log-probs above which a step warns; unset: by
    precision, 1e-4 for float32, 0.05 for bfloat16 and 0.2 where linear layers compute in float8."""
    logprob_diff_error: float | None = Field(None, gt=0)
    """Mean absolute difference that stops the run; unset: by precision, 1e-2 for float32, else 0.5."""
    router_replay: bool = False
    """The policy computes with the experts that the engine chose for each token, recorded in generation; the weights of
    the experts are still the policy's."""

    @property
    def recomputes_old_logprobs(self) -> bool:
        """Whether the trainer computes the old policy's log-probs before it trains.

        With one optimizer step a batch the old policy is the current one, and the importance correction compares the
        engine's log-probs with those of the training pass itself.
        """
        return self.optimizer_steps > 1

    @property
    def holds_reference(self) -> bool:
        """Whether a reference policy is held and evaluated."""
        return self.kl_coefficient > 0

    @model_validator(mode="after")
    def validate_batch_splits_into_optimizer_steps(self) -> GrpoConfig:
        if (self.prompts * self.generations) % self.optimizer_steps:
            raise ValueError(
                f"grpo.prompts x grpo.generations = {self.prompts * self.generations} rollouts do not split into "
                f"grpo.optimizer_steps = {self.optimizer_steps} equal parts"
            )
        return self


class LoraConfig(Section):
    """Low-rank adapters instead of all weights."""

    rank: NonNegative = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = Field(32.0, gt=0)
    """Adapters are scaled by alpha / rank."""
    targets: Annotated[tuple[Literal["attention", "mlp"], ...], Field(min_length=1)] = ("attention", "mlp")
    """Layers with adapters: projections of attention, and of MLPs (dense and shared experts; not routed experts)."""


class TrainingConfig(Section):
    backend: Literal["auto", "megatron", "dtensor"] = "auto"
    """What trains; auto is megatron. dtensor (FSDP2: weights, gradients and states are sharded over the data parallel
    ranks) can be planned for and is not run yet."""
    tp: Positive | None = None
    """Tensor parallel size."""
    pp: Positive | None = None
    """Pipeline parallel size."""
    vpp: Positive | None = None
    """Virtual pipeline stages of each pipeline rank."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage, which also has the embedding; unset: an even split, or as even as it goes."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage, which also has the output layer."""
    cp: Positive | None = None
    """Context parallel size: the ranks that share one row of tokens."""
    ep: Positive | None = None
    """Expert parallel size."""
    etp: Positive | None = None
    """Tensor parallel size of the experts."""
    dp: Positive | None = None
    """Data parallel size."""
    sequence_parallel: bool | None = None
    """Split norms and residuals over the tensor parallel ranks."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Activations that the backward pass computes again: none, attention and norms, or whole layers. With `selective`,
    `megatron.recompute_modules` names other parts of a layer (core_attn, layernorm, mla_up_proj, mlp, moe,
    shared_experts)."""
    optimizer_offload: bool | None = None
    """Keep the optimizer's states in host memory; they visit the device for the update, a part at a time."""
    micro_batch_tokens: Positive | None = None
    """Most tokens of one packed row (micro-batch) on one rank."""
    packing: bool = True
    """Put rollouts of different lengths into one row; off gives each rollout a row of its own."""
    dynamic_batching: bool = False
    """Instead of packing: rollouts of like length, padded to the longest, as many as `micro_batch_tokens` take."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all its rollouts in a row (needs packing); gradients are the same."""
    offload: bool | None = None
    """Weights and optimizer wait in host memory while the engines generate; unset: on GPUs that both engines share."""
    freeze_router: bool = False
    """Train no router of experts; where tokens go still changes with the layers below."""
    lora: LoraConfig = LoraConfig()
    threads: Positive | None = None
    """CPU threads of each training process."""

    @model_validator(mode="after")
    def validate_one_way_of_batching(self) -> TrainingConfig:
        if self.packing and self.dynamic_batching:
            raise ValueError("training.dynamic_batching is instead of training.packing: set training.packing=false")
        return self


class GenerationConfig(Section):
    engines: Positive | None = None
    """Number of vLLM engines."""
    tp: Positive | None = None
    """Tensor parallel size of one engine."""
    pp: Positive | None = None
    """Pipeline parallel size of one engine."""
    dp: Positive | None = None
    """Data parallel replicas in one engine, which share its experts."""
    ep: Positive | None = None
    """Expert parallel size of one engine: 1, or tp x dp."""
    colocated: bool | None = None
    """Generate on the devices that train; off: on devices of their own."""
    max_new_tokens: Positive = 512
    """Most tokens of a completion; fewer where the prompt leaves fewer of `model.max_length`."""
    mean_length: Positive | None = None
    """Mean generated tokens that the planner reckons with; unset: half of max_new_tokens."""
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    """Sample among the k most likely tokens; -1 is all."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the model's own end tokens."""
    memory_fraction: float | None = Field(None, gt=0, lt=1)
    """Part of a GPU's memory that vLLM may use."""
    kv_cache_bytes: Positive | None = None
    """Size of the KV cache: of one engine on a CPU, of each GPU of an engine otherwise."""
    max_concurrent: Positive | None = None
    """Most sequences decoded at once by one engine."""
    max_batched_tokens: Positive | None = None
    """Most tokens of one forward pass of an engine."""
    threads: Positive | None = None
    """CPU threads of each engine."""
    plain_parameters: bool = False
    """On a CPU, keep matrices as published instead of repacked: refits are faster, decoding is slower."""


class RefitConfig(Section):
    timeout_s: float = Field(300.0, gt=0)
    """Limit for each wait of a refit."""
    verify_every: NonNegative = 50
    """Compare every tensor on the first refit and then every so many steps; 0: the first only."""
    in_flight: Literal["wait", "keep", "abort"] = "wait"
    """Completions that are being generated when a refit is due: wait for them, keep them and go on under the new
    weights (each token carries the version that chose it), or end them."""
    verify_sample: NonNegative = 8
    """Tensors compared in the refits between, others each time; 0: none."""
    mover: Literal["auto", "shared-memory", "cuda-ipc", "collective", "disk"] = "auto"
    """What carries the bytes; auto: by where the engines are."""
    directory: str | None = None
    """Where the disk mover writes versions: a directory that every node sees."""
    sparse: bool = False
    """Send only the elements that have changed since the version before."""
    full_every: Positive = 20
    """With sparse: everything is sent every so many refits."""
    staging_mb: Positive | None = None
    """Memory between the two sides for each engine worker, in MiB: two buffers that are filled and read in turn. Unset:
    16 between processors, where what fits the cache is fastest, and 256 between GPUs, where fewer rounds are."""


class OptimizerConfig(PassThrough):
    """Megatron's Adam; further keys are fields of its OptimizerConfig."""

    lr: float = Field(1e-6, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, ge=0)
    """Largest norm of the gradient; 0 does not clip."""


class SchedulerConfig(Section):
    """Learning rate and weight decay over the steps of a run, as Megatron's OptimizerParamScheduler has them."""

    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises linearly from `init_lr`."""
    init_lr: float = Field(0.0, ge=0)
    """Where the warm-up starts."""
    decay: Literal["constant", "linear", "cosine", "inverse-square-root", "wsd"] = "constant"
    """How the learning rate falls after the warm-up; wsd (warm-up, stable, decay) holds it and falls at the end."""
    decay_steps: Positive | None = None
    """Step at which `min_lr` is reached; unset: grpo.steps."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the decay."""
    wsd_steps: Positive | None = None
    """Steps of the fall at the end of wsd; unset: the last fifth."""
    wsd_decay: Literal["linear", "cosine", "exponential", "minus-sqrt"] = "linear"
    """How wsd falls."""
    start_weight_decay: float | None = Field(None, ge=0)
    """Weight decay of the first step; unset: optimizer.weight_decay throughout."""
    end_weight_decay: float | None = Field(None, ge=0)
    """Weight decay at the end of its way."""
    weight_decay_steps: Positive | None = None
    """Steps from the first weight decay to the last; unset: grpo.steps."""
    weight_decay_style: Literal["constant", "linear", "cosine"] = "linear"
    """How the weight decay changes."""

    @model_validator(mode="after")
    def validate_ends_of_the_weight_decay(self) -> SchedulerConfig:
        if (self.start_weight_decay is None) != (self.end_weight_decay is None):
            raise ValueError("scheduler.start_weight_decay and end_weight_decay are set together or not at all")
        if self.weight_decay_style == "constant" and self.start_weight_decay != self.end_weight_decay:
            raise ValueError("scheduler.weight_decay_style = constant needs equal start_ and end_weight_decay")
        return self


class DdpConfig(PassThrough):
    """Fields of Megatron's DistributedDataParallelConfig: gradient buffers and how they are reduced."""


class MegatronConfig(PassThrough):
    """Fields of Megatron's TransformerConfig, over those that rlctl sets."""


class VllmConfig(PassThrough):
    """Fields of vLLM's EngineArgs, over those that rlctl sets."""


class ClusterConfig(Section):
    nodes: Positive | None = None
    gpus_per_node: NonNegative | None = None
    gpu: str = "auto"
    """GPU type (h100, a100, ...), `auto` for what is there, or `cpu`."""
    ray_address: str | None = None
    """Join this Ray cluster; unset: start one on this machine and stop it at the end."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Limit for starting Ray and the workers."""
    step_timeout_s: float = Field(3600.0, gt=0)
    """Limit for each wait of a step."""
    engine_restarts: NonNegative = 3
    """Generation engines that a run may lose: each is replaced and refitted; 0: the run ends with the first."""

    @model_validator(mode="after")
    def validate_gpus_or_none(self) -> ClusterConfig:
        count = self.gpus_per_node
        if count is not None and self.gpu != "auto" and (self.gpu == "cpu") != (count == 0):
            raise ValueError(
                f"cluster.gpu = {self.gpu}, but cluster.gpus_per_node = {count}: set both for GPUs, or neither"
            )
        return self


class RunConfig(Section):
    goal: Literal["fast", "safe", "frugal"] = "fast"
    """What the planner aims for: the shortest step, more free memory, or the fewest GPU seconds."""
    dir: str | None = None
    """Run directory; unset: `runs/<model>-<data>-<time>`."""
    seed: NonNegative = 0
    checkpoint_every: NonNegative = 50
    """Save every so many steps (and at the end); 0: at the end only."""
    keep_last: Positive | None = None
    """Newest checkpoints to keep; unset: all, or with keep_best one."""
    keep_best: Positive | None = None
    """Checkpoints to keep for their mean reward, besides the newest."""
    save_final: bool = True
    """Save a checkpoint at the end."""
    log_rollouts: NonNegative = 4
    """Rollouts a step written to rollouts/."""
    tensorboard: bool = True
    wandb: bool | None = None
    """Log to Weights & Biases; unset: when WANDB_API_KEY is set."""


class RlctlConfig(Section):
    """The whole configuration of a run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    grpo: GrpoConfig = GrpoConfig()
    training: TrainingConfig = TrainingConfig()
    generation: GenerationConfig = GenerationConfig()
    refit: RefitConfig = RefitConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    ddp: DdpConfig = DdpConfig()
    megatron: MegatronConfig = MegatronConfig()
    vllm: VllmConfig = VllmConfig()
    cluster: ClusterConfig = ClusterConfig()
    run: RunConfig = RunConfig()
