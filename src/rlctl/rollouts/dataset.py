"""Dataset texts as training batches. The texts of a row are a group: one text, or a pair with the chosen one first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from rlctl.backends.messages import GroupRequest
from rlctl.cluster.ray_session import put
from rlctl.data.broken_images import readable
from rlctl.data.chat import EncodedPrompt, PromptEncoder
from rlctl.data.control_tokens import trimmed
from rlctl.data.cross_tokens import chunks, read_text
from rlctl.data.holdout import open_validation
from rlctl.data.prompt_rows import PromptDataset, PromptRow
from rlctl.data.rollouts import RolloutColumns, chunk_column
from rlctl.data.texts import (
    REFERENCE,
    REFERENCE_FIELDS,
    TrainedText,
    is_number,
    number_in,
    whole_text,
)
from rlctl.errors import ConfigError, InputError
from rlctl.rollouts.ledger import Ledger
from rlctl.rollouts.prompt_order import TOKENS_AROUND, OpenedDataset, PromptOrder, PromptStream
from rlctl.rollouts.source import sample_seed
from rlctl.rollouts.validation import FIRST_POSITION, metric_of_the_best, times_of
from rlctl.settings.config import RlctlConfig
from rlctl.settings.rewards import RewardConfig
from rlctl.settings.run import VALIDATION_PREFIX
from rlctl.telemetry.metrics import LOSS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ReferenceLogps = dict[str, tuple[float, float]]
"""Log-probs of the chosen and the rejected completion under the reference, by `reference_key` of the row."""


@dataclass(frozen=True)
class TextLengths:
    """The lengths of one text of a row. Its tokens are a sample of the row's columns."""

    prompt_tokens: int
    """Tokens before the first one with a loss."""
    tokens: int
    response_tokens: int
    """Tokens of the answer: with a loss, or scored together."""
    images: int = 0
    image_tokens: int = 0

    @classmethod
    def of(cls, text: TrainedText) -> TextLengths:
        images = sum(part.tokens for part in text.media)
        return cls(text.prompt_tokens, len(text.tokens_T), text.answered_tokens, len(text.media), images)


@dataclass(frozen=True)
class TextGroup:
    """The texts of one dataset row."""

    position: int
    """Place of the row in the endless order of rows."""
    row: PromptRow
    texts: tuple[TextLengths, ...]
    columns: object
    """Handle of the texts' token columns (`RolloutColumns`) in the object store."""
    for_teachers: Mapping[int, TextLengths] = field(default_factory=dict)
    """The text in the tokenization of each teacher that has its own, by the teacher's number: the samples of `columns`
    after `texts`."""

    @property
    def sequences(self) -> tuple[TextLengths, ...]:
        return self.texts


@dataclass(frozen=True)
class TextBatch:
    """The rows of a step, in training order."""

    groups: tuple[TextGroup, ...]
    metrics: Mapping[str, Any] = field(default_factory=dict)


