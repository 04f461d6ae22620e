"""The training batch of a policy, the inputs of a loss, and the results of a step. Torch-free. Suffix R: the response
tokens (chosen by the policy) of one micro-batch, in rollout order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rlctl.settings.training import LogprobColumn as LogprobColumn

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rlctl.backends.batching.vocab_projection import VocabProjection
    from rlctl.data.rollouts import MediaPart, RolloutColumns

Fetch = Callable[[list[object]], list[Any]]
"""Turns handles of columns into the columns (by `fetch` of `cluster/ray_session.py`, in a run)."""


ROUNDING = 4 * 2.0**-23
"""Four units in the last place of float32, the precision of many rewards."""


def equal_up_to_rounding(low: float, high: float) -> bool:
    """Return whether two rewards or advantages differ only by rounding, like 0.1 + 0.2 and 0.3 (`low` <= `high`)."""
    return high - low <= ROUNDING * max(1.0, abs(low), abs(high))


@dataclass(frozen=True)
class RolloutLogprobs:
    """Log-probs of one rollout's response tokens under another policy. Suffix K: the most likely tokens of each
    position, possibly none."""

    logprobs_R: np.ndarray  # float32
    top_ids_RK: np.ndarray  # int32: the most likely tokens under that policy, best first
    top_logprobs_RK: np.ndarray  # float32
    chunks_C: np.ndarray | None = None
    """float32, for another tokenizer: mean log-prob of each text chunk. `top_logprobs_RK` then has one row per chunk,
    normalized over the text's most likely tokens, and `top_ids_RK` one row."""


GroupLogprobs = dict[tuple[int, int], RolloutLogprobs]
"""Log-probs of a group's rollouts, or of some, by `WeightedSequence.key`."""


class WeightedSequence(NamedTuple):
    """A rollout or a text of an optimizer mini-batch: the location of its tokens, its advantage and token weight. A
    named tuple takes a fifth of the time of a frozen dataclass to create, and a step may have 160,000."""

    position: int
    """Position of its prompt: the key of its group's columns in `BatchShard.columns`."""
    sample: int
    """Its number in its group, and in the group's columns."""
    prompt_tokens: int
    """Tokens before the first response token; equal for all sequences of a group."""
    tokens: int
    """All its tokens. Tokens after the prompt may be no response tokens: the columns' loss mask decides."""
    advantage: float
    token_weight: float
    """Loss weight of each response token, normalized over the whole mini-batch: gradients are summed over micro-batches
    and ranks, never averaged. 0 excludes the sequence from loss and metrics."""
    begin: int = 0
    """Its first token in its sample: an episode of several contexts has a sequence for each."""
    nll_weight: float = 0.0
    """Weight of the negative log-likelihood of each of its response tokens, which is added to the loss."""

    @property
    def key(self) -> tuple[int, int]:
        """The sample and the begin, which no other of its group has together."""
        return (self.sample, self.begin)

    def span(self, columns: RolloutColumns) -> slice:
        """Return the part of every `_T` column of its group that belongs to it."""
        first = columns.slice(self.sample).start + self.begin
        return slice(first, first + self.tokens)

    def media(self, columns: RolloutColumns) -> tuple[MediaPart, ...]:
        """Return its media, with positions from its first token."""
        shifted = (replace(part, start=part.start - self.begin) for part in columns.media(self.sample))
        return tuple(part for part in shifted if 0 <= part.start < self.tokens)


@dataclass(frozen=True)
class TrainBatch:
    """The sequences of a step as optimizer mini-batches, and where the columns of each group are."""

    minibatches: tuple[tuple[WeightedSequence, ...], ...]
    """A mini-batch may be empty: its optimizer step then has a gradient of 0."""
    columns: dict[int, object]
    skipped: tuple[WeightedSequence, ...] = ()
    """Sequences without a gradient, which are in no mini-batch but were counted in the weights of the others."""
    for_teachers: Mapping[int, tuple[tuple[WeightedSequence, ...], ...]] = field(default_factory=dict)
    """The texts in the tokenization of each teacher that has its own; the others read `minibatches`."""
    sources: Mapping[int, str] = field(default_factory=dict)
    """Label of the data source of each group; empty for data without several sources."""
    estimate: AdvantageEstimate | None = None
    """Computes the advantages of tokens on the ranks before training; None: a rollout's tokens all have its
    advantage."""


