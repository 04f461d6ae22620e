"""The seam between the training loop and a policy backend: what a policy is made from, what it is given, what it
returns.

Nothing here imports torch, so that the driver can use it. Suffix T: the tokens of one micro-batch that the policy
chose, rollout after rollout in the order of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlctl.config.schema import LoraConfig, OptimizerConfig
from rlctl.data.rollouts import RolloutColumns
from rlctl.errors import ConfigError
from rlctl.models.facts import ModelFacts

if TYPE_CHECKING:
    from pathlib import Path

    import torch

LogprobColumn = Literal["old_logprobs", "reference_logprobs"]
Fetch = Callable[[list[object]], list[RolloutColumns]]
"""Turns handles of columns into the columns (`ray.get`, in a run)."""


@dataclass(frozen=True)
class ParallelSpec:
    """Sizes of the parallel groups of a policy, in Megatron's rank order: tp fastest, then cp, dp, pp."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Virtual pipeline stages of each pipeline rank."""
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """Tensor parallel size of the experts; None: `tp`."""
    dp: int = 1
    sp: bool | None = None
    """Sequence parallelism; None: where tp > 1."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage; None: as many as the stages that are not named."""
    last_stage_layers: int | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def sequence_parallel(self) -> bool:
        return self.tp > 1 and self.sp is not False

    @property
    def row_multiple(self) -> int:
        """Rows of tokens must divide by this: even parts for sequence parallelism, 2 chunks for each context-parallel
        rank."""
        return (self.tp if self.sequence_parallel else 1) * (2 * self.cp if self.cp > 1 else 1)

    @property
    def micro_batch_multiple(self) -> int:
        """The micro-batches of an optimizer step must divide by this: the interleaved schedule takes them in groups as
        many as there are stages, and refuses a smaller last group."""
        return self.pp if self.vpp > 1 else 1

    def data_rank(self, rank: int) -> int:
        """The data-parallel rank of world rank `rank`: the index of the `BatchShard` it trains on."""
        return rank // (self.tp * self.cp) % self.dp

    @property
    def result_rank(self) -> int:
        """The world rank whose results are returned: the first of the last pipeline stage."""
        return self.tp * self.cp * self.dp * (self.pp - 1)


@dataclass(frozen=True)
class PolicySpec:
    """Everything a policy worker is built from; the same on every rank."""

    facts: ModelFacts
    parallel: ParallelSpec = ParallelSpec()
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    temperature: float = 1.0
    """Log-probs are those of logits / temperature: of the distribution that the rollouts were sampled from."""
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
    freeze_router: bool = False
    """Routers of experts keep their weights."""
    router_replay: bool = False
    """Routers choose the experts that the engine chose (column `ROUTED_EXPERTS` of the rollouts)."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Rank 0: all weights are trained."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's TransformerConfig."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's DistributedDataParallelConfig."""

    @property
    def row_multiple(self) -> int:
        """Rows of tokens must divide by this: as the layout asks for it, and in float8 so that each rank's part of a
        row does by what its products take (`get_fp8_align_size` of megatron/core/fp8_utils.py) or, in whole blocks,
        what TransformerEngine gathers for sequence parallelism (`is_quantizable` of its block quantizers)."""
        if not self.megatron.get("fp8"):
            return self.parallel.row_multiple
        blocks = {"mxfp8": 32, "blockwise": 128 if self.parallel.sequence_parallel else 16}
        part = blocks.get(self.megatron.get("fp8_recipe", ""), 16)
        return lcm(self.parallel.row_multiple, part * self.parallel.tp * self.parallel.cp)

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(
                f"generation.temperature = {self.temperature} cannot be trained on.",
                "The policy gradient needs sampled rollouts: use a temperature above 0.",
            )


@dataclass(frozen=True)
class RolloutRow:
    """One rollout of an optimizer mini-batch: where its tokens are, and the scalars that the driver gives it."""

    group: int
    """Key of its columns in `BatchShard.columns`."""
    row: int
    """Row in the group's columns."""
    prompt_tokens: int
    """Tokens before the first one that the policy chose; equal for all rollouts of a group."""
    tokens: int
    """Prompt and completion together."""
    advantage: float
    token_weight: float
    """Weight of each of its chosen tokens in the loss. All normalisation is in here, over the whole mini-batch:
    gradients are summed over micro-batches and ranks, never averaged. 0 leaves the rollout out of loss and metrics."""


MicroBatch = tuple[RolloutRow, ...]
"""Rollouts packed into one row of tokens. Empty for a rank that only takes part in the collectives."""


@dataclass(frozen=True)
class BatchShard:
    """What one data-parallel rank trains on in a step; made by `backends.packing.plan_batch`."""

    columns: dict[int, object]
    """Handle of the `RolloutColumns` of each group."""
    minibatches: tuple[tuple[MicroBatch, ...], ...]
    """For each optimizer step its micro-batches, as many on every data-parallel rank."""
    share_prompts: bool = False
    """Rollouts of one group in one micro-batch stand behind a single copy of their prompt."""
    rectangular: bool = False
    """Rollouts of a micro-batch are padded to the longest of them."""