class TextStream(PromptStream):
    """The text, or the pair of texts, at each position. `limit` is the most tokens of a text."""

    kind = "text"
    scored = False
    """Whether a reward model is trained, which has a score of each text."""
    teachers: Mapping[int, PreTrainedTokenizerBase] = MappingProxyType({})
    """The tokenizers of teachers that have their own, by the teachers' numbers."""
    taught_by: Callable[[PromptRow], Collection[int]] = staticmethod(lambda row: ())
    """Returns the numbers of a row's teachers."""
    reference: ReferenceLogps | None = None
    """Precomputed reference log-probs; None: the reference is in memory, or none."""
    precomputes: bool = False
    """Whether they are computed before the first step, for rows without them."""
    others: Sequence[PromptDataset] = ()
    """With labels, further datasets with completions of other prompts."""

    @property
    def used(self) -> Iterator[PromptRow]:
        """The rows that the run will use; where some are dropped, all rows, since others come in their place."""
        drops = any(dataset.data.too_long == "drop" for dataset in self.datasets)
        return self._every_row() if drops else self._first(self.planned, every=True)

    def _every_row(self) -> Iterator[PromptRow]:
        return (self._row(dataset, place) for dataset in self.datasets for place in range(len(dataset.prompts)))

    def require_fit(self) -> None:
        for row in self._first(self.planned):
            if row.images or self.limit is None or len(self.text(row).encode()) + TOKENS_AROUND > self.limit:
                self.tokens(row)
        if self.rows.numbers or self.precomputes:
            for row in self.used:
                self.require_numbers(row)
        if not any(self.texts(row) for row in self._every_row()):
            raise InputError("Every text is longer than --max-length.", "Raise it, or name other texts.")

    def texts(self, row: PromptRow) -> tuple[TrainedText, ...]:
        """Return a row's training texts; empty if too long with `data.too_long=drop`."""
        dataset = self._named[row.source]
        if row.answer != () and self.own_teachers(row):
            raise InputError(
                f"{row.where}: a teacher with its own tokenizer would read another text, because chat "
                "templates differ.",
                "Give rows with only `text`, or leave own_tokenizer of their teachers out.",
            )
        other = self._other(dataset, row) if self.rows.needs_another else None
        trained = self.rows.texts(row, other, dataset.encoder, dataset.data, self.scored)
        if other is not None and self.limit is not None:  # what stands next to the text is cut where it is too long
            first, *beside = trained
            trained = (first, *(text.first(self.limit) for text in beside))
        return self._fitting(trained, dataset, row)

    def _fitting(
        self, trained: tuple[TrainedText, ...], dataset: OpenedDataset, row: PromptRow
    ) -> tuple[TrainedText, ...]:
        longest = max(len(text.tokens_T) for text in trained)
        if self.limit is None or longest <= self.limit:
            return trained
        if dataset.data.too_long == "drop":
            return ()
        if dataset.data.too_long == "cut" and row.answer == ():
            return tuple(text.first(self.limit) for text in trained)
        raise InputError(
            f"{row.where}: the text has {longest:,} tokens, and --max-length is {self.limit:,}.",
            "Raise it, or leave such rows out with --set data.too_long=drop.",
        )

    def _other(self, dataset: OpenedDataset, row: PromptRow) -> PromptRow:
        """Return the next row with another prompt. Rows of one prompt often stand together: in pairs written as two
        rows, and in several samples of each prompt."""
        stream, question = dataset.prompts, _question(row)
        following = (stream[(row.index + step) % len(stream)] for step in range(1, len(stream)))
        elsewhere = (other.prompts for other in self.datasets if other is not dataset)
        further = (prompts[index] for prompts in (*elsewhere, *self.others) for index in range(len(prompts)))
        if (
            other := next(
                (candidate for candidate in chain(following, further) if _question(candidate) != question), None
            )
        ) is None:
            raise InputError(
                f"{row.where}: every row of {stream.label} has this prompt, and each completion is compared with the "
                "completion of another prompt.",
                "Give rows with at least two prompts.",
            )
        return other

    def require_numbers(self, row: PromptRow) -> None:
        """Raise InputError where a field of `row` that the loss is computed from is not a finite number."""
        if self.precomputes:
            self.brings_reference(row)
        for name, value in self._numbers(row).items():
            if not is_number(value):
                raise InputError(
                    f"{row.where}: the field {name!r} is {value!r:.40}, which is not a finite number.",
                    "Write one, or leave the field out.",
                )

    def _numbers(self, row: PromptRow) -> dict[str, Any]:
        values = {name: number_in(row.fields.get(name)) for name in self.rows.numbers}
        return {name: value for name, value in values.items() if value is not None}

    def further_columns(self, row: PromptRow, texts: Sequence[TrainedText]) -> dict[str, np.ndarray]:
        """Return the columns [T] of a row's texts that a loss needs besides. Raises InputError for a wrong number."""
        self.require_numbers(row)
        count = sum(len(text.tokens_T) for text in texts)
        columns_T = {name: np.full(count, value, np.float32) for name, value in self._numbers(row).items()}
        if self.reference is not None:
            columns_T[REFERENCE] = self._reference_column(row, texts)
        return columns_T

    def own_teachers(self, row: PromptRow) -> list[int]:
        """Return the numbers of the row's teachers that have their own tokenizer."""
        return sorted(self.teachers.keys() & {*self.taught_by(row)}) if self.teachers else []

    def for_teachers(
        self, row: PromptRow, texts: Sequence[TrainedText]
    ) -> tuple[dict[int, TrainedText], dict[str, np.ndarray]]:
        """Return a row's text in the tokenization of each teacher that has its own, up to the limit; and the columns
        [T] of chunks over `texts` and these."""
        texts_of_teachers: dict[int, TrainedText] = {}
        of_chunks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        tokenizer = self._named[row.source].encoder.tokenizer
        text, ours = trimmed(tokenizer, str(row.prompt)), len(texts[0].tokens_T)
        for number in self.own_teachers(row):
            _, *token_texts = read_text(tokenizer, text)
            tokens, *theirs = read_text(self.teachers[number], text)
            own_T, their_T = chunks((token_texts[0], token_texts[1]), (theirs[0], theirs[1]))
            tokens_T = np.array(tokens, np.int32)[: self.limit]
            texts_of_teachers[number] = TrainedText(tokens_T, np.arange(len(tokens_T)) > 0)
            of_chunks[number] = own_T[:ours], their_T[: self.limit]
        columns_T: dict[str, np.ndarray] = {}
        for number, (own_T, their_T) in of_chunks.items():
            beside = {other: np.full(len(each.tokens_T), -1) for other, each in texts_of_teachers.items()} | {
                number: their_T
            }
            columns_T[chunk_column(number)] = np.concatenate([own_T, *beside.values()]).astype(np.float32)
        return texts_of_teachers, columns_T

    def brings_reference(self, row: PromptRow) -> bool:
        """Return whether a row has reference log-probs. Raises InputError unless they are two finite numbers."""
        values = [number_in(row.fields.get(name)) for name in REFERENCE_FIELDS]
        if values == [None, None]:
            return False
        for name, value in zip(REFERENCE_FIELDS, values, strict=True):
            if not is_number(value):
                fault = "missing" if value is None else f"{value!r:.40}, which is not a finite number"
                raise InputError(
                    f"{row.where}: the field {name!r} is {fault}.",
                    f"Write numbers in {' and '.join(REFERENCE_FIELDS)}, or leave both out.",
                )
        return True

    def _reference_column(self, row: PromptRow, texts: Sequence[TrainedText]) -> np.ndarray:
        assert self.reference is not None
        if self.brings_reference(row):
            logps = [number_in(row.fields[name]) for name in REFERENCE_FIELDS]
        else:
            logps = self.reference[reference_key(row)]
        shares = (
            np.full(len(text.tokens_T), logp / text.mask_T.sum()) for text, logp in zip(texts, logps, strict=True)
        )
        return np.concatenate([*shares]).astype(np.float32)

    def text(self, row: PromptRow) -> str:
        return whole_text(self._named[row.source].encoder, row)

    def tokens(self, row: PromptRow) -> Sequence[int]:
        return self.encoded(row).tokens

    def encoded(self, row: PromptRow) -> EncodedPrompt:
        """Return the longest text of a row with its images; empty: it is left out."""
        longest = max(self.texts(row), key=lambda text: len(text.tokens_T), default=None)
        return EncodedPrompt(tuple(longest.tokens_T.tolist()), longest.media) if longest else EncodedPrompt(())

    def _image_tokens(self, row: PromptRow) -> int:
        """Return the image tokens of the row's text with the most."""
        return max((sum(part.tokens for part in text.media) for text in self.texts(row)), default=0)


