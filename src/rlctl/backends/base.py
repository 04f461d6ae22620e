"""The interface between the driver and the engines: specifications and worker protocols. Imports no torch. The driver
calls workers by reference to these Protocols: `group.call(PolicyWorker.load_model, directory)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlctl.backends.batching.batch import (
    AdvantageEstimate,
    BatchShard,
    Fetch,
    GroupLogprobs,
    LogprobColumn,
    LogprobStats,
    MicroBatchLoss,
    MinibatchResult,
    ValueLoss,
)
from rlctl.backends.batching.mixtures import Mixture, Taught
from rlctl.backends.messages import GroupRequest, SampledGroup, SampleRequest, SampleResult, Sampling, Truncation
from rlctl.backends.teacher_endpoint import Endpoint
from rlctl.config.parallel import ParallelSpec
from rlctl.data.cross_tokens import Projection
from rlctl.errors import ConfigError
from rlctl.models.facts import ModelFacts
from rlctl.settings.data import VisionPart
from rlctl.settings.training import LoraConfig, OptimizerConfig, QuantizationConfig, Rounding

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch

    from rlctl.backends.hidden_states import Paths, States
    from rlctl.transport.movers import Received
    from rlctl.transport.rounds import Connection, Need
    from rlctl.weights.adapters import AdapterRow
    from rlctl.weights.readings import Reading
    from rlctl.weights.transfer_plan import World

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]


def resolve_dtype(dtype: Literal["auto"] | Dtype, device: Device) -> Dtype:
    """`auto` is float32 on a CPU and bfloat16 on a GPU."""
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else "bfloat16"


@dataclass(frozen=True)
class CriticSpec:
    """The value model next to a policy: the same model and layout, with a value in place of logits."""

    optimizer: OptimizerConfig
    offload: bool = False
    """Policy and critic take turns on the device; each waits in host memory while the other computes."""


@dataclass(frozen=True)
class Teaching:
    """The task of a policy that is not trained: it computes log-probs of the rollouts of another, the student."""

    vocab: int
    """Tokens of the student's vocabulary. Vocabularies of one tokenizer may be padded differently."""
    top: int = 0
    """Number of its most likely tokens at each position whose log-probs are computed too."""
    chunk: str | None = None
    """The column of the parts of the text, of a teacher with its own tokenizer and vocabulary `vocab`. Its most likely
    tokens belong to a whole text, by their highest logit at any position. None: it has the student's tokenizer."""


@dataclass(frozen=True)
class OwnTeacher:
    """The teacher of self-distillation: the policy of an earlier step, a second model in the policy's processes."""

    top: int = 0
    """As `Teaching.top`."""
    every: int | None = None
    """Steps between its updates; None: none."""
    rate: float = 1.0
    """The policy's share of its new weights."""


