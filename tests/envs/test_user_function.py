"""Reward functions of many completions, in TRL's form: what they are given, and what they may return."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.data.prompt_rows import PromptRow
from rlctl.envs.user_function import UserBatchScorer, UserScorer, user_scorer
from rlctl.errors import InputError

ROWS = [
    PromptRow(0, "d.jsonl, line 1", "one?", "1", {"level": 3}),
    PromptRow(0, "d.jsonl, line 1", "one?", "1", {"level": 3}),
    PromptRow(1, "d.jsonl, line 2", "two?", "2", {"hint": "x"}),
]


def scorer(directory: Path, code: str) -> UserBatchScorer:
    (directory / "mine.py").write_text(code)
    found = user_scorer(f"{directory / 'mine.py'}:score")
    assert isinstance(found, UserBatchScorer)
    return found


def test_a_function_with_completions_gets_all_of_them_with_columns_by_name(tmp_path: Path) -> None:
    found = scorer(
        tmp_path,
        "def score(prompts, completions, answer, level, **columns):\n"
        "    assert prompts == ['one?', 'one?', 'two?'] and completions == ['a', 'bb', 'ccc']\n"
        "    assert answer == ['1', '1', '2'] and level == [3, 3, None] and columns == {'hint': [None, None, 'x']}\n"
        "    return [len(text) if n else None for text, n in zip(completions, level)]\n",
    )
    assert found.score_all(["a", "bb", "ccc"], ROWS) == [1, 2, None]


def test_chats_are_given_as_messages_and_arrays_are_lists(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    found = scorer(
        tmp_path,
        "import numpy\n"
        "def score(completions, *, prompts=None, unknown=7):\n"
        "    assert prompts == [[{'role': 'user', 'content': 'hi'}]] and unknown == 7\n"
        "    return numpy.array([len(completions[0][0]['content'])], dtype=numpy.float32)\n",
    )
    assert found.score_all(["abc"], [PromptRow(0, "row 0", chat, None)]) == [3]


def test_a_function_of_one_completion_stays_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completion, level=0, **row):\n    return level + len(completion)\n")
    found = user_scorer(f"{tmp_path / 'mine.py'}:score")
    assert isinstance(found, UserScorer)
    assert found("ab", ROWS[0]) == 5


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def score(completions): return [1.0]", ["returned a list of 1 for 3 completions", "list[float"]),
        ("def score(completions): return 1.0", ["returned 1.0 for 3 completions", "must return a list"]),
        ("def score(completions): return 'abc'", ["returned 'abc'"]),
        ("def score(completions): return [1, 'good', 1]", ["returned 'good' for d.jsonl, line 1", "finite number"]),
        ("def score(completions): return [1, 1, float('nan')]", ["returned nan for d.jsonl, line 2"]),
        ("def score(completions, solution): return []", ["needs solution, which 3 completions", "It can have level"]),
        ("def score(completions, completion_ids): return []", ["needs completion_ids, which rlctl does not give"]),
        ("async def score(completions): return [1, 1, 1]", ["returned a coroutine", "async"]),
        ("def score(completions):\n    return completions[9]", ["raised IndexError", "3 completions", "line 2"]),
    ],
)  # fmt: skip
def test_wrong_functions_of_many_are_named(tmp_path: Path, code: str, words: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        scorer(tmp_path, code).score_all(["a", "b", "c"], ROWS)
    for word in ["mine.py:score", *words]:
        assert word in str(raised.value)
