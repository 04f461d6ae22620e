"""The seam of training methods: what the loop, the policy's ranks and the planner ask of one.

A method owns its configuration class (`Config`), its rows, its workload for the planner, its parts and its metrics
(`methods/`). Its object lives in the driver, where torch is not imported, and is pickled to the policy's ranks, where
`token_loss` and `measure` run: the file of a method imports torch inside these two only. Suffixes: G the rollouts of a
group, N those of an optimizer mini-batch, R response tokens.

`RunLoss` is what a policy trains on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from rlctl.backends.batching.batch import (
    AdvantageEstimate,
    LossOutput,
    MicroBatchLoss,
    MinibatchResult,
    TokenBatch,
    TrainBatch,
)
from rlctl.backends.messages import Truncation
from rlctl.data.rollouts import Rollout, RolloutGroup
from rlctl.data.row_types import PROMPTS, RowType
from rlctl.errors import InputError
from rlctl.processes.child import call_in_child
from rlctl.rollouts.source import RolloutSource
from rlctl.settings.config import RlctlConfig
from rlctl.settings.training import LogprobColumn
from rlctl.telemetry.metrics import TOKENS, Metric, nested
from rlctl.training.user_loss import TRIAL_TIMEOUT_S, UserLoss, made_up_batch

if TYPE_CHECKING:
    import torch

    from rlctl.backends.clients import PolicyClient
    from rlctl.models.facts import ModelFacts
    from rlctl.planner.inputs.request import Workload
    from rlctl.refit.records import RefitReport
    from rlctl.refit.sync import WeightSync
    from rlctl.rollouts.dataset import HeldOutTexts
    from rlctl.rollouts.prompt_order import PromptStream
    from rlctl.rollouts.scored_groups import Scorers
    from rlctl.rollouts.validation import Validation, ValidationSet
    from rlctl.telemetry.phases import StepTimer
    from rlctl.training.agreement import Agreement

ENTROPY = Metric("entropy", "mean", "entropy (nats)", "entropy")
NAMES_OF_A_STEP = frozenset({
    "accuracy", "answered_fraction", "critic", "dropped_groups", "dropped_rollouts", "dropped_rows", "entropy",
    "grad_norm", "groups_without_signal", "image_tokens_mean", "images",
    "imbalance", "importance", "length_penalty", "logprob_diff", "loss", "lost_engines", "lr",
    "micro_batches", "missing_groups", "offloaded_bytes", "optimizer_steps", "padding_fraction",
    "policy_failure", "policy_restarts",
    "positions", "prompt_tokens_mean",
    "refit_seconds", "refit_verified", "response_tokens_max", "response_tokens_mean", "reward_by_source",
    "reward_error", "reward_mean", "reward_std", "reward_terms", "rollout_tokens", "sampled_rollouts",
    "sampling_rounds", "scorer_failures", "seconds", "skipped_fraction", "skipped_rollouts", "skipped_steps",
    "staleness", "step", "stop_reasons", "system", "tokens", "tokens_by_version", "tokens_per_s", "trained_tokens",
    "truncated_fraction", "unshared_tokens", "validation", "validation_at_start", "versions_since_admission",
    "weight_version",
})  # fmt: skip
"""Names in metrics.jsonl that every method's steps may have; no method's own metric can have one of them."""
SQUARES = "/squares"
"""Ending of the name of a sum of squares."""


class CriticSettings(Protocol):
    """The optimizer of a value model."""

    lr: float
    weight_decay: float
    clip_grad: float


@dataclass(frozen=True)
class SourceParts:
    """The running parts that a source of rollouts can use."""

    prompts: PromptStream
    timer: StepTimer
    scorers: Scorers | None = None
    """None: nothing is scored."""
    sync: WeightSync | None = None
    """None: there are no engines."""
    tell: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class ValidationParts:
    """The running parts that a validation can use."""

    policy: PolicyClient
    scorers: Scorers | None = None
    """None: nothing is scored."""
    sync: WeightSync | None = None
    """None: there are no engines."""
    refitted: Callable[[RefitReport], None] = lambda _: None
    """Told of the first weights of engines that only validation uses."""


class Critic(Protocol):
    """A value model next to the policy, trained on each batch before the policy is."""

    def alone(self, step: int) -> bool:
        """Return whether the critic warms up in `step` (from 0), in which the policy is not trained."""
        ...

    def train(self, step: int, minibatches: int) -> dict[str, Any]:
        """Give the tokens of the loaded batch their advantages, train on it, and return the metrics."""
        ...


class Method(ABC):
    """A training method with its configuration; a subclass gives at least `batch_advantages` and `token_loss`."""

    Config: ClassVar[type[RlctlConfig]] = RlctlConfig
    """The sections and keys that exist for it."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values by key that replace defaults of the sections it shares with other methods."""
    command: ClassVar[str] = ""
    """NAME of the command `rlctl train NAME`."""
    flags: ClassVar[str] = ""
    """Flags of that command in addition to those of every method, by their names in `commands/options.py`."""
    examples: ClassVar[tuple[str, ...]] = ()
    """Command lines that its help shows."""
    requires: frozenset[LogprobColumn] = frozenset()
    """Log-probs without which it cannot run, whatever the configuration says."""
    rows: ClassVar[RowType] = PROMPTS
    """What a row of its data holds."""
    sequences: ClassVar[int] = 1
    """Token sequences of a dataset row that stay together in an optimizer mini-batch."""
    whole_groups: ClassVar[bool] = False
    """Whether these are trained on in one packed row."""
    valued: ClassVar[bool] = False
    """Whether the model has a scalar head in place of logits."""
    rewarded: ClassVar[bool] = False
    """Whether a step has rewards to be judged by; if not, it is judged by its loss."""
    metrics: Sequence[Metric] = ()
    """The metrics that `measure` computes."""
    user_loss: UserLoss | None = None
    """A loss of the user's that is computed in place of `token_loss`."""

    def __init__(self, config: Any) -> None:
        """`config`: an instance of `Config` as the user set it, without values that the planner decides."""
        self.config = config
        self.made_by: Callable[[Any], Method] = type(self)
        """Factory that makes the same method in another process."""

    def use(self, loss: UserLoss) -> None:
        """Take a user's loss and its metrics in place of the method's own."""
        self.user_loss = loss
        self.metrics = tuple(Metric(name, "mean", curve=name) for name in loss.names or ())

    # Before a run

    def refuse(self, config: Any) -> None:
        """Raise ConfigError for settings with which the method cannot run. `config` holds the plan's values."""
        return

    def refuse_model(self, directory: Path) -> None:
        """Raise InputError for a model that the method cannot train, by the files in `directory`."""
        return

    def try_out(self, what: str) -> None:
        """Raise InputError where a method from outside rlctl, called `what` in messages, does not work on made-up
        data."""
        if getattr(self.made_by, "code", None) or getattr(self.made_by, "package", None):  # a child can import it
            call_in_child(f"the trial of the {what}", partial(_try_loss, self, what), limit_s=TRIAL_TIMEOUT_S)

    @abstractmethod
    def workload(self, facts: ModelFacts, tokens: int | None = None) -> Workload:
        """Return the work of a step for the planner. `tokens`: mean length of prompts or texts, where it is known."""

    @abstractmethod
    def open_data(self, model_dir: Path) -> PromptStream:
        """Open data and tokenizer. Raises InputError for what is wrong with either."""

    @abstractmethod
    def open_validation(self, prompts: PromptStream, model_dir: Path) -> ValidationSet | HeldOutTexts | None:
        """Open the validation data; None where the run does not validate. Raises ConfigError or InputError."""

    @abstractmethod
    def source(self, parts: SourceParts) -> AbstractContextManager[RolloutSource]:
        """Return the source of the run's batches."""

    @abstractmethod
    def validation(self, data: Any, parts: ValidationParts) -> Validation | None:
        """Return the measure of the validation `data` that `open_validation` returned; None: there is none."""

    def agreement(self, dtype: str) -> Agreement | None:
        """Return the limits for the difference of log-probs between engines and trainer; None: nothing is compared."""
        return None

    def open_critic(self, policy: PolicyClient) -> Critic | None:
        """Return the value model next to the policy; None: there is none."""
        return None

    @property
    def new_tokens(self) -> int:
        """Largest number of tokens that are sampled after a prompt, in one turn; 0: nothing is sampled."""
        return 0

    def has_scores(self, own: bool) -> bool:
        """Return whether rollouts are scored. `own`: the data or the configuration name scorers."""
        return False

    @property
    def temperature(self) -> float:
        """Temperature of the distribution that the loss is computed with."""
        return 1.0

    def truncation(self, vocab: int) -> Truncation | None:
        """Return the truncation of the distribution that is sampled and trained; None: all tokens are."""
        return None

    @property
    def needs(self) -> frozenset[LogprobColumn]:
        """Log-probs that are computed before training, and that the planner counts."""
        return self.requires

    @property
    def teacher_top(self) -> int:
        """Number of a teacher's most likely tokens at each position whose log-probs the loss needs."""
        return 0

    @property
    def critic(self) -> CriticSettings | None:
        """The settings of the value model next to the policy; None: there is none."""
        return None

    @property
    def reads_with_own_tokenizer(self) -> bool:
        """Whether the teacher reads the texts with another tokenizer than the policy's."""
        return False

    @property
    def reference_before_training(self) -> bool:
        """Whether the log-probs of the reference are computed for all rows before the first step."""
        return False

    @property
    def columns(self) -> tuple[Metric, ...]:
        """Further metrics of a step that the terminal shows."""
        return ()

    # In the driver

    @property
    def compares_rewards(self) -> bool:
        """Whether nothing is learned from a group whose rollouts all have the same reward."""
        return False

    @property
    def learns_without_advantage(self) -> bool:
        """Whether a rollout with advantage 0 has a gradient; if not, its tokens need not be computed."""
        return True

    @property
    def skips_idle(self) -> bool:
        """Whether rollouts without a gradient are left out of the training pass."""
        return True

    def trains_on(self, group: RolloutGroup) -> bool:
        """Return whether a group is trained on."""
        return True

    @abstractmethod
    def batch_advantages(self, groups: Sequence[RolloutGroup]) -> list[np.ndarray]:
        """Return the advantages [G] of each group of a step's batch, float64."""

    def imitated(self, group: RolloutGroup) -> np.ndarray:
        """Return which rollouts of a group have their negative log-likelihood added to the loss; bool [G]."""
        return np.zeros(len(group.rollouts), bool)

    @property
    def nll_weight(self) -> float:
        """Weight of that likelihood, a mean over the tokens of all these rollouts."""
        return 0.0

    @property
    def token_advantages(self) -> AdvantageEstimate | None:
        """What the policy's ranks make the advantages of tokens with before they train; None: a rollout's tokens all
        have its advantage."""
        return None

    def step_metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        """Return metrics of a step that follow from its batch."""
        return {}

    def learned_tokens(self, rollout: Rollout) -> int:
        """Return the number of response tokens that a rollout is learned from."""
        return rollout.response_tokens

    @abstractmethod
    def token_weights(self, response_tokens_N: np.ndarray) -> np.ndarray:
        """Return the weight of each response token of a rollout; float64 [N]. All normalization is in them."""

    def before_training(
        self, batch: TrainBatch
    ) -> tuple[TrainBatch, MicroBatchLoss, Callable[[Sequence[MinibatchResult]], None]] | None:
        """Return a batch, what is computed of it before each step on `batch`, and the function that takes the results;
        None: nothing is computed."""
        return None

    def manifest(self) -> dict[str, Any]:
        """Return what the run's manifest keeps of it, and a resume compares."""
        code, package = getattr(self.made_by, "code", None), getattr(self.made_by, "package", None)
        made_of = {"file": code.fingerprint} if code else {"package": package} if package else {}
        own_loss = {"loss": self.user_loss.code.fingerprint} if self.user_loss else {}
        return {"name": self.config.run.algorithm} | made_of | own_loss

    # On the policy's ranks

    @abstractmethod
    def token_loss(self, batch: TokenBatch) -> torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss of each response token [R], without its weight; differentiable in `batch.logprobs_R`, and
        in `batch.entropy_R` where it depends on it. With it may come the values that `measure` would compute again."""

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        """Return the values [R] of `metrics` by name, without gradient; a sum or a maximum may also be a scalar."""
        return {}

    def adjusted(self, batch: TokenBatch) -> TokenBatch:
        """Return a micro-batch as its loss sees it."""
        return batch

    @property
    def always_measured(self) -> tuple[Metric, ...]:
        """Metrics of every loss of this kind of method, also of a user's."""
        return () if self.valued else (ENTROPY,)

    def measure_always(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """Return the values [R] of `always_measured`, without gradient."""
        return {} if self.valued else {"entropy": batch.entropy_R}

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.made_by, self.config, self.user_loss)