MicroBatch = tuple[WeightedSequence, ...]
"""Sequences packed into one row of tokens. Empty for a rank that only takes part in the collectives."""


@dataclass(frozen=True)
class BatchShard:
    """The part of a batch that one data-parallel rank trains on; made by `packing.plan_batch`."""

    columns: dict[int, object]
    """Handle of the `RolloutColumns` of each group."""
    minibatches: tuple[tuple[MicroBatch, ...], ...]
    """For each optimizer step its micro-batches, as many on every data-parallel rank."""
    share_prompts: bool = False
    """Rollouts of a group in one micro-batch share one copy of their prompt."""
    rectangular: bool = False
    """Whether rollouts of a micro-batch are padded to the longest."""


@dataclass(frozen=True)
class TeacherSpan:
    """The columns of `teacher_top_RK` and `top_logprobs_RK` that belong to one of several teachers that are compared by
    themselves."""

    tokens: int
    """Its most likely tokens, K."""
    weight_R: torch.Tensor  # float32: its weight among the token's teachers, which add up to 1
    chunk_R: torch.Tensor | None = None
    """float32: the token's chunk of the text, or -1 where the teacher has not read it. Then `top_logprobs_RK` has the
    policy's probabilities in the teacher's vocabulary, and `teacher_top_RK` means over chunks. None: the teacher reads
    the policy's tokens."""
    projection: VocabProjection | None = None


@dataclass(frozen=True)
class TokenBatch:
    """The columns of one micro-batch that a loss is computed from, one element for each response token."""

    logprobs_R: torch.Tensor  # float32 with gradient, under the current weights; of a reward model its values
    """Under truncated sampling, renormalized over the kept tokens and the chosen one, like `rollout_logprobs_R` and
    `old_logprobs_R`."""
    entropy_R: torch.Tensor  # float32 with gradient, of the whole distribution, in nats
    rollout_logprobs_R: torch.Tensor  # float32, the engine's
    advantages_R: torch.Tensor  # float32
    token_weights_R: torch.Tensor  # float32, see WeightedSequence.token_weight
    counted_R: torch.Tensor  # bool: False where the token's rollout is left out (weight 0)
    rollout_R: torch.Tensor  # int64: index of the token's rollout in this micro-batch, rising from 0
    old_logprobs_R: torch.Tensor | None = None  # float32; None: not recomputed, use logprobs_R.detach()
    reference_logprobs_R: torch.Tensor | None = None  # float32; None: no reference policy
    teacher_logprobs_R: torch.Tensor | None = None  # float32; None: no teacher
    teacher_top_RK: torch.Tensor | None = None  # float32, a teacher's log-probs of its most likely tokens
    top_logprobs_RK: torch.Tensor | None = None  # float32 with gradient, the policy's log-probs of these
    spans: tuple[TeacherSpan, ...] = ()
    """Not empty: the columns belong to several teachers, or one with another tokenizer."""
    nll_weights_R: torch.Tensor | None = None  # float32, see WeightedSequence.nll_weight; None: all are 0
    extra_R: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """float32: custom rollout columns (`RolloutColumns.extra_T`) by name; 0 for rollouts without the column."""
    full_logprobs_R: torch.Tensor | None = None
    """float32 with gradient: log-probs over the whole vocabulary, comparable with reference and teacher; None:
    `logprobs_R`."""
    old_full_logprobs_R: torch.Tensor | None = None
    """`old_logprobs_R` over the whole vocabulary."""


