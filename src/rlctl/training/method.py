"""The interface of training methods, in two halves: what is learned (`Learns`) and from which data (`Feeds`).

A method owns its configuration class, its loss and metrics, its rows and their source, and its workload for the planner
(`methods/`). What only some methods need is a capability (`training/capabilities.py`). The object lives in the driver,
which does not import torch, and is pickled to the policy's ranks, which compute `token_loss` and `measure`: the file of
a method imports torch inside these two only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlctl.backends.batching.batch import TokenBatch, TrainBatch
from rlctl.data.row_types import PROMPTS, RowType
from rlctl.rollouts.source import RolloutSource
from rlctl.settings.config import RlctlConfig
from rlctl.settings.training import LogprobColumn
from rlctl.telemetry.metrics import Metric

if TYPE_CHECKING:
    import torch

    from rlctl.models.facts import ModelFacts
    from rlctl.planner.inputs.request import Workload
    from rlctl.rollouts.dataset import HeldOutTexts
    from rlctl.rollouts.prompt_order import PromptStream
    from rlctl.rollouts.validation import Validation, ValidationSet
    from rlctl.training.running_parts import SourceParts, ValidationParts
    from rlctl.training.user_loss import UserLoss


class Learns(ABC):
    """The loss of a method: which log-probs it needs, what a batch weighs, and what is measured. Suffix R: the response
    tokens of a micro-batch."""

    Config: ClassVar[type[RlctlConfig]] = RlctlConfig
    """The method's sections and keys."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values by key that replace defaults of sections shared with other methods."""
    requires: frozenset[LogprobColumn] = frozenset()
    """Log-probs that the loss cannot do without."""
    metrics: Sequence[Metric] = ()
    """The metrics that `measure` computes."""

    config: Any
    """An instance of `Config` as the user set it, without values that the planner decides."""

    @property
    def needs(self) -> frozenset[LogprobColumn]:
        """Log-probs computed before training; the planner counts them."""
        return self.requires

    @property
    def teacher_top(self) -> int:
        """Number of a teacher's most likely tokens per position whose log-probs the loss needs."""
        return 0

    @property
    def columns(self) -> tuple[Metric, ...]:
        """Further metrics of a step for the terminal."""
        return ()

    @abstractmethod
    def train_batch(self, groups: Sequence[Any], optimizer_steps: int) -> TrainBatch:
        """Return the groups of a batch as up to `optimizer_steps` mini-batches of about equal size, with the weight of
        each token."""

    @abstractmethod
    def token_loss(self, batch: TokenBatch) -> torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss of each response token [R], without its weight, differentiable in `batch.logprobs_R` and
        `batch.entropy_R`; optionally with the values of `measure`, to compute them once."""

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        """Return the values [R] of `metrics` by name, without gradient; a sum or a maximum may also be a scalar."""
        return {}


class Feeds(ABC):
    """The data of a method: its rows, their batches, its validation, and the work of a batch."""

    command: ClassVar[str] = ""
    """NAME of the command `rlctl train NAME`."""
    flags: ClassVar[str] = ""
    """Further flags of that command, by their names in `commands/options.py`."""
    examples: ClassVar[tuple[str, ...]] = ()
    """Command lines shown in its help."""
    rows: ClassVar[RowType] = PROMPTS
    """Contents of a dataset row."""

    @abstractmethod
    def workload(self, facts: ModelFacts, tokens: int | None = None) -> Workload:
        """Return the work of a step for the planner. `tokens`: mean length of prompts or texts; None: unknown."""

    @abstractmethod
    def open_data(self, model_dir: Path) -> PromptStream:
        """Open data and tokenizer. Raises InputError for wrong data or a wrong tokenizer."""

    @abstractmethod
    def open_validation(self, prompts: PromptStream, model_dir: Path) -> ValidationSet | HeldOutTexts | None:
        """Open the validation data; None: the run does not validate. Raises ConfigError or InputError."""

    @abstractmethod
    def source(self, parts: SourceParts) -> AbstractContextManager[RolloutSource]:
        """Return the source of the run's batches."""

    @abstractmethod
    def validation(self, data: Any, parts: ValidationParts) -> Validation | None:
        """Return the validation on the `data` of `open_validation`; None: there is none."""

    @abstractmethod
    def batch_metrics(self, batch: Any, version: int) -> dict[str, Any]:
        """Return the metrics of a batch that the weights of `version` train on."""


class Method(Learns, Feeds):
    """A training method with its configuration."""

    user_loss: UserLoss | None = None
    """A user's loss, which replaces `token_loss`."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.made_by: Callable[[Any], Method] = type(self)
        """Factory that makes the same method in another process."""

    def use(self, loss: UserLoss) -> None:
        """Replace the method's loss and metrics by a user's."""
        self.user_loss = loss
        self.metrics = tuple(Metric(name, "mean", curve=name) for name in loss.names or ())

    def manifest(self) -> dict[str, Any]:
        """Return the method's entry in the run's manifest, which a resume compares."""
        code, package = getattr(self.made_by, "code", None), getattr(self.made_by, "package", None)
        origin = {"file": code.fingerprint} if code else {"package": package} if package else {}
        own_loss = {"loss": self.user_loss.code.fingerprint} if self.user_loss else {}
        return {"name": self.config.run.algorithm} | origin | own_loss

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.made_by, self.config, self.user_loss)


def _made(make: Callable[[Any], Method], config: RlctlConfig, loss: UserLoss | None) -> Method:
    method = make(config)
    method.made_by = make
    if loss is not None:
        method.use(loss)
    return method
