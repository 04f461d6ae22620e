"""Rows of prompts: a question with its reference answer and other fields."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlctl.data.image_sources import ImageSource, images_of, without_marks
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig

GYM_PREFIX = "reasoning-gym:"
TOOLS = "tools"
"""Field of the tools that a conversation may call, and the template's name for them."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PromptRow:
    """One question."""

    index: int
    """Row of the dataset, from 0."""
    where: str
    """How to name the row in a message, for example `data.jsonl, line 3`."""
    prompt: str | Messages
    """A text, or chat messages with `role` and `content`."""
    answer: Any
    """The reference answer; None where the dataset has none."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The row's fields for templates and reward functions, except `prompt` and `answer`."""
    source: str = ""
    """Label of its dataset (`data.sources`), where a run has several."""

    def field_at(self, path: str) -> str:
        """Return the text of a field, such as `name` or `agent_ref.name`; empty where the row has none."""
        value: Any = self.fields
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return "" if value is None else str(value)

    @property
    def tools(self) -> list[Any]:
        """The tools that a conversation may call, as templates take them. Raises InputError for anything else."""
        try:
            tools = from_json(self.fields.get(TOOLS) or [])
            tools = [from_json(tool) for tool in tools] if isinstance(tools, Sequence) else tools
        except ValueError as error:
            raise InputError(f"{self.where}: the field {TOOLS!r} is not JSON.", "Write a list of tools.") from error
        if isinstance(tools, str) or not isinstance(tools, Sequence) or not all(isinstance(o, Mapping) for o in tools):
            raise InputError(
                f"{self.where}: the field {TOOLS!r} is not a list of tools.",
                'A tool is {"type": "function", "function": {"name": ..., "parameters": {...}}}. Rename a field that '
                "holds something else.",
            )
        return [*tools]

    @property
    def reference(self) -> str:
        """The reference answer as a text. Raises InputError for a row without one."""
        if self.answer is None:
            raise InputError(f"{self.where}: there is no reference answer to compare with.", "Leave the row out.")
        return answer_text(self.answer)

    @property
    def question(self) -> str:
        """The prompt as one text: of messages, the last that is the user's. An environment may begin without any."""
        if isinstance(self.prompt, str):
            return self.prompt
        questions = [m["content"] for m in self.prompt if m["role"] == "user"]
        return without_marks((questions or [m["content"] for m in self.prompt] or [""])[-1])

    @property
    def images(self) -> tuple[ImageSource, ...]:
        return images_of(self.prompt)


@dataclass(frozen=True)
class GymTask:
    """A reasoning-gym task with its parameters. Any process can rebuild its questions and its scorer from it."""

    name: str
    params: dict[str, Any]


@dataclass(frozen=True)
class PromptDataset:
    """A finite, indexable dataset of prompts."""

    label: str
    """The name that the user gave it."""
    size: int
    row_at: Callable[[int], PromptRow]
    identity: Mapping[str, Any]
    """Values that identify its contents; the number of rows may be missing."""
    instructions: str = ""
    """Text that the system prompt and the suffix add to every prompt."""
    task: GymTask | None = None
    """The task, if it brings a scorer."""
    checked: int = 1
    """Its first rows that are looked at before a run: all where they are in memory."""
    ahead: int | None = None
    """Rows of a run whose texts are checked before it; None: all."""
    notes: tuple[str, ...] = ()
    """Remarks for the user on its rows."""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> PromptRow:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.row_at(index)

    def only(self, rows: np.ndarray, **identity: Any) -> PromptDataset:
        """Return a dataset of some rows, renumbered from 0 for pass-rate orders and neighbors; `identity` distinguishes
        it."""
        return replace(
            self,
            size=len(rows),
            row_at=lambda index: replace(self[int(rows[index])], index=index),
            identity={**self.fingerprint(), **identity},
            checked=min(len(rows), self.checked),
        )

    def sample(self, most: int) -> list[PromptRow]:
        """Return all rows in order, or beyond `most` the first and a fixed random choice. Unreadable rows other than
        the first are left out."""
        rows, later = [self[0]], range(1, self.size)
        for index in later if self.size <= most else sorted(random.Random(0).sample(later, most - 1)):
            with suppress(InputError):
                rows.append(self[index])
        return rows

    def fingerprint(self) -> dict[str, Any]:
        """Return the manifest's digest, to detect changed data on resume."""
        return {"rows": self.size, **self.identity}


def instructions(data: DataConfig) -> str:
    return "\n".join(filter(None, (data.system_prompt, data.prompt_template, data.prompt_suffix)))


def answer_text(answer: Any) -> str:
    """Return a reference answer in the form that completions write; booleans as in JSON, not Python."""
    return json.dumps(answer) if isinstance(answer, bool) else str(answer)


def from_json(value: Any) -> Any:
    """Parse a JSON text and return other values unchanged. Raises ValueError for a text that is not JSON."""
    return json.loads(value) if isinstance(value, str) else value
