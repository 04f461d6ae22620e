"""The built-in environments `python` and `search`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.schema import EnvironmentConfig
from rlctl.data.prompt_rows import PromptRow
from rlctl.envs.builtin.python_program import PythonProgram
from rlctl.envs.builtin.search import Search, same
from rlctl.envs.environments import plan_environment
from rlctl.errors import InputError

ASSERTS = {"prompt": "Write add(a, b).", "tests": ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"]}
PAIRS = {"prompt": "Print the double.", "inputs": ["4\n", "-1\n"], "outputs": ["8", "-2\n"]}
RIGHT = "def add(a, b):\n    return a + b"
HALF = "def add(a, b):\n    return abs(a) + abs(b)"
LEAVES = "import os\ndef add(a, b):\n    os._exit(0)"


def answers(row: dict[str, Any], *programs: str, **params: Any) -> list[Any]:
    environment = PythonProgram(**params)
    environment.reset(row, 1)
    return [environment.step({"content": f"So:\n```python\n{program}\n```\nDone."}) for program in programs]


def test_a_program_that_passes_its_tests_is_rewarded_at_once() -> None:
    (step,) = answers(ASSERTS, RIGHT)
    assert (step.reward, step.done) == (1.0, True)
    (step,) = answers(PAIRS, "print(2 * int(input()))")
    assert (step.reward, step.done) == (1.0, True)


def test_the_model_reads_why_a_program_failed_and_may_try_again() -> None:
    first, second = answers(ASSERTS, HALF, RIGHT)
    assert (first.reward, first.done) == (0.0, False)
    assert first.messages.startswith("assert add(-1, 1) == 0: the program failed:")
    assert "AssertionError" in first.messages
    assert (second.reward, second.done) == (1.0, True)
    wrong, last = answers(PAIRS, "print(4)", "print(8)")
    assert wrong.messages.startswith("With the input '4\\n': the program printed '4\\n', not what was expected.")
    assert (last.reward, last.done) == (0.5, True)
    assert answers(PAIRS, "print(8)", attempts=1, partial=False)[0].reward == 0.0


def test_a_program_that_ends_or_hangs_before_its_test_passes_nothing() -> None:
    (step,) = answers(ASSERTS, LEAVES, attempts=1)
    assert step.reward == 0.0
    assert "ended before the test" in answers(ASSERTS, LEAVES)[0].messages
    hanging, _ = answers(PAIRS, "while True: pass", "", seconds=0.5)
    assert "took longer than 0.5 s" in hanging.messages
    environment = PythonProgram()
    environment.reset(ASSERTS, 1)
    assert environment.step({"content": RIGHT}).messages.startswith("There is no program")


@pytest.mark.parametrize("row", [{"prompt": "?"}, {"prompt": [], "tests": ["assert 1"]}, PAIRS | {"outputs": ["8"]}])
def test_a_row_without_tests_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="a row needs a prompt, and the lists `tests`"):
        PythonProgram().reset(row, 1)


def test_the_model_searches_a_collection_and_answers(tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="needs the search extra")
    corpus = tmp_path / "passages.jsonl"
    facts = [{"title": "Oslo", "text": "The capital of Norway."}, {"text": "Lyon lies in France."}]
    corpus.write_text("\n".join(json.dumps(fact) for fact in facts) + "\nQuito is the capital of Ecuador.\n")
    loaded = plan_environment(EnvironmentConfig(name="search", params={"corpus": str(corpus)})).load()
    assert loaded.schemas()["search"]["function"]["parameters"]["required"] == ["query"]
    episode = loaded.begin()
    asyncio.run(episode.reset(PromptRow(0, "row 0", "Which is the capital of Norway?", "Oslo", {}), 1))
    search = Search(str(corpus)).search
    assert search("capital of Norway").startswith("[1] Oslo: The capital of Norway.\n\n[2] Quito")
    assert search("norway", k=1) == "[1] Oslo: The capital of Norway."
    assert search("submarine") == "Nothing was found."
    right, wrong = (
        asyncio.run(episode.step(text)) for text in ("It is in the north.\noslo.", "<answer>Lyon</answer>\nOslo")
    )
    assert (right.reward, right.done, wrong.reward) == (1.0, True, 0.0)


def test_answers_are_the_same_as_numbers_and_as_words() -> None:
    assert same("1,200.0", "1200")
    assert same("The  Hague.", "the Hague")
    assert not same("The Hague, I think", "The Hague")


@pytest.mark.parametrize(
    ("lines", "message"), [("", "has no passages"), ('{"title": "x"}', "line 1 is no JSON object")]
)
def test_a_collection_that_cannot_be_read_is_named(tmp_path: Path, lines: str, message: str) -> None:
    pytest.importorskip("bm25s", reason="needs the search extra")
    (tmp_path / "corpus.txt").write_text(lines)
    with pytest.raises(InputError, match=message):
        Search.prepare(str(tmp_path / "corpus.txt"))
