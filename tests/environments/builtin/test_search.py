"""The built-in environment `search`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rlctl.data.prompt_rows import PromptRow
from rlctl.environments.builtin.search import Search, same
from rlctl.environments.environment_plan import plan_environment
from rlctl.environments.running_episode import RunningEpisode
from rlctl.errors import InputError
from rlctl.settings.rewards import EnvironmentConfig


def test_the_model_searches_a_collection_and_answers(tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="needs the search extra")
    corpus = tmp_path / "passages.jsonl"
    facts = [{"title": "Oslo", "text": "The capital of Norway."}, {"text": "Lyon\u2028lies in France."}]
    corpus.write_text(
        "\n".join(json.dumps(fact, ensure_ascii=False) for fact in facts) + "\nQuito is the capital of Ecuador.\n"
    )
    loaded = plan_environment(EnvironmentConfig(name="search", params={"corpus": str(corpus)})).load()
    assert loaded.note == "3 passages can be searched"
    assert loaded.schemas()["search"]["function"]["parameters"]["required"] == ["query"]
    episode = RunningEpisode(loaded, tmp_path)
    asyncio.run(episode.reset(PromptRow(0, "row 0", "Which is the capital of Norway?", "Oslo", {}), 1))
    search = Search(str(corpus)).search
    assert search("capital of Norway").startswith("[1] Oslo: The capital of Norway.\n\n[2] Quito")
    assert search("norway", k=1) == "[1] Oslo: The capital of Norway."
    assert search("submarine") == "Nothing was found."
    right, wrong = (
        asyncio.run(episode.step({"role": "assistant", "content": text}))
        for text in ("It is in the north.\noslo.", "<answer>Lyon</answer>\nOslo")
    )
    assert (right.reward, right.done, wrong.reward) == (1.0, True, 0.0)


def test_answers_are_the_same_as_numbers_and_as_words() -> None:
    assert same("1,200.0", "1200")
    assert same("The  Hague.", "the Hague")
    assert not same("The Hague, I think", "The Hague")


@pytest.mark.parametrize(
    ("lines", "message"), [("", "has no passages"), ('{"title": "x"}', "line 1 is not a JSON object")]
)
def test_a_collection_that_cannot_be_read_is_named(tmp_path: Path, lines: str, message: str) -> None:
    pytest.importorskip("bm25s", reason="needs the search extra")
    (tmp_path / "corpus.txt").write_text(lines)
    with pytest.raises(InputError, match=message):
        Search.prepare(str(tmp_path / "corpus.txt"))