@dataclass(frozen=True)
class PolicySpec:
    """Everything a policy worker is built from; the same on every rank."""

    facts: ModelFacts
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    dtype: Dtype = "float32"
    device: Device = "cpu"
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig.model_validate({}))
    temperature: float = 1.0
    """Log-probs are of logits / temperature, the sampling distribution."""
    truncation: Truncation | None = None
    """Truncated sampling of the rollouts (None: off). Training log-probs are renormalized over the kept tokens;
    log-probs that are compared with a reference or teacher are not."""
    never: tuple[int, ...] = ()
    """Tokens that engines never draw (`Sampling.never`), excluded from log-probs."""
    logprob_chunk_tokens: int = 1024
    """Most tokens whose [tokens, vocabulary / tp] logits exist at once."""
    threads: int | None = None
    """CPU threads of the process; None: leave torch's choice."""
    seed: int = 0
    timeout_s: float = 600.0
    """Limit for each collective."""
    recompute: Literal["none", "selective", "full"] = "none"
    optimizer_offload: bool = False
    """The optimizer's states wait in host memory between its steps."""
    exact: bool = False
    """Log-probs have the engine's bits (`checks.exact`)."""
    reference_offload: bool = False
    """The reference's weights wait in host memory while they are not computed with."""
    save_copies: bool = True
    """Whether a save copies the tensors that the next update changes before they are written; else the update waits."""
    freeze_router: bool = False
    """Routers of experts keep their weights."""
    freeze: tuple[VisionPart, ...] = ()
    """Parts of a model that reads images which keep their weights."""
    router_replay: bool = False
    """Routers choose the experts that the engine chose (column `ROUTED_EXPERTS` of the rollouts)."""
    model_dir: Path | None = None
    """The directory with the published config.json, where a backend builds the model from it."""
    lora: LoraConfig = field(default_factory=lambda: LoraConfig.model_validate({}))
    """Rank 0: all weights are trained."""
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    """The grid that weights are rounded to; the critic and a teacher have none."""
    critic: CriticSpec | None = None
    """The critic on the same ranks (`CriticWorker`); None: no critic."""
    own_teacher: OwnTeacher | None = None
    """The policy of an earlier step as its teacher; None: there is no such teacher."""
    valued: bool = False
    """Whether the model returns a value per position in place of logits, like a critic or a reward model."""
    teaches: Teaching | None = None
    """Not None: nothing is trained, and there are neither gradients nor an optimizer."""
    beside: tuple[PolicySpec, ...] = ()
    """Further models in a teacher's processes, of other architectures and with the same layout."""
    together: bool = True
    """They stay on the device while another of them computes; if not, in host memory."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's TransformerConfig."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's DistributedDataParallelConfig."""

    @property
    def row_multiple(self) -> int:
        """Divisor of a row's tokens: from the layout, and in float8 also from the kernels (`get_fp8_align_size` in
        megatron/core/fp8_utils.py, `is_quantizable` of TransformerEngine's block quantizers)."""
        if not self.megatron.get("fp8"):
            return self.parallel.row_multiple
        blocks = {"mxfp8": 32, "blockwise": 128 if self.parallel.sequence_parallel else 16}
        part = blocks.get(self.megatron.get("fp8_recipe", ""), 16)
        return lcm(self.parallel.row_multiple, part * self.parallel.tp * self.parallel.cp)

    def teaching(self, task: Teaching) -> PolicySpec:
        """Return the specification of a teacher of the policy, of the same model and layout: the policy's without what
        only training uses."""
        return replace(
            self, recompute="none", optimizer_offload=False, reference_offload=False, freeze_router=False,
            router_replay=False, truncation=None, lora=LoraConfig(), quantization=QuantizationConfig(), critic=None,
            own_teacher=None, megatron={}, ddp={}, teaches=task,
        )  # fmt: skip

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(
                f"generation.temperature = {self.temperature} cannot be trained on.",
                "The policy gradient needs sampled rollouts: use a temperature above 0.",
            )
        if self.truncation is not None and (self.truncation.top_k == 1 or self.truncation.min_p == 1):
            key, value = ("top_k", "2") if self.truncation.top_k == 1 else ("min_p", "0.1")
            raise ConfigError(
                f"generation.{key} = 1 cannot be used in training: it keeps only the most likely token, "
                "whose log-prob is always 0.",
                f"The policy gradient needs sampled rollouts: use for example generation.{key}={value}.",
            )


@dataclass(frozen=True)
class EngineSpec:
    """Everything a generation engine is built from; picklable."""

    device: Device
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the engine's own class."""
    threads: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the process must have before it imports the engine."""
    passed: dict[str, Any] = field(default_factory=dict)
    """The arguments that the user's own section passes through."""
    replaced: dict[str, Any] = field(default_factory=dict)
    """The values that would be used without them."""
    in_flight: Literal["wait", "turns", "keep", "abort"] = "wait"
    """Samples in flight at a refit: wait (`turns`: only for their turns), keep (later tokens use the new weights), or
    end them."""
    drain_timeout_s: float = 300.0
    """Longest that a refit waits for them."""
    routing: bool = False
    """Record the experts of each token (column `ROUTED_EXPERTS`)."""
    sleeps: bool = False
    """The engine gives its device's memory back while the policy computes."""
    discards: bool = False
    """A sleeping engine keeps no copy of its weights where a refit follows."""
    replicas: int = 1
    """Replicas of the engine's ranks, which share its experts and compute every step together."""

    @property
    def dtype(self) -> str:
        return self.arguments["dtype"]

    @property
    def max_length(self) -> int:
        return self.arguments["max_model_len"]