@dataclass(frozen=True)
class ValueBatch:
    """Columns of one micro-batch for advantages and the critic's loss, one element per response token."""

    # float32, of the critic's current weights; with gradient in its training; 0 without a critic
    values_R: torch.Tensor
    rewards_R: torch.Tensor  # float32, the reward of the token's rollout, or its advantage
    token_weights_R: torch.Tensor
    counted_R: torch.Tensor
    rollout_R: torch.Tensor  # these three as in TokenBatch
    old_values_R: torch.Tensor | None = None  # float32, before the step
    returns_R: torch.Tensor | None = None  # float32, the targets of the values
    old_logprobs_R: torch.Tensor | None = None
    reference_logprobs_R: torch.Tensor | None = None  # these two as in TokenBatch, and over the whole vocabulary


@dataclass(frozen=True)
class LossOutput:
    """The answer of a `MicroBatchLoss` or `ValueLoss` for one micro-batch. All tensors are scalars."""

    loss: torch.Tensor
    """Sum over the tokens, weights applied. Training follows the gradient of its sum over micro-batches and ranks."""
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Metrics that add up over micro-batches and data-parallel ranks (counts too); the driver divides."""
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    """Metrics reduced by maximum over micro-batches and ranks; at least 0 (the value over no tokens)."""


class MicroBatchLoss(Protocol):
    """The loss of a micro-batch, pickled to the workers. `RunLoss` builds it from an algorithm's `token_loss`. It needs
    at least one token, and must return the same metric names for every micro-batch."""

    def __call__(self, batch: TokenBatch) -> LossOutput: ...


class ValueLoss(Protocol):
    """The same for a critic."""

    def __call__(self, batch: ValueBatch) -> LossOutput: ...


class AdvantageEstimate(Protocol):
    """Makes the advantages of tokens, and with a critic its returns; pickled to the workers."""

    @property
    def column(self) -> str:
        """A column that it computes with, which the ranks have that have the model's output."""
        ...

    @property
    def whitens(self) -> bool:
        """Whether the advantages of all tokens of the batch are given the mean 0 and the standard deviation 1."""
        ...

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """The minimum and maximum of advantages, which are cut there; None: unbounded."""
        ...

    def __call__(self, batch: ValueBatch) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the return, if there is a critic, and the advantage of each token of a micro-batch [R]."""
        ...


@dataclass(frozen=True)
class Rounded:
    """How much of the optimizer's work is seen in the weights that are computed with, where these are not float32."""

    changed_step: float
    """Share of the weights that the step has changed."""
    changed: float
    """Share of the weights that differ from the process's first weights."""
    carried: float
    """Share of the float32 weights' movement since then that the weights have made."""


@dataclass(frozen=True)
class RouterLoad:
    """How evenly routers used their experts in a mini-batch, means over the layers with experts."""

    balance_loss: float
    """The load-balance loss without its coefficient: 1 where all experts are used alike."""
    z_loss: float
    """The z-loss without its coefficient."""
    busiest: float
    """Tokens of the busiest expert of any layer, over the mean of its layer."""


@dataclass(frozen=True)
class MinibatchResult:
    """One optimizer step, summed over all ranks."""

    loss: float
    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norm: float
    """Before clipping; not finite where `skipped`."""
    skipped: bool
    """The gradient was not finite and the step was not taken."""
    loss_scale: float | None = None
    """The factor of the loss, in float16."""
    rounded: Rounded | None = None
    """None: all is float32, or adapters are trained."""
    routers: RouterLoad | None = None
    """None: routers have no auxiliary loss."""


@dataclass(frozen=True)
class LogprobStats:
    """Difference d = recomputed - engine's log-probs over the response tokens of all ranks."""

    tokens: int
    abs_sum: float  # sum of |d|
    max_abs: float
    k3_sum: float  # sum of exp(d) - 1 - d

    @property
    def mean_abs(self) -> float:
        return self.abs_sum / max(self.tokens, 1)

    @property
    def kl(self) -> float:
        """Estimate of KL(engine || policy), mean of exp(d) - 1 - d."""
        return self.k3_sum / max(self.tokens, 1)

    def joined(self, other: LogprobStats) -> LogprobStats:
        sums = (self.tokens + other.tokens, self.abs_sum + other.abs_sum)
        return LogprobStats(*sums, max(self.max_abs, other.max_abs), self.k3_sum + other.k3_sum)
