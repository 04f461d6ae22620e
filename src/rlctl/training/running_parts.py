"""The running parts of a run that a method's source, validation and critic use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rlctl.backends.clients import PolicyClient
    from rlctl.refit.records import RefitReport
    from rlctl.refit.sync import WeightSync
    from rlctl.rollouts.prompt_order import PromptStream
    from rlctl.rollouts.scored_groups import Scorers
    from rlctl.telemetry.phases import StepTimer


@dataclass(frozen=True)
class SourceParts:
    """The running parts for a source of batches."""

    prompts: PromptStream
    timer: StepTimer
    scorers: Scorers | None = None
    """None: no scoring."""
    sync: WeightSync | None = None
    """None: there are no engines."""
    tell: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class ValidationParts:
    """The running parts for a validation."""

    policy: PolicyClient
    scorers: Scorers | None = None
    """None: no scoring."""
    sync: WeightSync | None = None
    """None: there are no engines."""
    refitted: Callable[[RefitReport], None] = lambda _: None
    """Receives the report of the first refit of engines that only validation uses."""


class CriticSettings(Protocol):
    """The optimizer of a value model."""

    lr: float
    weight_decay: float
    clip_grad: float


class Critic(Protocol):
    """A value model next to the policy, trained on each batch before the policy."""

    def alone(self, step: int) -> bool:
        """Return whether `step` (from 0) only warms up the critic, without training the policy."""
        ...

    def train(self, step: int, minibatches: int) -> dict[str, Any]:
        """Compute the token advantages of the loaded batch, train on it, and return the metrics."""
        ...
