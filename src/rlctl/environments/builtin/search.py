"""Questions about a collection of texts, searched with BM25. The file has one passage per line: plain text, or JSON
with `text` and optionally `title`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rlctl.config.files import user_path
from rlctl.data.prompt_rows import answer_text
from rlctl.environments.interface import Message, Step
from rlctl.errors import InputError
from rlctl.rewards.extraction import as_number, extract

MOST_PASSAGES = 10
SHOWN = 1000
"""Characters of a passage that the model reads."""


class Search:
    """The reward is 1 where the first message without a call has the row's answer in an <answer> tag, or as its last
    line: the same number, or the same words."""

    tools = ("search",)
    passages: ClassVar[list[str]]
    index: ClassVar[Any]

    def __init__(self, corpus: str) -> None:
        self.corpus = corpus

    @classmethod
    def prepare(cls, corpus: str) -> str:
        """Read the passages and build the index. Return how many there are."""
        try:
            import bm25s  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise InputError(
                "Environment 'search' needs a package that is not installed: bm25s.",
                "Install rlctl with its search extra.",
            ) from error
        cls.passages = read_passages(user_path(corpus))
        cls.index = bm25s.BM25()
        cls.index.index(bm25s.tokenize(cls.passages, show_progress=False), show_progress=False)
        return f"{len(cls.passages):,} passages can be searched"

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        if not row["prompt"] or row["answer"] is None:
            raise InputError(
                "Environment 'search': a row needs a prompt and an answer.", "Name rows that have them with --data."
            )
        self.answer = answer_text(row["answer"])

    def search(self, query: str, k: int = 3) -> str:
        """Search the collection, and return the passages that fit best.

        Args:
            query: Words to look for.
            k: Number of passages.
        """
        import bm25s  # pyright: ignore[reportMissingImports]

        most = max(1, min(k, MOST_PASSAGES, len(self.passages)))
        passages, scores = self.index.retrieve(bm25s.tokenize(query, show_progress=False), k=most, show_progress=False)
        fitting = [self.passages[i] for i, score in zip(passages[0], scores[0], strict=True) if score > 0]
        return "\n\n".join(f"[{n}] {text[:SHOWN]}" for n, text in enumerate(fitting, 1)) or "Nothing was found."

    def step(self, message: Message) -> Step:
        answer_ = extract(message["content"], "answer-tag") or extract(message["content"], "last-line")
        return Step(reward=float(answer_ is not None and same(answer_, self.answer)), done=True)


def same(answer_: str, answer: str) -> bool:
    number = as_number(answer)
    if number is not None and as_number(answer_) == number:
        return True
    return " ".join(answer_.casefold().strip(" .*").split()) == " ".join(answer.casefold().strip(" .").split())


def read_passages(path: Path) -> list[str]:
    """Return the passages of a file. Raises InputError for one that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]  # others are in passages
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"environment.params.corpus: {path} cannot be read: {error}.") from error
    if not lines:
        raise InputError(f"environment.params.corpus: {path} has no passages.", "Write one passage a line.")
    return [_passage(line, f"{path}, line {number}") for number, line in lines]


def _passage(line: str, where: str) -> str:
    if not line.lstrip().startswith("{"):
        return line.strip()
    try:
        value = json.loads(line)
        return f"{value['title']}: {value['text']}" if value.get("title") else str(value["text"])
    except (ValueError, KeyError) as error:
        raise InputError(f"{where} is not a JSON object with a `text`: {error}.") from error