class WeightSource(Protocol):
    """The source of a refit on one policy rank."""

    rank: int
    rounding: Rounding = "unbiased"
    """Rounding of weights to a narrower dtype of an engine."""
    stored_alone: frozenset[str] = frozenset()
    """Names in `parameters()` of tensors that no training changes."""
    sends_copies: bool = False
    """`sent_parameters` makes copies, which a refit drops at its end."""

    def layouts(self) -> World:
        """The layouts of all ranks of the policy; not collective. Refits plan from them."""
        ...

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's current parameters by layout name, for refit and export. Collective."""
        ...

    def sent_parameters(self) -> Mapping[str, torch.Tensor]:
        """The parameters as engines get them: the live ones, unless `sends_copies`."""
        return self.parameters()


class PolicyWorker(WeightSource, Protocol):
    """One process of a policy. Methods are collective over the policy's ranks unless stated otherwise. Results are
    returned on `ParallelSpec.result_rank`, None elsewhere."""

    def open_store(self) -> int:
        """On rank 0: serve the rendezvous store and return its port."""
        ...

    def setup(self, port: int) -> None:
        """Join the process group at that port; build model and optimizer with random weights."""

    def load_model(self, directory: Path | str) -> None:
        """Load weights from a Hugging Face directory, a converted model or a save; reset the optimizer."""

    def load_adapter(self, directory: Path | str) -> None:
        """Load the adapters of a PEFT directory (`training.lora.adapter`) into the model's; reset the optimizer."""

    def hold_reference(self) -> None:
        """Keep a frozen copy of the current weights as the reference policy."""

    def hold_adapters(self, count: int) -> None:
        """Keep `count` copies of the adapter and its optimizer states over one base; the first one is in use."""

    def use_adapter(self, number: int) -> None:
        """Use another of the adapters from here on; the one in use waits in host memory."""

    def hold_projections(self, projections: Mapping[int, Projection]) -> None:
        """Store the token maps of teachers that have another tokenizer, by the number of the teacher."""

    def load_batch(self, shard: BatchShard, fetch: Fetch) -> None:
        """Fetch and pack this rank's part of a batch; not collective. It replaces the batch loaded before."""

    def add_logprobs(self, column: LogprobColumn) -> None:
        """Add the log-probs under the current, the reference's or the own teacher's weights to the loaded batch."""

    def update_teacher(self, rate: float) -> None:
        """Move the weights of the policy's own teacher to (1 - rate) teacher + rate policy."""

    def logprob_difference(self, column: LogprobColumn) -> LogprobStats | None:
        """Compare a column that `add_logprobs` added with the log-probs of the engine."""
        ...

    def hidden_states(self, paths: Paths) -> list[States]:
        """Return what enters and leaves the sub-layers that this rank has, over the loaded batch, whose groups have one
        sequence each. `paths`: the sub-layers to record."""
        ...

    def export_logprobs(self) -> tuple[None, list[GroupLogprobs]]:
        """Return a teacher's log-probs of the loaded batch by group of the shard, on ranks with `ParallelSpec.reports`;
        nothing elsewhere."""
        ...

    def ask_teacher(
        self, endpoint: Endpoint, places: Sequence[int], top: int, fetch: Fetch
    ) -> tuple[None, list[GroupLogprobs]]:
        """Return a server's log-probs of the groups at `places` of the shard, as `export_logprobs` does. Not
        collective."""
        ...

    def use_model(self, number: int) -> None:
        """Select one of the models in a teacher's processes for the calls that follow: 0 is the model of the
        specification, higher numbers select a model of `PolicySpec.beside`."""

    def teach(self, task: Teaching) -> None:
        """Select the teacher that the calls that follow compute, with the model in use."""

    def take_tokens(self, handles: Mapping[int, Sequence[Sequence[object]]], fetch: Fetch) -> None:
        """Store the most likely tokens of each of several teachers (`handles`, by group of the shard).
        `export_logprobs` then returns log-probs of these tokens instead of this model's most likely ones. Not
        collective."""

    def import_logprobs(self, handles: Mapping[int, Sequence[Taught]], fetch: Fetch, mixture: Mixture) -> None:
        """Add the log-probs of a teacher, of the mixture of several, or of each of several (`handles` by group of the
        shard), to the loaded batch. Not collective."""

    def estimate(self, estimate: AdvantageEstimate) -> None:
        """Replace the driver's advantages in the loaded batch by token advantages; with a critic, add values and
        returns."""

    def train_minibatch(
        self, index: int, loss: MicroBatchLoss, lr: float, weight_decay: float | None = None
    ) -> MinibatchResult | None:
        """Take one optimizer step on mini-batch `index` of the loaded batch. `weight_decay` None: the optimizer's."""
        ...

    def evaluate_minibatch(self, index: int, loss: MicroBatchLoss) -> MinibatchResult | None: ...

    def sleep(self, keep_weights: bool = False) -> int:
        """Move weights, optimizer and reference to host memory until `wake`; return the freed device bytes. Collective.
        With `keep_weights` the weights stay readable; no other call is allowed before `wake`."""
        ...

    def wake(self) -> None:
        """Bring back what `sleep` moved; not collective."""

    def device_used(self) -> tuple[int, int] | None:
        """Return (used, total) bytes of this rank's GPU over all processes; None on a CPU. Not collective."""
        ...

    def parameters_not_finite(self) -> list[str]:
        """List the trained parameters of this rank with a value that is not finite; not collective."""
        ...

    def save_begin(self, directory: Path | str, in_memory: bool = False) -> None:
        """Snapshot model, optimizer and random state and start writing them into `directory`, one save of a kind at a
        time. Not atomic. `in_memory`: each host has such a directory in its memory."""

    def save_written(self, in_memory: bool = False) -> bool:
        """Return whether `save_finish` would return at once. Not collective; allowed also between `sleep` and
        `wake`."""
        ...

    def save_finish(self, in_memory: bool = False) -> dict[str, str]:
        """Wait until the checkpoint is complete on all ranks; return the digests of this rank's files."""
        ...

    def damaged_files(self, directory: Path | str, digests: dict[str, str]) -> list[str]:
        """Compare this rank's share of a save's files with their digests; one sentence a problem. Not collective."""
        ...

    def load_saved(self, directory: Path | str) -> None:
        """Load a save under any parallelism."""

    def close(self) -> None:
        """Leave the process group."""


