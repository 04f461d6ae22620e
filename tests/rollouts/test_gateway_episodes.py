"""Which sampled tokens a program's requests continue, with answers of a given text in place of an engine's."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from rlctl.backends.messages import GroupRequest, SampleRequest, SampleResult, Sampling
from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.prompt_rows import PromptRow
from rlctl.environments.gateway.chat import ChatCompletions
from rlctl.environments.gateway.exchange import Answer
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes
from rlctl.rollouts.episodes import Episode
from rlctl.rollouts.gateway_episodes import ModelTurns

ROW = PromptRow(0, "row 0", "2 + 3?", "5")
PROGRAM = Path(__file__).parents[1] / "support" / "toy_program.py"
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
USER = {"role": "user", "content": "Look."}


class Runner:
    """Samples the given texts, one after another."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts, self.read = tokenizer, list(texts), list[str]()

    async def sampled(self, request: SampleRequest) -> SampleResult:
        self.read.append(self.tokenizer.decode(list(request.tokens)))
        text = self.texts.pop(0)
        ids = np.array(self.tokenizer(text, add_special_tokens=False).input_ids)
        return SampleResult(request.key, ids, np.zeros(len(ids)), np.zeros(len(ids), np.int64), text, "stop")


@pytest.fixture(scope="module")
def play(tiny_llama: Path) -> EnvironmentEpisodes:
    environment = {"name": "program", "params": {"command": [sys.executable, str(PROGRAM), "tools"]}}
    config = RlConfig.model_validate({"environment": environment})
    tokenizer = load_tokenizer(tiny_llama, config.model)
    encoder = PromptEncoder.build(tokenizer, config.model, config.data, tiny_llama)
    opened = EnvironmentEpisodes.open(config, encoder, ROW)
    assert opened is not None
    return opened.within(4096)


def asked(play: EnvironmentEpisodes, texts: Sequence[str], conversations: Any) -> tuple[Episode, Runner, list[Answer]]:
    """Ask for each of the conversations (functions of the messages so far answered) in turn."""
    runner = Runner(play.turns.encoder.tokenizer, texts)
    episode = Episode(cast("Any", runner), "key", GroupRequest(0, (), (1,), ROW, (), 1), 1, Sampling(64))
    turns, answers = ModelTurns(play, episode), list[Answer]()

    async def ask() -> None:
        for conversation in conversations:
            body = conversation([answer.message() for answer in answers])
            answers.extend(await turns.asked(ChatCompletions().question(body)))
        await turns.close()

    asyncio.run(ask())
    return episode, runner, answers


def test_turns_of_agents_that_take_turns_are_one_context_each(play: EnvironmentEpisodes) -> None:
    """Two agents with other instructions and tools ask alternately, each twice."""
    bodies = [
        {"messages": [{"role": "system", "content": name}, USER], "tools": tools}
        for name, tools in (("main", [TOOL]), ("helper", []))
    ]
    later = [
        lambda said, n=n: bodies[n] | {"messages": [*bodies[n]["messages"], said[n], {**USER, "content": "Go on."}]}
        for n in (0, 1)
    ]
    firsts = [lambda _, n=n: bodies[n] for n in (0, 1)]
    episode, _, answers = asked(play, ["one", "two", "three", "four"], [*firsts, *later])
    assert len(episode.starts) == 2
    decoded = play.turns.encoder.tokenizer.decode
    first, second = (decoded(episode.tokens[begin:]) for begin in episode.starts)
    assert first.index("one") < first.index("three") < first.index("two") < first.index("four")
    assert "one" not in second
    assert second.index("two") < second.index("four")
    assert [answer.text for answer in answers] == ["one", "two", "three", "four"]


def test_a_thought_stays_in_the_tokens_that_a_request_without_it_continues(play: EnvironmentEpisodes) -> None:
    thought = "<think>\nIt is even.\n</think>\n\nFour."

    def go_on(said: Sequence[Any]) -> dict[str, Any]:
        assert said[0] == {"role": "assistant", "content": "Four.", "reasoning_content": "It is even."}
        return {"messages": [USER, {"role": "assistant", "content": "Four."}, {**USER, "content": "Sure?"}]}

    episode, runner, _ = asked(play, [thought, "Yes."], [lambda _: {"messages": [USER]}, go_on])
    assert thought in runner.read[1]
    assert (len(episode.starts), episode.counts["gateway/rewritten_answers"]) == (1, 0.0)
    limits = play.limits.model_copy(update={"thoughts": "content"})
    _, _, (answer,) = asked(replace(play, limits=limits), [thought], [lambda _: {"messages": [USER]}])
    assert answer.message() == {"role": "assistant", "content": thought}


def test_a_request_that_may_call_nothing_shows_no_tools_and_reads_no_calls(play: EnvironmentEpisodes) -> None:
    """A conversation that goes on keeps its tokens, and so its tools."""
    none = {"messages": [USER], "tools": [TOOL], "tool_choice": "none"}
    result = {"role": "tool", "tool_call_id": "call00000", "content": "a cup"}

    def go_on(said: Sequence[Any]) -> dict[str, Any]:
        return none | {"messages": [USER, said[1], result]}

    firsts = [lambda _: none, lambda _: none | {"tool_choice": "auto"}]
    episode, runner, answers = asked(play, [CALL, CALL, CALL], [*firsts, go_on])
    assert [("look_up" in text) for text in runner.read] == [False, True, True]
    assert [len(answer.calls) for answer in answers] == [0, 1, 0]
    assert len(episode.starts) == 2
