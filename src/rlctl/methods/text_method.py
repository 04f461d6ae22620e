"""The base of methods that train on the texts of a dataset. Engines start only for `validation.answers`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlctl.backends.batching.batch import TrainBatch, WeightedSequence
from rlctl.settings.training import LogprobColumn
from rlctl.telemetry.metrics import LOSS, Metric
from rlctl.training.capabilities import PrecomputesReference, ScalarHead
from rlctl.training.method import Method
from rlctl.training.step_metrics import length_metrics
from rlctl.training.train_batch import taught_as, token_weights, without_idle

if TYPE_CHECKING:
    from rlctl.models.facts import ModelFacts
    from rlctl.planner.inputs.request import Workload
    from rlctl.rollouts.dataset import DatasetSource, HeldOutTexts, TextBatch, TextGroup, TextStream
    from rlctl.rollouts.prompt_order import PromptStream
    from rlctl.rollouts.validation import Validation
    from rlctl.training.running_parts import SourceParts, ValidationParts

LOSS_COLUMN = Metric(LOSS, "sum", column="loss", form=".4f")


class TextMethod(Method):
    """Trains on the texts of a dataset; a subclass gives at least `token_loss`."""

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
            valued=isinstance(self, ScalarHead),
            teacher_top=self.teacher_top,
        )

    @property
    def stream(self) -> type[TextStream]:
        """The class that reads the rows."""
        from rlctl.rollouts.dataset import TextStream

        return TextStream

    def open_data(self, model_dir: Path) -> PromptStream:
        stream = self.stream.open(self.config, model_dir, self.rows)
        stream.precomputes = isinstance(self, PrecomputesReference) and self.reference_before_training
        return stream

    def open_validation(self, prompts: PromptStream, model_dir: Path) -> HeldOutTexts | None:
        from rlctl.rollouts.dataset import HeldOutTexts, TextStream

        assert isinstance(prompts, TextStream)  # `open_data` has made it
        return HeldOutTexts.open(self.config, prompts, model_dir)

    def source(self, parts: SourceParts) -> AbstractContextManager[DatasetSource]:
        from rlctl.rollouts.dataset import DatasetSource, TextStream

        assert isinstance(parts.prompts, TextStream)
        return nullcontext(DatasetSource(self.config, parts.prompts))

    def validation(self, data: HeldOutTexts, parts: ValidationParts) -> Validation:
        from rlctl.training.text_validation import TextValidation

        return TextValidation(self.config, data, parts.policy, self, parts.sync, parts.refitted)

    @property
    def needs(self) -> frozenset[LogprobColumn]:
        needs: Sequence[LogprobColumn] | None = self.config.loss.needs
        return self.requires if needs is None else frozenset(needs)

    @property
    def columns(self) -> tuple[Metric, ...]:
        return (LOSS_COLUMN,)

    def batch_metrics(self, batch: TextBatch, version: int) -> dict[str, Any]:
        return length_metrics(batch.groups)

    def token_weights(self, response_tokens_N: np.ndarray) -> np.ndarray:
        """Return the weight of each token of the texts of a mini-batch; float64 [N]. Here: a mean over all tokens."""
        return token_weights(response_tokens_N, "token", 1)

    def train_batch(self, groups: Sequence[TextGroup], optimizer_steps: int) -> TrainBatch:
        """Return the texts as mini-batches of whole rows, without texts of weight 0."""
        parts = [part for part in np.array_split(np.arange(len(groups)), optimizer_steps) if len(part)]
        minibatches = [self._minibatch(groups[part[0] : part[-1] + 1]) for part in parts]
        batch = without_idle(minibatches, {group.position: group.columns for group in groups}, needs_advantage=False)
        batch = replace(batch, sources={group.position: taught_as(self.config, group.row) for group in groups})
        by_position = {group.position: group for group in groups}
        for_teachers = {
            teacher: tuple(
                tuple(
                    _for_teacher(group, teacher, text)
                    for text in minibatch
                    if teacher in (group := by_position[text.position]).for_teachers
                )
                for minibatch in batch.minibatches
            )
            for teacher in sorted({teacher for group in groups for teacher in group.for_teachers})
        }
        return replace(batch, for_teachers=for_teachers)

    def _minibatch(self, groups: Sequence[TextGroup]) -> tuple[WeightedSequence, ...]:
        texts = [(group.position, sample, text) for group in groups for sample, text in enumerate(group.texts)]
        weights_N = self.token_weights(np.array([text.response_tokens for *_, text in texts]))
        return tuple(
            WeightedSequence(position, sample, text.prompt_tokens, text.tokens, advantage=0.0, token_weight=weight)
            for (position, sample, text), weight in zip(texts, weights_N.tolist(), strict=True)
        )


def _for_teacher(group: TextGroup, teacher: int, text: WeightedSequence) -> WeightedSequence:
    """Return a text in a teacher's tokenization; these follow the row's texts in their columns."""
    lengths, sample = group.for_teachers[teacher], len(group.texts) + [*group.for_teachers].index(teacher)
    return text._replace(sample=sample, prompt_tokens=lengths.prompt_tokens, tokens=lengths.tokens)


def per_text(count: int, sequences: int) -> np.ndarray:
    """Return the weights [N] of `count` texts, `sequences` to a row, in a mean over rows."""
    return np.full(count, sequences / max(1, count))