class CriticWorker(Protocol):
    """A policy process with a critic (`PolicySpec.critic`). Loads and saves cover both models; `load_batch` gives both
    the same rows."""

    def critic_begin(self) -> None:
        """Switch to the critic until `critic_end`; only `train_critic` and `PolicyWorker.estimate` are allowed in
        between."""

    def critic_end(self) -> None:
        """Let the policy compute again."""

    def train_critic(
        self, index: int, loss: ValueLoss, lr: float, weight_decay: float | None = None
    ) -> MinibatchResult | None: ...


class WeightReceiver(Protocol):
    """The receiving side of a refit: an engine, or a process that holds parameters like one."""

    def refit_open(self, table: tuple[Any, ...], receive: str) -> None:
        """Set the values shared by all refits: published tensors (name, dtype, shape), and the receive path."""

    def refit_needs(self) -> list[Need]: ...

    def refit_connect(self, connections: tuple[Connection, ...]) -> None:
        """Open the receiving ends, one connection for each process of the engine."""

    def refit_begin(self, version: int) -> None:
        """Begin a refit: no token is chosen from here until `refit_finish`."""

    def refit_receive(self, update_info: dict[str, Any]) -> None:
        """Load the weights that the policy sends at the same time."""

    def refit_finish(self, version: int) -> float:
        """Complete the refit and adopt `version`; return the seconds spent on emptying caches."""
        ...

    def refit_reject(self, version: int) -> None:
        """Refuse to generate until a full refit succeeds: the weights of `version` did not pass verification."""

    def refit_close(self) -> None:
        """Let go of what `refit_open` and `refit_connect` took."""

    def weight_version(self) -> int:
        """The version of the weights in use. Raises WorkerError while they are half-updated."""
        ...

    def received(self) -> list[Received]:
        """Report on the last refit, one report for each process of the engine."""
        ...

    def readings(self, tensors: list[str] | None = None) -> list[Reading]:
        """Fingerprints of the weights that the engine computes with now (None: of all tensors)."""
        ...

    def poison(self) -> object:
        """Fill all weights with NaN, so that omissions of the next refit show. For tests."""


