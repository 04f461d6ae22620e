"""Rows of prompts: one question each, with its reference answer and whatever else its source knows of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rlctl.config.schema import DataConfig
from rlctl.data.names import suggest
from rlctl.errors import InputError

GYM_PREFIX = "reasoning-gym:"
MOST_CHARACTERS = 1_000_000
"""Characters of a prompt beyond which a row is refused: some 250,000 tokens, and seconds for a tokenizer."""

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class PromptRow:
    """One question."""

    index: int
    """Row of the source, from 0."""
    where: str
    """How to name the row in a message, for example `data.jsonl, line 3`."""
    prompt: str | Messages
    """A text, or chat messages with `role` and `content`."""
    answer: Any
    """The reference answer; None where the source has none."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The other fields of the row, for reward functions."""

    @property
    def question(self) -> str:
        """The prompt as one text: of messages, the last that is the user's."""
        if isinstance(self.prompt, str):
            return self.prompt
        return next((m["content"] for m in reversed(self.prompt) if m["role"] == "user"), self.prompt[-1]["content"])


@dataclass(frozen=True)
class GymTask:
    """A reasoning-gym task with its parameters, from which any process can rebuild its questions and its scorer."""

    name: str
    params: dict[str, Any]


@runtime_checkable
class PromptSource(Protocol):
    """A finite, indexable source of prompts."""

    @property
    def label(self) -> str:
        """The name that the user gave it."""
        ...

    @property
    def task(self) -> GymTask | None:
        """The task, where it brings its own scorer."""
        ...

    @property
    def instructions(self) -> str:
        """Text that the system prompt and the suffix add to every prompt."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> PromptRow: ...

    def fingerprint(self) -> dict[str, Any]:
        """Return what the manifest keeps, to tell on resume whether the data is still the same."""
        ...


def row_from_record(record: Mapping[str, Any], index: int, where: str, data: DataConfig) -> PromptRow:
    """Return the row that a record of a file or dataset makes; InputError naming row and field where it makes none."""
    require_fields(record, data, where)
    prompt = checked_prompt(record[data.prompt_field], data.prompt_field, where)
    fields = {name: value for name, value in record.items() if name not in (data.prompt_field, data.answer_field)}
    answer = record.get(data.answer_field)
    return PromptRow(index, where, prompt, _final_answer(answer), fields)


def require_fields(present: Iterable[str], data: DataConfig, where: str) -> None:
    """Raise InputError unless the prompt and answer fields are among `present`.

    The answer field may be absent only under its default name: a reward function may need none.
    """
    names = list(present)
    for key, name in (("data.prompt_field", data.prompt_field), ("data.answer_field", data.answer_field)):
        if name in names or (name == "answer" and key == "data.answer_field"):
            continue
        near = suggest(name, names)
        hint = near if near else f"Its fields are {', '.join(names) or 'none'}; name the right one with --set {key}=..."
        raise InputError(f"{where}: no field {name!r} ({key}).", hint)


def checked_prompt(value: Any, field_name: str, where: str) -> str | Messages:
    """Return the prompt, if it is a text or a list of chat messages that is not empty."""
    texts = [value] if isinstance(value, str) else value if isinstance(value, Sequence) else []
    contents = [text.get("content") if isinstance(text, Mapping) else text for text in texts]
    if (length := sum(len(text) for text in contents if isinstance(text, str))) > MOST_CHARACTERS:
        raise InputError(
            f"{where}: field {field_name!r} holds {length:,} characters; a prompt has at most {MOST_CHARACTERS:,}.",
            "Leave the row out, or name another field with --set data.prompt_field=...",
        )
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0:
        if all(_is_message(message) for message in value):
            return [{"role": message["role"], "content": message["content"]} for message in value]
        raise InputError(
            f"{where}: field {field_name!r} is a list, but not of chat messages.",
            "A message is an object with the texts `role` and `content`.",
        )
    found = "empty" if value is None or isinstance(value, str | Sequence) else f"of type {type(value).__name__}"
    raise InputError(f"{where}: field {field_name!r} is {found}.", "It must be a text or a list of chat messages.")


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _final_answer(answer: Any) -> Any:
    """Return the part after `####`, where an answer has the form of GSM8K (a worked solution, then `#### 72`)."""
    if isinstance(answer, str) and "\n#### " in answer:
        return answer.rsplit("\n#### ", 1)[1].strip()
    return answer


def instructions(data: DataConfig) -> str:
    """Return the text that is said to the model in addition to the rows."""
    return "\n".join(filter(None, (data.system_prompt, data.prompt_template, data.prompt_suffix)))