def _made(make: Callable[[Any], Method], config: RlctlConfig, loss: UserLoss | None) -> Method:
    method = make(config)
    method.made_by = make
    if loss is not None:
        method.use(loss)
    return method


def _try_loss(method: Method, what: str) -> None:
    """Compute the loss and the metrics of two made-up rollouts. Raises InputError where that fails."""
    try:
        RunLoss(method)(made_up_batch(method.needs, method.teacher_top))
    except InputError:
        raise
    except Exception as error:
        if method.rows is not PROMPTS or method.valued:
            return  # a row of its own may have columns that made-up rollouts lack
        code = getattr(method.made_by, "code", None)
        if code is not None:
            raise code.error(error, "computing the loss of made-up rollouts") from error
        raise InputError(f"The {what} raised {type(error).__name__}: {error} (computing a loss).") from error


def declared(method: Method) -> tuple[Metric, ...]:
    """Return the metrics of a run of `method` that are computed while it trains."""
    return (*method.always_measured, *method.metrics)


def finite(batch: TokenBatch) -> TokenBatch:
    """Return the batch with 0 in place of what is not finite in the columns of tokens that are left out: an infinite
    log-prob of theirs has no part in the loss, but 0 times its gradient would be NaN."""
    columns = ("logprobs_R", "full_logprobs_R", "entropy_R", "rollout_logprobs_R", "old_logprobs_R",
               "old_full_logprobs_R", "reference_logprobs_R", "teacher_logprobs_R", "teacher_top_RK",
               "top_logprobs_RK")  # fmt: skip
    given = {name: getattr(batch, name) for name in columns}
    odd = {name: ~values.isfinite() for name, values in given.items() if values is not None}
    left_out = {name: odd_R & ~(batch.counted_R if odd_R.ndim == 1 else batch.counted_R[:, None])
                for name, odd_R in odd.items()}  # fmt: skip
    return replace(batch, **{name: given[name].masked_fill(here, 0.0) for name, here in left_out.items()})