class AdapterReceiver(WeightReceiver, Protocol):
    """The receiving side for adapters alone. The weights' side receives the base first; a refit of either is complete
    once the adapters are."""

    def refit_adapt(self, rows: tuple[AdapterRow, ...], rounding: Rounding, adds: bool) -> None:
        """Take the adapters of `rows`, once the weights' side is open: keep the next base of their matrices apart, for
        weights merged with `rounding`, or (`adds`) add them to products. Raises ConfigError for a matrix that the
        engine cannot write itself."""


class EngineWorker(WeightReceiver, Protocol):
    """One generation engine: its own process, or the first of several. Never collective over engines. It handles single
    samples; the driver calls `EpisodeWorker`."""

    @property
    def label(self) -> str: ...

    def adapters(self) -> AdapterReceiver: ...

    @property
    def version(self) -> int: ...

    @property
    def asleep(self) -> bool:
        """Whether the device is the policy's, so that nothing is decoded."""
        ...

    def start(self) -> None:
        """Load the model. Raises ConfigError or MachineError if the engine refuses."""

    def require_alive(self) -> None:
        """Raise WorkerError unless every process of the engine answers."""

    def require_ready(self, timeout_s: float) -> None:
        """Wait for a refit that drains samples in flight. Raises WorkerError with partial weights or a sleeping
        engine."""

    def add_samples(self, requests: Sequence[SampleRequest]) -> None:
        """Submit samples for `finished_samples`; they wait during refits and sleep. Raises InputError for tokens that
        do not fit."""

    def finished_samples(self, timeout_s: float) -> list[SampleResult]:
        """Decode until samples finish and return them; empty after `timeout_s`. Raises WorkerError if their weights
        failed verification."""
        ...

    def drop_samples(self, keys: Sequence[str]) -> None:
        """End samples that nobody waits for any more."""

    def forget_prompts(self) -> None:
        """Drop cached prompts, so that the next ones are computed as in a new engine."""

    def sleep(self, refit_next: bool = False) -> None:
        """Free shared device memory until `wake`, and pause submitted samples. A refit wakes only the weights. With
        `refit_next`, engines that discard (`EngineSpec.discards`) drop them and generate after a full refit only."""

    def wake(self) -> None:
        """Take the memory again; the engine can generate."""

    def record_states(self, paths: Paths) -> None:
        """Record what enters and leaves sub-layers from here on, without cached prompts."""

    def recorded_states(self, sequence: int, tokens: int, logits: int) -> list[States]:
        """End recording; return the first `tokens` computed tokens as number `sequence`, and the logits at the `logits`
        tokens before the last. Raises WorkerError for missing tokens."""
        ...

    def values(self, tensor: str) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
        """Every copy of one published tensor in the engine: (parameter that holds it, start of its box, values)."""
        ...

    def close(self) -> None:
        """Let go of the model."""


class EpisodeWorker(Protocol):
    """One process that plays episodes (`rollouts/episodes.py`) against the engine that it holds."""

    def engine(self) -> EngineWorker: ...

    def start(self) -> None:
        """Load the engine's model and begin to decode. Raises what `EngineWorker.start` raises."""

    def close(self) -> None:
        """Stop decoding, and let go of the model."""

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling, timeout_s: float) -> list[SampledGroup]:
        """Return one result per request. Raises InputError for a prompt that does not fit, WaitTimeoutError, and
        WorkerError with partial weights."""
        ...

    def generate_by_handle(
        self, requests: Sequence[GroupRequest], sampling: Sampling, timeout_s: float
    ) -> tuple[list[SampledGroup], list[Any]]:
        """As `generate`, with the token-sized values apart (`messages.detached`), to be handed on by handle."""
        ...

    def submit(self, requests: Sequence[GroupRequest], sampling: Sampling) -> None:
        """Start the episodes of some prompts in the background."""

    def collect_by_handle(self, timeout_s: float) -> tuple[list[SampledGroup], list[Any]]:
        """Wait for a submitted group and return it with columns by handle; nothing if the engine falls asleep. Raises
        WaitTimeoutError."""
        ...