class ScoredTexts(TextStream):
    """The texts of a reward model."""

    scored = True


@dataclass(frozen=True)
class HeldOutTexts:
    """The texts of a run's validation."""

    label: str
    stream: TextStream
    rows: tuple[PromptRow, ...]
    fingerprint: dict[str, Any]
    answers: int = 0
    """The number of prompts that engines answer."""
    rewards: None = None
    """Texts are not scored."""

    @classmethod
    def open(cls, config: RlctlConfig, texts: TextStream, model_dir: Path) -> HeldOutTexts | None:
        """Open the validation data; None without validation. Raises ConfigError or InputError."""
        validation = config.validation
        if not validation.wanted:
            return None
        if metric_of_the_best(config) != LOSS:
            raise ConfigError(
                f"run.keep_best_by = {config.run.keep_best_by}: no such metric says which validation is better.",
                f"There is {VALIDATION_PREFIX}{LOSS}.",
            )
        dataset, data = open_validation(config, texts.held_out, texts.rows)
        encoder = PromptEncoder.build(texts.encoder.tokenizer, config.model, data, model_dir)
        order = PromptOrder(len(dataset), config.run.seed)
        opened = OpenedDataset("", dataset, data, encoder, RewardConfig(), order)
        drawn = [dataset[order.at(place)] for place in range(min(len(dataset), validation.max_prompts))]
        rows = readable(drawn, data, encoder)
        stream = type(texts)([opened], len(rows))
        stream.rows = texts.rows
        stream.precomputes, stream.others = texts.precomputes, [dataset.prompts for dataset in texts.datasets]
        return cls(dataset.label, stream, rows, dataset.fingerprint(), validation.answered)

    def fitted(self, limit: int, room: int) -> HeldOutTexts:
        """Return the texts. Raises InputError for one of more than `limit` tokens, unless such texts are left out."""
        self.stream.limit = limit
        for row in self.rows:
            self.stream.require_numbers(row)
        fitting = [row for row in self.rows if self.stream.texts(row)]
        if not fitting:
            raise InputError("validation: every text is longer than --max-length.", "Raise it, or name other texts.")
        if self.answers and all(row.answer == () for row in fitting):
            reason = f"validation.answers = {self.answers}: no text that is validated on has a prompt."
            raise InputError(reason, "Leave it out.")
        return self

    def describe(self, config: RlctlConfig) -> str:
        origin = " held out of the data" if config.validation.data.name is None and config.validation.holdout else ""
        answers = f", an engine answers {self.answers} of their prompts" if self.answers else ""
        where = origin or f" of {self.label}"
        return f"validation: {times_of(config.validation)}: {len(self.rows)} texts{where}{answers}"

    def asked(self, seed: int) -> tuple[list[GroupRequest], dict[int, PromptRow]]:
        """Return validation prompts for engines (of the first texts that have one), and rows by group number."""
        with_prompts = [row for row in self.rows if row.answer != () and self.stream.texts(row)]
        rows = dict(enumerate(with_prompts[: self.answers], FIRST_POSITION))
        requests = []
        for position, row in rows.items():
            seeds = (sample_seed(seed, position, 0),)
            prompt = self.stream.encoder.prompt(row)
            requests.append(GroupRequest(position, prompt.tokens, seeds, media=prompt.media))
        return requests, rows

    def groups(self) -> tuple[TextGroup, ...]:
        return groups_of(self.stream, {FIRST_POSITION + place: row for place, row in enumerate(self.rows)})