@dataclass(frozen=True)
class TokenBatch:
    """The columns of one micro-batch that a loss is computed from, one element for each token that the policy chose."""

    logprobs_T: torch.Tensor  # float32 with gradient, under the current weights
    entropy_T: torch.Tensor  # float32 without gradient, in nats
    rollout_logprobs_T: torch.Tensor  # float32, the engine's
    advantages_T: torch.Tensor  # float32
    token_weights_T: torch.Tensor  # float32, see RolloutRow.token_weight
    loss_mask_T: torch.Tensor  # bool: False where the token's rollout is left out (weight 0)
    rollout_T: torch.Tensor  # int64: index of the token's rollout in this micro-batch, rising from 0
    old_logprobs_T: torch.Tensor | None = None  # float32; None: not recomputed, use logprobs_T.detach()
    reference_logprobs_T: torch.Tensor | None = None  # float32; None: no reference policy

    @property
    def tokens(self) -> int:
        return self.logprobs_T.shape[0]


@dataclass(frozen=True)
class LossOutput:
    """What a `TokenLoss` returns for one micro-batch. All tensors are scalars."""

    loss: torch.Tensor
    """Sum over the tokens, weights applied; the gradient of its sum over micro-batches and ranks is what trains."""
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Metrics that add up over micro-batches and data-parallel ranks (counts too); the driver divides."""
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    """Metrics of which the largest over micro-batches and ranks counts; at least 0 (the value over no tokens)."""


class TokenLoss(Protocol):
    """A loss over chosen tokens; pickled to the workers. Called only with at least one token, and must return the
    same metric names for every micro-batch."""

    def __call__(self, batch: TokenBatch) -> LossOutput: ...


@dataclass(frozen=True)
class MinibatchResult:
    """One optimizer step, summed over all ranks."""

    loss: float
    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norm: float
    """Before clipping; not finite where `skipped`."""
    lr: float
    skipped: bool
    """The gradient was not finite and the step was not taken."""
    tokens: int
    """Tokens that went through the model on all data-parallel ranks, shared prompts counted once, padding not
    counted."""


@dataclass(frozen=True)
class LogprobStats:
    """Difference between recomputed and engine log-probs over the chosen tokens of all ranks, d = recomputed -
    engine's."""

    tokens: int
    abs_sum: float  # sum of |d|
    abs_max: float
    k3_sum: float  # sum of exp(d) - 1 - d: estimates KL(engine || policy)
    prob_error_sum: float  # sum of exp(|d|): NeMo-RL's multiplicative token probability error, summed


class PolicyWorker(Protocol):
    """One process of a policy. All methods are collective over the policy's ranks unless they say otherwise.

    Methods that return results return them on `ParallelSpec.result_rank` and None elsewhere.
    """

    def open_store(self) -> int:
        """Of rank 0 alone: serves what the ranks meet at; returns its port."""

    def setup(self, port: int) -> None:
        """Joins the process group at that port, builds model and optimizer with random weights."""

    def load_hf(self, directory: Path | str) -> None:
        """Fills the weights from a Hugging Face directory; the optimizer starts afresh."""

    def hold_reference(self) -> None:
        """Keeps a frozen copy of the current weights as the reference policy."""

    def load_batch(self, shard: BatchShard, fetch: Fetch) -> None:
        """Fetches and packs what this rank trains on; not collective. Replaces the batch loaded before."""

    def logprobs(self, column: LogprobColumn) -> LogprobStats | None:
        """Adds the log-probs under the current (or the reference) weights to the loaded batch."""

    def train_minibatch(
        self, index: int, loss: TokenLoss, lr: float, weight_decay: float | None = None
    ) -> MinibatchResult | None:
        """One optimizer step on mini-batch `index` of the loaded batch; `weight_decay` None: the optimizer's own."""

    def sleep(self, keep_weights: bool = False) -> int:
        """Moves weights, optimizer and reference to host memory until `wake`; returns the bytes that this rank's device
        got back. Not collective, and nothing else may be called before `wake`; with `keep_weights` the model's stay,
        and `parameters` may be."""

    def wake(self) -> None:
        """Brings back what `sleep` moved; not collective."""

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """This rank's parameters by Megatron's names, up to date; not collective. For reading: refit and export."""

    def save(self, directory: Path | str) -> None:
        """Writes model, optimizer and random state into an existing directory; not atomic."""

    def save_begin(self, directory: Path | str) -> None:
        """Takes a snapshot and starts writing it into an existing directory; one save at a time."""

    def save_written(self) -> bool:
        """Whether `save_finish` would not have to wait for this rank."""

    def save_finish(self) -> dict[str, str]:
        """Waits until the checkpoint is complete on all ranks; returns the digests of the files of this one."""

    def damaged_files(self, directory: Path | str, digests: dict[str, str]) -> list[str]:
        """What is wrong with this rank's share of the files that a save wrote: a sentence each."""

    def load(self, directory: Path | str) -> None:
        """Reads what `save` wrote, under any parallelism."""

    def close(self) -> None:
        """Leaves the process group."""


def only_result(results: Sequence[Any]) -> Any:
    """The one result among what the ranks of a policy returned."""
    found = [result for result in results if result is not None]
    if len(found) != 1:
        raise ValueError(f"expected one result from {len(results)} ranks, got {len(found)}")
    return found[0]
