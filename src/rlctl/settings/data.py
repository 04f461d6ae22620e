"""Sections on the model, its tokenizer, and the data."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from rlctl.config.section import PathText, Positive, PositiveNumber, Section
from rlctl.settings.rewards import SourceReward

VisionPart = Literal["vision", "projector", "language"]
"""The tower that reads pixels, what turns its output into embeddings, and the part that reads and writes tokens."""


class ModelConfig(Section):
    """The model, its tokenizer, and the length of a rollout."""

    name: PathText | None = None
    """Local Hugging Face directory, or name on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: PathText | None = None
    """Directory or hub name of a tokenizer to use instead of the model's own."""
    chat_template: PathText | None = None
    """Jinja chat template to use instead of the model's own: a file, or the text itself."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as enable_thinking."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of training and generation. auto is bfloat16 on a GPU, and on a CPU where a probe shows bfloat16
    products to be 1.5 times as fast as float32 (else float32). float16 is eight times as fine as bfloat16, and its
    losses are scaled."""
    convert: bool = True
    """Convert the model once into the checkpoint directory, from which every run with Megatron starts; false: start
    from its own files, as dtensor always does."""
    max_length: Positive | None = None
    """Largest number of tokens of prompt and completion together."""
    max_position_embeddings: Positive | None = None
    """Number of positions of the model, where its config.json says another: what is trained keeps this one."""
    extend_positions: bool = False
    """Train on up to max_length tokens where config.json has fewer positions: the rotary embedding goes on with the
    same frequencies, and what is trained has as many positions as that."""
    rope_scaling: dict[str, Any] = {}
    """Rotary embedding instead of the model's own, by the names of a config.json (rope_type, factor, rope_theta and
    others of its type). With yarn and no `max_position_embeddings`, the model has `factor` times the original ones."""
    images: bool | None = None
    """Train a model that takes images with the part that reads them; false: its text part alone. Unset: where the data
    has images."""
    freeze: tuple[VisionPart, ...] = ()
    """Parts of a model that reads images which keep their weights: vision (the tower), projector, language."""
    trust_remote_code: bool = False
    """Allow Python code that comes with the model to run."""


DataOrder = Literal["shuffled", "as-written", "difficulty", "pass-rate"]


class DataConfig(Section):
    """The prompts, or the texts to train on: where they come from, and how they are put to the model."""

    name: PathText | None = None
    """`reasoning-gym:<task>`, a .jsonl or .parquet file, or a Hugging Face dataset name."""
    sources: tuple[DataSource, ...] = ()
    """Sources instead of `data.name`: each with `name`, `weight`, and keys of `data` and a `reward` of its own."""
    too_long: Literal["refuse", "drop", "cut"] = "refuse"
    """Treatment of a text that is longer than `model.max_length`, or a prompt that leaves no room for a completion:
    refuse the data before the run starts, leave it out, or cut it. A plain `text` loses its end, and a prompt its
    beginning, so that `generation.max_new_tokens` fit; other texts and prompts of environments cannot be cut."""
    special_tokens: Literal["text", "tokens"] = "text"
    """Treatment of texts in prompts, tools, completions and messages of environments that the tokenizer has a control
    token for, such as `<|im_end|>`: ordinary text, or the token. A row with `text` is all that the model reads: there
    they are tokens."""
    params: dict[str, Any] = {}
    """Parameters of a reasoning-gym task, for example `max_terms: 2`."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    prompt_field: str = "prompt"
    """Field that holds the prompt: a text, or a list of chat messages."""
    answer_field: str = "answer"
    """Field that holds the reference answer."""
    system_prompt: str | None = None
    """System message in front of every prompt; an empty text suppresses the one of the chat template."""
    prompt_template: str | None = None
    """Text of every prompt, where `{prompt}` and `{column}` stand for columns of the row; with `{{ }}` it is Jinja."""
    prompt_suffix: str | None = None
    """Text appended to every prompt, for example how to state the answer."""
    image_pixels: Positive = 50_000_000
    """Most pixels of an image; a larger one is refused before it is decoded."""
    image_bytes: Positive = 50_000_000
    """Most bytes of an image file."""
    broken_images: Literal["stop", "drop"] = "stop"
    """Treatment of rows with an image that is missing, damaged or too large: refuse the data before the run starts, or
    leave them out; their number is told."""
    shuffle: bool = True
    """Shuffle the prompts; `run.seed` fixes their order. With an order by difficulty or pass rate: equal ones."""
    order: DataOrder | None = None
    """Order of a source's prompts in each epoch; unset: shuffled, or as written with `data.shuffle=false`. difficulty:
    easy ones first; pass-rate: from the second epoch on, first those that are solved about half of the time."""
    difficulty_field: str | None = None
    """Field with the difficulty of a row, a number (the higher the harder), or `field.key` inside of a field."""
    size: Positive | None = None
    """Number of prompts to generate (reasoning-gym) or to keep (files and datasets)."""

    @model_validator(mode="after")
    def validate_one_source_or_a_list(self) -> DataConfig:
        if self.name and self.sources:
            raise ValueError("data.name names one source and data.sources lists several: give one of them")
        return self

    @model_validator(mode="after")
    def validate_order_fits_shuffle(self) -> DataConfig:
        if self.order == "shuffled" and not self.shuffle:
            raise ValueError("data.order = shuffled, but data.shuffle = false: give one of them")
        return self


class TextDataConfig(DataConfig):
    """The texts to train on: where they come from, and which of their tokens have a loss."""

    train_on: Literal["assistant", "last", "marked", "all"] = "assistant"
    """Tokens of a text with a loss: all messages of the assistant in `messages`, only the last one, what the chat
    template marks by {% generation %}, or all tokens. In rows with a `prompt` it is the completion, or with `all` all
    tokens too, and in those with a `text` all tokens."""


class ValidationData(Section):
    """The prompts of validation. Fields and format that are unset are as in `data`."""

    name: str | None = None
    """Source, as `data.name` names one; unset: the prompts held out, or of a reasoning-gym task other questions than
    those of training."""
    params: dict[str, Any] = {}
    """Parameters of a reasoning-gym task."""
    split: str | None = None
    """Split of a Hugging Face dataset."""
    prompt_field: str | None = None
    """Field that holds the prompt."""
    answer_field: str | None = None
    """Field that holds the reference answer."""
    system_prompt: str | None = None
    """System message in front of every prompt."""
    prompt_template: str | None = None
    """Text around every prompt, with `{prompt}` where it stands."""
    prompt_suffix: str | None = None
    """Text appended to every prompt."""


class DataSource(Section):
    """One of several sources of prompts. A key that is unset has the value that `data` or `reward` gives it."""

    name: str
    """As `data.name`."""
    weight: PositiveNumber = 1.0
    """Share of the prompts, in proportion to the weights of the other sources."""
    reward: SourceReward | None = None
    """Scorers of its completions; unset: those of `reward`."""
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

    @model_serializer(mode="wrap")
    def _set_keys(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the keys that are set: a plan and a manifest show no others."""
        return {key: value for key, value in whole(self).items() if value is not None}
