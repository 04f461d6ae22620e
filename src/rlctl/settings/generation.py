"""Sections on generation: engines, sampling, rollouts, weight transfer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlctl.config.facts import CHOSEN, FREE, LAYOUT, PLANNED, REHEARSAL_DETAIL, SIZE, Flag, Named
from rlctl.config.section import (
    MOST,
    Bytes,
    Fraction,
    NonNegative,
    NonNegativeNumber,
    PassThrough,
    PathText,
    Positive,
    Seconds,
    Section,
    Threads,
)


class FilterConfig(Section):
    """Groups and rollouts that training leaves out."""

    groups: Literal["keep", "drop", "replace"] = "keep"
    """Treatment of groups with equal rewards (before length penalties): keep them in the batch, drop them, or sample
    other prompts until the batch is full (dynamic sampling)."""
    max_rounds: Annotated[int, Field(gt=0, le=1000), REHEARSAL_DETAIL] = 10
    """Maximum number of sampling rounds in a step with `groups=replace`; the step then trains on the groups it has.
    With async, a round is `batch.prompts` groups."""
    truncated: Literal["keep", "mask"] = "keep"
    """Treatment of rollouts that hit a length limit: train on them, or only count their rewards in their group."""
    skip: bool = True
    """Skip rollouts without a gradient in the training pass: advantage 0, without KL penalty and entropy bonus. Entropy
    and `logprob_diff` are then measured on the others."""


class RolloutsConfig(Section):
    """Time of generation (before each step, or during training), and limits of a rollout."""

    mode: Annotated[
        Literal["sync", "async"],
        Flag("async_", "Generate while the policy trains, or before each step.", names="--async/--sync", kind=bool),
    ] = "sync"
    """Generate while the policy waits (sync), or while it trains on earlier rollouts (async)."""
    max_staleness: Annotated[
        int, Field(ge=0, le=1000), Flag("max_staleness", "With --async: maximum age of a rollout, in weight versions.")
    ] = 1
    """With async, the maximum number of weight versions between the start of a group and training on it."""
    uncorrected: bool = False
    """Allow rollouts of older weights without an importance correction (loss.importance_correction=off)."""
    order: Literal["position", "arrival"] = "position"
    """With async, the contents of a batch: the next prompts in order (position), or the groups that finish first
    (arrival), except that the batch waits for groups that started `max_staleness` versions ago."""
    timeout_s: Seconds | None = None
    """Time limit from the first token of a rollout to the last, also in validation. A longer rollout ends with its
    tokens so far and the stop reason `timeout`. Unset: half of cluster.step_timeout_s."""


class GenerationConfig(Section):
    """How completions are generated: engines, parallelism, sampling, memory."""

    backend: str = "auto"
    """Generation engine: `vllm` (also `auto`), or one of an installed package."""
    engines: Annotated[Positive | None, SIZE] = None
    """Number of engines."""
    tp: Annotated[Positive | None, SIZE, Flag("generation_tp", "Tensor parallel size of the engine.")] = None
    """Tensor parallel size of one engine."""
    pp: Annotated[Positive | None, SIZE] = None
    """Pipeline parallel size of one engine."""
    dp: Annotated[Positive | None, SIZE] = None
    """Data parallel replicas in one engine, which share its experts."""
    ep: Annotated[Positive | None, SIZE] = None
    """Expert parallel size of one engine: 1, or tp x dp."""
    colocated: Annotated[
        bool | None,
        PLANNED | LAYOUT,
        Flag("colocated", "Generate on the training devices, or on separate ones.", names="--colocated/--split"),
    ] = None
    """Generate on the training devices; false: on separate devices, where nothing sleeps."""
    devices: Annotated[Positive | None, PLANNED | LAYOUT | REHEARSAL_DETAIL] = None
    """Number of devices of the engines with colocated=false: GPUs, or CPU cores."""
    max_new_tokens: Annotated[Positive, Flag("max_new_tokens", "Maximum length of a completion.", metavar="TOKENS")] = (
        512
    )
    """Maximum length of a completion, in tokens; a long prompt may leave less of `model.max_length`."""
    mean_length: Annotated[
        Positive | None,
        FREE | REHEARSAL_DETAIL,
        Flag("mean_length", "Mean completion length, for the planner.", metavar="TOKENS"),
    ] = None
    """Mean completion length in tokens, for the planner; unset: half of max_new_tokens."""
    temperature: Annotated[NonNegativeNumber, Flag("temperature", "Sampling temperature; 0 is greedy.")] = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[
        float, Field(gt=0, le=1), Flag("top_p", "Nucleus sampling: keep the most likely tokens up to this probability.")
    ] = 1.0
    """Nucleus sampling: keep the most likely tokens up to this probability; 1 keeps all."""
    top_k: Annotated[int, Field(ge=-1, le=MOST)] = -1
    """Keep the k most likely tokens; -1 keeps all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Keep tokens with at least this fraction of the largest probability; 0 keeps all."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], REHEARSAL_DETAIL] = ()
    """Texts that end a completion, in addition to the model's own end tokens."""
    stop_token_ids: tuple[NonNegative, ...] = ()
    """Tokens that end a completion, in addition to the model's own end tokens."""
    env: dict[str, str] = {}
    """Environment variables of the engines' processes."""
    discard_weights: Annotated[bool, FREE] = False
    """Let engines that share GPUs with the policy discard their weights before a refit (vLLM's sleep level 2), instead
    of copying them to host memory. The decoding check of the first refit shows whether the model supports it."""
    memory_fraction: Annotated[Fraction | None, CHOSEN] = None
    """Fraction of a GPU's memory that vLLM may use."""
    kv_cache_bytes: Annotated[Bytes | None, CHOSEN] = None
    """KV cache size per GPU of an engine; on CPUs per engine."""
    max_concurrent: Annotated[Positive | None, SIZE] = None
    """Maximum number of sequences that an engine decodes at once."""
    max_batched_tokens: Annotated[Positive | None, CHOSEN] = None
    """Maximum number of tokens in one forward pass of an engine."""
    threads: Annotated[Threads | None, CHOSEN | REHEARSAL_DETAIL] = None
    """Number of CPU threads of each engine."""
    plain_parameters: bool = False
    """On CPUs, keep matrices in their published layout: faster refits, slower decoding."""