@dataclass(frozen=True)
class RunLoss:
    """The `MicroBatchLoss` of a method: its loss over response tokens, weighted and summed, and metrics' parts."""

    method: Method

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return the loss and metrics of one micro-batch."""
        import torch

        method, own = self.method, self.method.user_loss
        batch = method.adjusted(finite(batch))
        found = method.token_loss(batch) if own is None else own(batch, method.config.loss)
        loss_R, measured = found if isinstance(found, tuple) else (found, None)
        # Left-out tokens have weight 0; where() also keeps an infinite value of theirs from becoming 0 * inf.
        loss = torch.where(batch.counted_R, batch.token_weights_R * loss_R, 0.0).sum()
        if batch.nll_weights_R is not None:
            loss = loss - (batch.nll_weights_R * batch.logprobs_R).sum()
        with torch.no_grad():
            measured = method.measure(batch) if measured is None else measured
            values = {**method.measure_always(batch), **measured}
            return self._reduced(loss, values, batch.counted_R)

    def _reduced(self, loss: torch.Tensor, values: dict[str, torch.Tensor], mask_R: torch.Tensor) -> LossOutput:
        """Raise InputError where the method measures other metrics than it declares."""
        import torch

        reductions = {metric.name: metric.reduce for metric in declared(self.method)}
        if reductions.keys() != values.keys():
            name, odd = self.method.config.run.algorithm, sorted(reductions.keys() ^ values.keys())[0]
            if odd in values:
                declaration = f'metrics = (Metric("{odd}", "mean"),)'
                hint = f"Declare it in the class: {declaration}, from rlctl.telemetry.metrics."
                raise InputError(f"Algorithm {name} measures {odd!r}, which its `metrics` do not declare.", hint)
            raise InputError(
                f"Algorithm {name} declares the metric {odd!r} in `metrics`, and its `measure` does not return it.",
                "Return it for every batch, or leave it out of `metrics`.",
            )
        dtype = loss.dtype
        sums, maxima = {TOKENS: mask_R.to(dtype).sum()}, {}
        for name, value in values.items():
            kept = torch.where(mask_R, value.detach().to(dtype), 0.0) if value.ndim else value.detach()
            if reductions[name] == "max":
                maxima[name] = kept.max()
            else:
                sums[name] = kept.sum()
            if reductions[name] == "effective":
                sums[name + SQUARES] = kept.square().sum()
        return LossOutput(loss=loss, sums=sums, maxima=maxima)

    def metrics(self, results: Sequence[MinibatchResult]) -> dict[str, Any]:
        """Return the metrics over all optimizer steps of a batch; none where no token was computed."""
        tokens = sum(result.sums.get(TOKENS, 0.0) for result in results)
        if not tokens:
            return {}
        found, flat = {}, {}
        for metric in declared(self.method):
            if metric.reduce == "max":
                found[metric.name] = max(result.maxima.get(metric.name, 0.0) for result in results)
            else:
                total = sum(result.sums.get(metric.name, 0.0) for result in results)
                count = sum(result.sums.get(metric.per, 0.0) for result in results)
                found[metric.name] = total if metric.reduce != "mean" else total / count if count else 0.0
            if metric.reduce == "effective":
                squares = sum(result.sums.get(metric.name + SQUARES, 0.0) for result in results)
                found[metric.name] = found[metric.name] ** 2 / (tokens * squares) if squares else 0.0
            if metric.flat:
                flat[metric.name] = found.pop(metric.name)
        return nested(found) | flat
