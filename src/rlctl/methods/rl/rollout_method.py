"""The base of methods that train on rollouts: engines sample them, and scorers or a teacher judge them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlctl.data.rollouts import RolloutGroup
from rlctl.errors import ConfigError
from rlctl.methods.rl.rl_config import AlgorithmConfig, RlConfig
from rlctl.methods.rl.rollout_metrics import rollout_metrics
from rlctl.methods.rl.sections import CriticConfig
from rlctl.rollouts.source import RolloutBatch, RolloutSource
from rlctl.telemetry.metrics import Metric
from rlctl.training.agreement import Agreement, precision_of
from rlctl.training.capabilities import HasCritic, Refuses, SampledByEngines
from rlctl.training.method import Method

if TYPE_CHECKING:
    from rlctl.backends.clients import PolicyClient
    from rlctl.methods.rl.critic import Critic
    from rlctl.models.facts import ModelFacts
    from rlctl.planner.inputs.request import Workload
    from rlctl.rollouts.prompt_order import PromptStream
    from rlctl.rollouts.validation import Validation, ValidationSet
    from rlctl.training.running_parts import SourceParts, ValidationParts

DROPPED = Metric("dropped_groups", "sum", column="dropped", form=".0f")
ROUNDS = Metric("sampling_rounds", "sum", column="rounds", form=".0f")
FILTERED: Mapping[str, tuple[Metric, ...]] = {"keep": (), "drop": (DROPPED,), "replace": (DROPPED, ROUNDS)}
"""Counts of a step that the terminal shows, by `filter.groups`."""


class RolloutMethod(Method, SampledByEngines, HasCritic, Refuses):
    """Trains on rollouts of engines."""

    Config: ClassVar[type[AlgorithmConfig]] = RlConfig
    config: AlgorithmConfig
    command = "grpo"

    def refuse(self, config: AlgorithmConfig) -> None:
        refuse_async(config)

    def workload(self, facts: ModelFacts, tokens: int | None = None) -> Workload:
        from rlctl.planner.from_config import rollout_workload

        return rollout_workload(
            self.config, facts, tokens, needs=self.needs, critic=self.config.has_critic, teacher_top=self.teacher_top
        )

    def open_data(self, model_dir: Path) -> PromptStream:
        from rlctl.rollouts.prompt_order import PromptStream

        return PromptStream.open_rollouts(self.config, model_dir)

    def open_validation(self, prompts: PromptStream, model_dir: Path) -> ValidationSet | None:
        from rlctl.rollouts.validation import ValidationSet

        return ValidationSet.open(self.config, prompts, model_dir)

    def source(self, parts: SourceParts) -> AbstractContextManager[RolloutSource]:
        from rlctl.rollouts.asynchronous import AsynchronousSource
        from rlctl.rollouts.synchronous import SynchronousSource

        assert parts.sync is not None  # prompts are answered by engines
        shared = (self.config, parts.prompts, parts.sync.engines, parts.scorers, parts.sync, parts.timer)
        if self.config.rollouts.mode == "async":
            return closing(AsynchronousSource(*shared, self.trains_on, parts.tell))
        return nullcontext(SynchronousSource(*shared, self.trains_on))

    def validation(self, data: ValidationSet, parts: ValidationParts) -> Validation | None:
        from rlctl.rollouts.validation import SampledValidation

        assert parts.sync is not None  # prompts are answered by engines
        return SampledValidation(self.config, data, parts.sync.engines, parts.scorers, parts.sync)

    def agreement(self, dtype: str) -> Agreement:
        return Agreement.from_config(self.config, precision_of(self.config, dtype), self.needs)

    def open_critic(self, policy: PolicyClient) -> Critic | None:
        from rlctl.methods.rl.critic import Critic

        return Critic(self.config, policy) if self.config.has_critic else None

    @property
    def critic(self) -> CriticConfig | None:
        return self.config.critic if self.config.has_critic else None

    @property
    def columns(self) -> tuple[Metric, ...]:
        return FILTERED[self.config.filter.groups]

    def batch_metrics(self, batch: RolloutBatch, version: int) -> dict[str, Any]:
        metrics = rollout_metrics(batch, version, compares=self.config.compares_rewards)
        if self.config.reward.overlong_buffer:
            penalties = [self.length_penalties(group) for group in batch.groups]
            metrics["length_penalty"] = float(np.concatenate(penalties).mean())
        return metrics

    @abstractmethod
    def trains_on(self, group: RolloutGroup) -> bool:
        """Return whether a group is trained on."""

    @abstractmethod
    def length_penalties(self, group: RolloutGroup) -> np.ndarray:
        """Return the penalty for the length of each rollout; float64 [G], at most 0."""


def refuse_async(config: AlgorithmConfig) -> None:
    """Raise ConfigError for settings with which rollouts cannot be made while the policy trains."""
    rollouts = config.rollouts
    if rollouts.mode != "async":
        return
    if config.refit.in_flight == "abort":
        raise ConfigError(
            "rollouts.mode = async: refit.in_flight = abort would cut off every rollout that is being sampled when new "
            "weights come.",
            "Choose refit.in_flight=wait or keep.",
        )
    if rollouts.max_staleness > 0 and config.loss.importance_correction == "off" and not rollouts.uncorrected:
        raise ConfigError(
            f"rollouts.max_staleness = {rollouts.max_staleness}: rollouts of older weights need a correction, and "
            "loss.importance_correction is off.",
            "Choose loss.importance_correction=truncated, masked or ratio, or --max-staleness 0; "
            "rollouts.uncorrected=true trains on them as they are.",
        )
