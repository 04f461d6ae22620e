"""The base of training methods that read texts from a dataset: no rollouts, and engines for `validation.answers`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rlctl.data.rollouts import RolloutGroup
from rlctl.methods.rl.advantages import token_weights
from rlctl.rollouts.source import RolloutSource
from rlctl.settings.training import LogprobColumn
from rlctl.telemetry.metrics import LOSS, Metric
from rlctl.training.method import Method, SourceParts, ValidationParts

if TYPE_CHECKING:
    from rlctl.models.facts import ModelFacts
    from rlctl.planner.inputs.request import Workload
    from rlctl.rollouts.dataset import HeldOutTexts, TextStream
    from rlctl.rollouts.prompt_order import PromptStream
    from rlctl.rollouts.validation import Validation

LOSS_COLUMN = Metric(LOSS, "sum", column="loss", form=".4f")


class TextMethod(Method):
    """Learns from the texts of a dataset."""

    packed_texts: ClassVar[int] = 1
    """Texts of a dataset row that are planned as one sequence."""

    def workload(self, facts: ModelFacts, tokens: int | None = None) -> Workload:
        from rlctl.planner.from_config import text_workload

        return text_workload(
            self.config,
            facts,
            tokens,
            needs=self.needs,
            size=self.packed_texts,
            valued=self.valued,
            teacher_top=self.teacher_top,
        )

    @property
    def stream(self) -> type[TextStream]:
        """The class that reads the rows."""
        from rlctl.rollouts.dataset import TextStream

        return TextStream

    def open_data(self, model_dir: Path) -> PromptStream:
        stream = self.stream.open(self.config, model_dir, self.rows)
        stream.precomputes = self.reference_before_training
        return stream

    def open_validation(self, prompts: PromptStream, model_dir: Path) -> HeldOutTexts | None:
        from rlctl.rollouts.dataset import HeldOutTexts, TextStream

        assert isinstance(prompts, TextStream)  # `open_data` has made it
        return HeldOutTexts.open(self.config, prompts, model_dir)

    def source(self, parts: SourceParts) -> AbstractContextManager[RolloutSource]:
        from rlctl.rollouts.dataset import DatasetSource, TextStream

        assert isinstance(parts.prompts, TextStream)
        return nullcontext(DatasetSource(self.config, parts.prompts))

    def validation(self, data: HeldOutTexts, parts: ValidationParts) -> Validation:
        from rlctl.training.text_validation import TextValidation

        return TextValidation(self.config, data, parts.policy, self, parts.sync, parts.refitted)

    @property
    def needs(self) -> frozenset[LogprobColumn]:
        own: Sequence[LogprobColumn] | None = self.config.loss.needs
        return self.requires if own is None else frozenset(own)

    @property
    def columns(self) -> tuple[Metric, ...]:
        return (LOSS_COLUMN,)

    def batch_advantages(self, groups: Sequence[RolloutGroup]) -> list[np.ndarray]:
        """Return zeros: no text is better than another."""
        return [np.zeros(len(group.rollouts)) for group in groups]

    def token_weights(self, response_tokens_N: np.ndarray) -> np.ndarray:
        """Return the weights of a mean over the tokens of the batch."""
        return token_weights(response_tokens_N, "token", 1)


def per_text(count: int, sequences: int) -> np.ndarray:
    """Return the weights [N] of `count` texts, `sequences` to a row, in a mean over rows."""
    return np.full(count, sequences / max(1, count))