class DatasetSource:
    """Batches of `batch.prompts` rows each, in the order of the data."""

    def __init__(self, config: RlctlConfig, stream: TextStream) -> None:
        self._rows, self._stream = config.batch.prompts, stream
        self._ledger = Ledger()

    def next(self, version: int) -> TextBatch:
        """Return the next rows, skipping batches whose rows are all too long."""
        dropped = 0
        while True:
            positions = self._ledger.take(self._rows)
            groups = groups_of(self._stream, {place: self._stream.prompt_at(place) for place in positions})
            self._ledger.finish(positions)
            self._ledger.hand_over(positions)
            dropped += len(positions) - len(groups)
            if groups:
                return TextBatch(groups, {"dropped_rows": dropped} if dropped else {})

    def state(self) -> dict[str, Any]:
        return dict(self._ledger.state())

    def write(self, directory: Path) -> None:
        """Do nothing: a text source has no files."""

    def restore(self, state: Mapping[str, Any], directory: Path) -> None:
        """Go on after the trained positions. Raises InputError where `state` is not a ledger."""
        try:
            self._ledger = Ledger.restored(state)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"The checkpoint's ledger cannot be read: {error}.",
                "Resume from a checkpoint before it, or start a new run.",
            ) from error


def groups_of(stream: TextStream, rows: Mapping[int, PromptRow]) -> tuple[TextGroup, ...]:
    """Return the groups of rows by their positions, with their columns in the object store."""
    groups = []
    for position, row in rows.items():
        if not (texts := stream.texts(row)):
            continue
        if not stream.teachers:
            groups.append(group_of(position, row, texts, put(columns_of(texts, stream.further_columns(row, texts)))))
        else:
            others, columns_T = stream.for_teachers(row, texts)
            columns = put(columns_of((*texts, *others.values()), columns_T))
            groups.append(group_of(position, row, texts, columns, others))
    return tuple(groups)


def _question(row: PromptRow) -> object:
    """Return a row's prompt for comparisons: texts without differences in white space."""
    return " ".join(row.prompt.split()) if isinstance(row.prompt, str) else row.prompt


def reference_key(row: PromptRow) -> str:
    return f"{row.source}:{row.index}"


def group_of(
    position: int,
    row: PromptRow,
    texts: Sequence[TrainedText],
    columns: object,
    for_teachers: Mapping[int, TrainedText] = MappingProxyType({}),
) -> TextGroup:
    """Return a row's group of texts, whose token columns `columns` holds."""
    lengths = tuple(TextLengths.of(text) for text in texts)
    of_teachers = {number: TextLengths.of(text) for number, text in for_teachers.items()}
    return TextGroup(position, row, lengths, columns, of_teachers)


def columns_of(texts: Sequence[TrainedText], extra_T: Mapping[str, np.ndarray] | None = None) -> RolloutColumns:
    """Return the token columns of a group of texts, with further ones."""
    tokens_T = np.concatenate([text.tokens_T for text in texts])
    return RolloutColumns(
        tokens_T=tokens_T,
        offsets_G=np.cumsum([0, *(len(text.tokens_T) for text in texts)]).astype(np.int32),
        loss_mask_T=np.concatenate([text.mask_T for text in texts]),
        logprobs_T=np.zeros(len(tokens_T), np.float32),
        weight_version_T=np.full(len(tokens_T), -1, np.int32),
        extra_T=dict(extra_T or {}),
        media_G=tuple(text.media for text in texts) if any(text.media for text in texts) else (),
    )
