"""Sections on the model, its tokenizer, and the data."""

from __future__ import annotations

import re
from collections import Counter
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from rlctl.config.facts import FREE, REHEARSAL_DETAIL, Flag
from rlctl.config.section import PathText, Positive, PositiveNumber, Section
from rlctl.settings.rewards import SourceEnvironment, SourceReward

VisionPart = Literal["vision", "projector", "language"]
"""The tower that reads pixels, what turns its output into embeddings, and the part that reads and writes tokens."""


class ModelConfig(Section):
    """The model, its tokenizer, and the length of a rollout."""

    name: Annotated[
        PathText | None,
        FREE | REHEARSAL_DETAIL,
        Flag("model", "Hub name or local Hugging Face directory.", metavar="NAME|DIR", names="--model -m"),
    ] = None
    """Local Hugging Face directory, or name on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: Annotated[
        PathText | None, REHEARSAL_DETAIL, Flag("tokenizer", "Tokenizer; replaces the model's.", metavar="NAME|DIR")
    ] = None
    """Directory or hub name of a tokenizer that replaces the model's."""
    chat_template: Annotated[
        PathText | None, Flag("chat_template", "Jinja chat template; replaces the model's.", metavar="FILE|TEXT")
    ] = None
    """Jinja chat template that replaces the model's: a file, or the text itself."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as enable_thinking."""
    chat_template_time: str | None = None
    """Date and time that the chat template writes with `strftime_now`, such as 2026-11-28T17:50:00. Unset: the start of
    the run, which its resumes and evaluations use again."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of training and generation. auto is bfloat16 on GPUs, and on CPUs where a probe shows bfloat16
    products to be 1.5 times as fast as float32 (else float32). float16 resolves eight times finer than bfloat16 and
    uses loss scaling."""
    convert: bool = True
    """Convert the model once into the checkpoint directory, where every Megatron run starts; false: start from the
    model's files, as dtensor always does."""
    max_length: Annotated[
        Positive | None, Flag("max_length", "Maximum length of prompt plus completion.", metavar="TOKENS")
    ] = None
    """Maximum length of prompt plus completion, in tokens."""
    max_position_embeddings: Positive | None = None
    """Number of positions of the model, replacing config.json's; the trained model keeps it."""
    extend_positions: bool = False
    """Train on up to max_length tokens although config.json has fewer positions: the rotary embedding continues with
    the same frequencies, and the trained model has max_length positions."""
    rope_scaling: dict[str, Any] = {}
    """Rotary embedding that replaces the model's, with the names of config.json (rope_type, factor, rope_theta and
    others of its type). With yarn and no `max_position_embeddings`, the model has `factor` times its positions."""
    images: bool | None = None
    """Train a vision-language model with its vision part; false: only its text part. Unset: if the data has images."""
    freeze: tuple[VisionPart, ...] = ()
    """Frozen parts of a vision-language model: vision (the tower), projector, language."""
    trust_remote_code: bool = False
    """Allow Python code of the model repository to run."""

    @field_validator("chat_template_time")
    @classmethod
    def validate_time(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                datetime.fromisoformat(value)
            except ValueError as error:
                raise ValueError("it is no date such as 2026-11-28 or 2026-11-28T17:50:00") from error
        return value


DataOrder = Literal["shuffled", "as-written", "difficulty", "pass-rate"]


class DataConfig(Section):
    """The prompts or texts: their source, and their form for the model."""

    name: Annotated[
        PathText | None,
        REHEARSAL_DETAIL,
        Flag(
            "data",
            "File (JSON, CSV, Parquet), folder, hub dataset, or reasoning-gym:<task>. Repeatable.",
            metavar="SOURCE",
            kind=list[str],
        ),
    ] = None
    """`reasoning-gym:<task>`, `drawn-shapes` (pictures with questions), a JSON, CSV or Parquet file, a folder of them,
    or a Hugging Face dataset name."""
    sources: tuple[DataSource, ...] = ()
    """Several sources, replacing `data.name`; each has `name`, `weight`, and optionally keys of `data`, a `reward` and
    an `environment`."""
    too_long: Literal["refuse", "drop", "cut"] = "refuse"
    """Treatment of texts longer than `model.max_length` and of prompts without room for a completion: refuse the data
    before the run starts, drop the row, or cut it. A plain `text` loses its end; a prompt loses its beginning, so that
    `generation.max_new_tokens` fit. Other texts and prompts of environments cannot be cut."""
    special_tokens: Literal["text", "tokens"] = "text"
    """Treatment of the texts of control tokens, such as `<|im_end|>`, in prompts, tools, completions and messages of
    environments: ordinary text, or the token. In rows with `text` they are always tokens."""
    params: dict[str, Any] = {}
    """Parameters of a reasoning-gym task, for example `max_terms: 2`."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    prompt_field: Annotated[str, Flag("prompt_field", "Data column with the prompt.", metavar="NAME")] = "prompt"
    """Field that holds the prompt: a text, or a list of chat messages."""
    answer_field: Annotated[str, Flag("answer_field", "Data column with the reference answer.", metavar="NAME")] = (
        "answer"
    )
    """Field that holds the reference answer."""
    answer_pattern: str | None = None
    """Regular expression whose first group is the answer in the text of that field, such as `<answer>(.*?)</answer>`;
    where it matches nothing, the whole text is."""
    system_prompt: str | None = None
    """System message before every prompt; an empty text suppresses the chat template's."""
    prompt_template: str | None = None
    """Template of every prompt: `{prompt}` and `{column}` insert columns of the row; with `{{ }}` it is Jinja."""
    prompt_suffix: str | None = None
    """Text after every prompt, for example how to state the answer."""
    image_pixels: Positive = 50_000_000
    """Maximum number of pixels of an image; larger images are refused before they are decoded."""
    image_bytes: Positive = 50_000_000
    """Maximum size of an image file, in bytes."""
    image_folder: PathText | None = None
    """Folder that paths of images are relative to; unset: the folder of the data file, or the dataset's directory."""
    broken_images: Literal["stop", "drop"] = "stop"
    """Treatment of rows with a missing, damaged, too large or too narrow image: refuse the data before the run starts,
    or drop the rows and report their number."""
    shuffle: bool = True
    """Shuffle the prompts; `run.seed` fixes their order. With an order by difficulty or pass rate, shuffle ties."""
    order: DataOrder | None = None
    """Order of a source's prompts in each epoch; unset: shuffled, or as written with `data.shuffle=false`. difficulty:
    easy prompts first; pass-rate: from the second epoch on, prompts solved about half of the time first."""
    difficulty_field: str | None = None
    """Field with the difficulty of a row (a higher number is harder), or `field.key` for a nested value."""
    size: Positive | None = None
    """Number of prompts to generate (reasoning-gym) or to keep (files and datasets)."""

    @property
    def source_labels(self) -> tuple[str, ...]:
        """The names of `sources`, with a number where several have the same name."""
        names = [source.name or str(source.environment and source.environment.name) for source in self.sources]
        counts, seen = Counter(names), Counter[str]()
        labels = []
        for name in names:
            seen[name] += 1
            labels.append(f"{name} #{seen[name]}" if counts[name] > 1 else name)
        return tuple(labels)

    @model_validator(mode="after")
    def validate_one_source_or_a_list(self) -> DataConfig:
        if self.name and self.sources:
            raise ValueError("data.name names one source and data.sources lists several: give one of them")
        return self

    @field_validator("answer_pattern")
    @classmethod
    def validate_pattern(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                groups = re.compile(value).groups
            except re.error as error:
                raise ValueError(f"it is no regular expression: {error}") from error
            if not groups:
                raise ValueError("it has no group: put the part that is the answer in parentheses")
        return value

    @model_validator(mode="after")
    def validate_order_fits_shuffle(self) -> DataConfig:
        if self.order == "shuffled" and not self.shuffle:
            raise ValueError("data.order = shuffled, but data.shuffle = false: give one of them")
        return self

    @property
    def trained_part(self) -> str:
        """The tokens of a text with a loss, in the words of `data.train_on`."""
        return "assistant"


class TextDataConfig(DataConfig):
    """The texts to train on: their source, and their tokens with a loss."""

    train_on: Literal["assistant", "last", "marked", "all"] = "assistant"
    """Tokens with a loss. Rows with `messages`: all messages of the assistant, the last one, the parts that the chat
    template marks with {% generation %}, or all tokens. Rows with `prompt`: the completion, or with `all` every token.
    Rows with `text`: every token."""

    @property
    def trained_part(self) -> str:
        return self.train_on


class ValidationData(Section):
    """The prompts of validation. Unset keys have the values of `data`."""

    name: Annotated[
        str | None,
        REHEARSAL_DETAIL,
        Flag("val_data", "Validation data, used before the first step and after the last.", metavar="SOURCE"),
    ] = None
    """Source, in the form of `data.name`; unset: the held-out prompts, or for a reasoning-gym task other questions than
    in training."""
    params: dict[str, Any] = {}
    """Parameters of a reasoning-gym task."""
    split: str | None = None
    """Split of a folder or a Hugging Face dataset."""
    prompt_field: str | None = None
    """Field that holds the prompt."""
    answer_field: str | None = None
    """Field that holds the reference answer."""
    system_prompt: str | None = None
    """System message in front of every prompt."""
    prompt_template: str | None = None
    """Template of every prompt, with `{prompt}`."""
    prompt_suffix: str | None = None
    """Text appended to every prompt."""


class DataSource(Section):
    """One of several sources of prompts. Unset keys have the values of `data`, `reward` and `environment`."""

    name: str = ""
    """As `data.name`. Unset: the environment makes its tasks, `size` of them."""
    weight: PositiveNumber | None = None
    """Share of the prompts, in proportion to the weights of the other sources (1 where only others have one). Without
    any weight, sources have shares by their sizes, so that one epoch has each row once."""
    reward: SourceReward | None = None
    """Scorers of its completions; unset: the scorers of `reward`."""
    environment: SourceEnvironment | None = None
    """Keys of `environment` for its episodes; `name: null` without tools: its completions have one turn."""
    params: dict[str, Any] | None = None
    split: str | None = None
    prompt_field: str | None = None
    answer_field: str | None = None
    system_prompt: str | None = None
    prompt_template: str | None = None
    prompt_suffix: str | None = None
    special_tokens: Literal["text", "tokens"] | None = None
    shuffle: bool | None = None
    order: DataOrder | None = None
    difficulty_field: str | None = None
    size: Positive | None = None

    @model_validator(mode="after")
    def validate_origin_of_prompts(self) -> DataSource:
        if not self.name and not (self.environment and self.environment.name):
            raise ValueError("it has no prompts: give `name`, or `environment.name` of one that makes its tasks")
        return self

    @model_serializer(mode="wrap")
    def _set_keys(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in whole(self).items() if value is not None and value != ""}
