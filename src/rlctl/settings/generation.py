"""Sections on generation: engines, sampling, rollouts, weight transfer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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
    """Groups and rollouts that are not learned from."""

    groups: Literal["keep", "drop", "replace"] = "keep"
    """Groups whose rollouts all have the same reward, before lengths change it: keep them in the batch, drop them, or
    sample other prompts in their place until the batch is full (dynamic sampling)."""
    max_rounds: Annotated[int, Field(gt=0, le=1000)] = 10
    """Largest number of rounds of sampling in a step with `groups=replace`; the step then trains on what is there. With
    async, a round is `batch.prompts` groups."""
    truncated: Literal["keep", "mask"] = "keep"
    """Rollouts that a limit of length ended: learn from them, or only count their rewards in their group."""
    skip: bool = True
    """Leave out of the training pass the rollouts whose loss has no gradient: those with advantage 0, where neither a
    KL penalty nor an entropy bonus is on. Entropy and `logprob_diff` are then measured on the others."""


class RolloutsConfig(Section):
    """When rollouts are made: before each step, or while the policy trains; and how long one may take."""

    mode: Literal["sync", "async"] = "sync"
    """Make the rollouts of a step while the policy waits (sync), or while it trains on earlier ones (async)."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 1
    """With async, the largest number of versions between the weights under which a group is begun and those that are
    trained on it."""
    uncorrected: bool = False
    """Allow rollouts of older weights without a correction (loss.importance_correction=off): they are trained on as if
    the policy had sampled them."""
    order: Literal["position", "arrival"] = "position"
    """With async, the contents of a batch: the next prompts in their order (position), or the groups that finished
    first, where one that was begun `max_staleness` versions ago is waited for (arrival)."""
    timeout_s: Seconds | None = None
    """Longest time from the first token of a rollout to its last, in both modes and in validation. One that takes
    longer ends with the tokens that it has and the stop reason `timeout`. Unset: half of cluster.step_timeout_s."""


class GenerationConfig(Section):
    """How completions are generated: engines, parallelism, sampling, memory."""

    backend: str = "auto"
    """The engine that generates: `vllm`, which `auto` is, or one that an installed package adds."""
    engines: Positive | None = None
    """Number of engines."""
    tp: Positive | None = None
    """Tensor parallel size of one engine."""
    pp: Positive | None = None
    """Pipeline parallel size of one engine."""
    dp: Positive | None = None
    """Number of data parallel replicas in one engine, which share its experts."""
    ep: Positive | None = None
    """Expert parallel size of one engine: 1, or tp x dp."""
    colocated: bool | None = None
    """Generate on the devices that train; false: on devices of their own, where nothing sleeps."""
    devices: Positive | None = None
    """Number of devices that the engines have to themselves, with colocated=false: GPUs, or cores of a CPU."""
    max_new_tokens: Positive = 512
    """Largest number of tokens of a completion; a long prompt may leave fewer of `model.max_length`."""
    mean_length: Positive | None = None
    """Mean length of completions, in tokens, that the planner assumes; unset: half of max_new_tokens."""
    temperature: NonNegativeNumber = 1.0
    """Temperature of sampling; 0 takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the most likely tokens whose probabilities add up to this; 1 is all."""
    top_k: Annotated[int, Field(ge=-1, le=MOST)] = -1
    """Sample among the k most likely tokens; -1 is all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample among tokens that are at least this times as likely as the most likely one; 0 is all."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion, in addition to the model's own end tokens."""
    stop_token_ids: tuple[NonNegative, ...] = ()
    """Tokens that end a completion, in addition to the model's own end tokens."""
    env: dict[str, str] = {}
    """Environment variables of the engines' processes."""
    memory_fraction: Fraction | None = None
    """Fraction of a GPU's memory that vLLM may use."""
    kv_cache_bytes: Bytes | None = None
    """Size of the KV cache of each GPU of an engine; on a CPU of each engine."""
    max_concurrent: Positive | None = None
    """Largest number of sequences that one engine decodes at once."""
    max_batched_tokens: Positive | None = None
    """Largest number of tokens in one forward pass of an engine."""
    threads: Threads | None = None
    """Number of CPU threads of each engine."""
    plain_parameters: bool = False
    """On a CPU, keep matrices in their published form: refits are faster, decoding is slower."""


class RefitConfig(Section):
    """How new weights are sent to the engines and verified."""

    timeout_s: Seconds = 300.0
    """Longest time of each wait during a refit."""
    verify_every: NonNegative = 50
    """Compare every tensor on the first refit and then at this interval of steps; 0: on the first only."""
    in_flight: Literal["wait", "turns", "keep", "abort"] | None = None
    """Completions that are being generated when a refit is due: wait for them, and for the whole of their episodes;
    wait for the turns that are being generated, whose episodes go on with the new weights; keep them and continue with
    the new weights (each token carries the version that chose it); or abort them. Unset: wait, or turns where the plan
    finds that engines would wait long for tools (`environment.tool_s`)."""
    verify_sample: NonNegative = 8
    """Number of tensors that are compared in every other refit, different ones each time; 0: none."""
    mover: Literal["auto", "shared-memory", "cuda-ipc", "collective", "disk"] = "auto"
    """Mover that carries the bytes; auto chooses by where the engines are."""
    directory: PathText | None = None
    """Directory that every node sees, where the disk mover writes versions."""
    sparse: bool = False
    """Send only the elements that have changed since the previous version."""
    full_every: Positive = 20
    """With `sparse`, the interval of refits at which everything is sent."""
    staging_mb: Annotated[int, Field(gt=0, le=65_536)] | None = None
    """Staging memory of each engine worker, in MiB: two buffers that are filled and read in turn. Where weights are
    sent from rank to rank, the workers of an engine share it. Unset: 16 between processors, where buffers that fit the
    cache are fastest, and 256 between GPUs, where fewer rounds are."""


class VllmConfig(PassThrough):
    """Fields of vLLM's EngineArgs, which replace the values that rlctl would give."""

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
