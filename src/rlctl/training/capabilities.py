"""Capabilities of training methods: what some methods need of a run, in addition to `training/method.py`.

A method that has one derives from its class; a run asks with `isinstance`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.backends.batching.batch import MicroBatchLoss, MinibatchResult, TokenBatch, TrainBatch
from rlctl.telemetry.metrics import Metric

if TYPE_CHECKING:
    import torch

    from rlctl.backends.clients import PolicyClient
    from rlctl.training.agreement import Agreement
    from rlctl.training.running_parts import Critic, CriticSettings

PassBefore = tuple[TrainBatch, MicroBatchLoss, Callable[[Sequence[MinibatchResult]], None]]
"""A batch, the pass's outputs, and the function that receives the results."""


class SampledByEngines(ABC):
    """Trains on rollouts that engines sampled: their log-probs are compared with the trainer's."""

    @abstractmethod
    def agreement(self, dtype: str) -> Agreement:
        """Return the limits for the difference of log-probs between engines and trainer."""

    @abstractmethod
    def adjusted(self, batch: TokenBatch) -> TokenBatch:
        """Return a micro-batch with the advantages that the loss uses."""

    @property
    @abstractmethod
    def always_measured(self) -> tuple[Metric, ...]:
        """Metrics of every loss on rollouts, also of a user's."""

    @abstractmethod
    def measure_always(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """Return the values [R] of `always_measured`, without gradient."""


class HasCritic(ABC):
    """May train a value model next to the policy."""

    @property
    @abstractmethod
    def critic(self) -> CriticSettings | None:
        """The optimizer of the value model; None: the configuration has no critic."""

    @abstractmethod
    def open_critic(self, policy: PolicyClient) -> Critic | None:
        """Return the value model; None: the configuration has no critic."""


class PassBeforeStep(ABC):
    """Computes something of a batch before each step on it, as KTO's estimate of the divergence."""

    @abstractmethod
    def before_training(self, batch: TrainBatch) -> PassBefore:
        """Return the batch of the pass, its outputs, and the function that receives the results."""


class PrecomputesReference(ABC):
    """May compute the reference log-probs of all rows before the first step, in place of holding a reference model."""

    @property
    @abstractmethod
    def reference_before_training(self) -> bool:
        """Whether the configuration asks for it."""


class ScalarHead:
    """Trains a model with a scalar head in place of logits."""


class PacksWholeGroups:
    """Compares the texts of a group, which therefore share a packed row."""


class Refuses:
    """Cannot run with some settings or models."""

    def refuse(self, config: Any) -> None:
        """Raise ConfigError for settings that exclude each other. `config` has the plan's values."""

    def refuse_model(self, directory: Path) -> None:
        """Raise InputError for a model that the method cannot train, by the files in `directory`."""