class RefitConfig(Section):
    """Transfer of new weights to the engines, and its verification."""

    timeout_s: Seconds = 300.0
    """Longest time of each wait during a refit."""
    verify_every: NonNegative = 50
    """Compare every tensor at the first refit and then at this interval in steps; 0: at the first only."""
    in_flight: Literal["wait", "turns", "keep", "abort"] | None = None
    """Treatment of unfinished completions when a refit is due. wait: finish them and their episodes; turns: finish
    their turns, and continue the episodes with the new weights; keep: continue them with the new weights (each token
    records its version); abort: end them with their tokens so far. Unset: wait, or turns if tools would keep engines
    waiting (`environment.tool_s`)."""
    verify_sample: NonNegative = 8
    """Number of tensors to compare in all other refits, different ones each time; 0: none."""
    mover: Annotated[
        str,
        Named("rlctl.transports", also=("auto",)),
        PLANNED,
        Flag("mover", "Transport of the weights; auto chooses by where the engines run."),
    ] = "auto"
    """Transport of the weights; auto chooses by where the engines run."""
    directory: PathText | None = None
    """Shared directory where the disk mover writes weight versions, or the place of another mover that stores them."""
    sparse: Annotated[
        bool, Flag("sparse", "Send only changed elements; the test then changes few of them between refits.")
    ] = False
    """Send only elements that changed since the previous version."""
    full_every: Positive = 20
    """With `sparse`, the interval of full refits."""
    staging_mb: Annotated[int, Field(gt=0, le=65_536)] | None = None
    """Staging memory of each engine worker, in MiB, as two alternating buffers. Unset: 16 on CPUs, where buffers that
    fit the cache are fastest, and 256 on GPUs, where fewer rounds are."""


class VllmConfig(PassThrough, section="vllm"):
    """Fields of vLLM's EngineArgs, which override rlctl's values."""

    @property
    def matrix_bytes(self) -> float | None:
        """Bytes of a weight of the layers where `quantization` makes them narrower; None: it does not."""
        method = str(self.passed.get("quantization") or "")
        widths = {1.0: ("fp8", "int8"), 0.5: ("fp4", "int4", "awq", "gptq")}
        return next((width for width, names in widths.items() if any(name in method for name in names)), None)

    @property
    def cache_element_bytes(self) -> float | None:
        """Bytes of an element of the KV cache where `kv_cache_dtype` names its format; None: it is the model's."""
        name = str(self.passed.get("kv_cache_dtype") or "auto")
        widths = {1.0: ("fp8", "int8"), 2.0: ("bfloat16", "float16"), 4.0: ("float32",)}
        return next((width for width, names in widths.items() if name.startswith(names)), None)

    @property
    def graphs(self) -> bool:
        """Whether decoding is recorded in CUDA graphs."""
        return self.passed.get("enforce_eager") is not True
