"""Row types: contents, reading, and token sequences of a dataset row, one per training method (`Method.rows`),
including plug-ins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlctl.data.chat import PromptEncoder
from rlctl.data.prompt_records import prompt_field_in, require_fields, row_from_record
from rlctl.data.prompt_rows import TOOLS, PromptRow
from rlctl.data.texts import (
    CHOSEN,
    COMPLETION,
    MARGIN,
    REJECTED,
    TrainedText,
    pair_from_record,
    text_from_record,
    trained_texts,
)
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

    from rlctl.data.gym_questions import GymQuestions

LOOKED_AT = 100
"""Next questions among which there is to be one with another answer."""


class RowType(ABC):
    """Rows with a `prompt` and a completion, as the base of row types; a subclass gives at least `read`."""

    needs_another: bool = False
    """Whether each row also uses another row's completion."""
    numbers: tuple[str, ...] = ()
    """Names in `PromptRow.fields` of numbers for the loss. A row may lack one; each token has the number of its row in
    `TokenBatch.extra_R[name]`."""

    @abstractmethod
    def read(self, record: Mapping[str, Any], index: int, where: str, data: DataConfig) -> PromptRow:
        """Return a record's row. Raises InputError naming row and field."""

    def template_columns(self, columns: Collection[str], data: DataConfig) -> Collection[str]:
        """Return the columns that the chat template reads."""
        return columns

    def require_columns(self, columns: Sequence[str], data: DataConfig, label: str) -> None:
        """Raise InputError where a table lacks a column."""
        return

    def answer_of(self, dataset: ProceduralDataset | GymQuestions, index: int, where: str) -> Any:
        """Return the value that scores a reasoning-gym question."""
        return dataset[index]["answer"]

    def example(self, right: str, wrong: str, number: int, data: DataConfig) -> dict[str, Any]:
        """Return the fields, next to its prompt, of a made-up row with a right and a wrong answer."""
        return {data.answer_field if data.answer_field != "answer" else COMPLETION: right}

    def texts(
        self, row: PromptRow, other: PromptRow | None, encoder: PromptEncoder, data: DataConfig, scored: bool
    ) -> tuple[TrainedText, ...]:
        """Return a row's token sequences. `other`: another row if `needs_another`; `scored`: each sequence ends with a
        score."""
        trained = trained_texts(encoder, row, scored=scored)
        return tuple(text.scored() for text in trained) if scored else trained


class PromptRows(RowType):
    """Prompts, whose completions are sampled."""

    def read(self, record: Mapping[str, Any], index: int, where: str, data: DataConfig) -> PromptRow:
        return row_from_record(record, index, where, data)

    def template_columns(self, columns: Collection[str], data: DataConfig) -> Collection[str]:
        return {TOOLS, prompt_field_in(columns, data.prompt_field)}

    def require_columns(self, columns: Sequence[str], data: DataConfig, label: str) -> None:
        require_fields(columns, data, label)

    def example(self, right: str, wrong: str, number: int, data: DataConfig) -> dict[str, Any]:
        return {data.answer_field: right}


class TextRows(RowType):
    """Texts to train on: `prompt` and `completion`, chat `messages`, or `text`."""

    def read(self, record: Mapping[str, Any], index: int, where: str, data: DataConfig) -> PromptRow:
        return text_from_record(record, index, where, data)

    def texts(
        self, row: PromptRow, other: PromptRow | None, encoder: PromptEncoder, data: DataConfig, scored: bool
    ) -> tuple[TrainedText, ...]:
        part = data.trained_part
        return trained_texts(encoder, row, everything=part == "all", marked=part == "marked")


class PairRows(RowType):
    """Pairs: a `prompt` with completions `chosen` and `rejected`."""

    def read(self, record: Mapping[str, Any], index: int, where: str, data: DataConfig) -> PromptRow:
        return pair_from_record(record, index, where, data)

    def answer_of(self, dataset: ProceduralDataset | GymQuestions, index: int, where: str) -> tuple[str, str]:
        """Return a question's answer as chosen, and the next different answer as rejected. Raises InputError if many
        are equal."""
        answer = str(dataset[index]["answer"])
        others = (str(dataset[(index + step) % len(dataset)]["answer"]) for step in range(1, LOOKED_AT))
        if (other := next((candidate for candidate in others if candidate != answer), None)) is None:
            raise InputError(f"{where}: the next {LOOKED_AT} questions all have its answer.", "Choose another task.")
        return answer, other

    def example(self, right: str, wrong: str, number: int, data: DataConfig) -> dict[str, Any]:
        return {CHOSEN: right, REJECTED: wrong}


class MarginPairRows(PairRows):
    """Pairs with an optional `margin`: by how much the score of the chosen completion is to be the higher one."""

    numbers = (MARGIN,)


PROMPTS = PromptRows()
