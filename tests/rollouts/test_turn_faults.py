"""Turns with thoughts where the answer stands and with calls that are none, from the text to the column of the loss."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.backends.messages import SampleRequest, SampleResult, Sampling
from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.prompt_rows import PromptRow
from rlctl.environments.running_episode import Reply, RunningEpisode
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes, EpisodePlayer, episode_request
from rlctl.rollouts.episodes import Episode, result_of
from rlctl.rollouts.turn_faults import JudgedTurn, episode_faults, faults_of

THINKS, CALLS = "malformed_thinking", "invalid_tool_call"


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>2 + 3</think>\n\n5", False, []),
        ("2 + 3</think>5", True, []),
        ("5", False, []),
        ("2 + 3 and no end", True, []),
        ("<think>2 + 3 and no end", False, []),
        ("<think>a</think>5<think>b</think>", False, [THINKS]),
        ("a</think>5</think>", True, [THINKS]),
        ("The answer <think> is 5", False, [THINKS]),
        ("a<think>b</think>", True, []),  # there is no answer, and one tag in the thought
        ("a<think>b<think>c", True, [THINKS]),
        ("<think>a</think><tool_call>{", False, [CALLS]),
        ("<tool_call>", False, [CALLS]),
        ("I would <tool_call> it</think>5", True, []),  # in a thought that ends
        ("I would <tool_call> it", True, [CALLS]),
        ("</function_call></think>", False, [CALLS]),
        ("a</think></think></tool_call>", True, [THINKS, CALLS]),
    ],
)
def test_faults_of_a_turn_are_those_that_nemo_rl_finds(text: str, opened: bool, expected: list[str]) -> None:
    assert faults_of(text, opened=opened, called=False, broken=False) == expected
    assert faults_of(text, opened=opened, called=True, broken=False) == []


def test_a_call_that_cannot_be_read_is_a_fault_whatever_marks_it() -> None:
    assert faults_of("[TOOL_CALLS]{", opened=False, called=False, broken=True) == [CALLS]


class Session:
    """An environment that says which calls were broken, and gives each step and the end a reward."""

    def __init__(self, *broken: int, reward: float = 0.0) -> None:
        self.broken, self.reward = list(broken), reward

    async def ask(self, what: Any, *arguments: Any, timeout_s: float) -> Reply:
        if what is RunningEpisode.reset:
            return Reply(({"role": "user", "content": "?"},))
        return Reply(reward=self.reward, broken=self.broken.pop(0) if what is RunningEpisode.step else 0)


class Saying:
    """An engine that says what it is told to."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.answers = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        self.decode = tokenizer.decode

    async def sampled(self, request: SampleRequest) -> SampleResult:
        tokens = np.array(self.answers.pop(0), np.int32)
        zeros = np.zeros(len(tokens), np.float32)
        return SampleResult(request.key, tokens, zeros, zeros.astype(np.int32), self.decode(tokens), "stop")


def test_tokens_of_turns_with_a_fault_have_its_bit(tiny_llama: Path) -> None:
    config = RlConfig.model_validate({"environment": {"name": "guess-number"}})
    encoder = PromptEncoder.build(load_tokenizer(tiny_llama, config.model), config.model, config.data, tiny_llama)
    row = PromptRow(0, "row 0", "2 + 3?", "5")
    play = EnvironmentEpisodes.open(config, encoder, row)
    assert play is not None
    player, session = EpisodePlayer(replace(play, max_length=512), None), Session(0, 0, 1, 0)  # type: ignore[arg-type]
    texts = ["all well", "an <think> here", "[oh", "a</think></think></tool_call>"]
    request = episode_request(0, row, encoder, [1], 2)
    episode = Episode(Saying(encoder.tokenizer, *texts), "0", request, 1, Sampling(64))  # type: ignore[arg-type]
    episode.read(encoder.encode_messages([{"role": "user", "content": "?"}], "row"))
    for _ in texts:
        asyncio.run(player._turn(episode, session, Reply()))  # type: ignore[arg-type]
    result = result_of(request, [episode], 0)
    columns = result.columns
    bits = [set(columns.extra_T["turn_faults"][columns.extra_T["turn"] == turn].tolist()) for turn in range(4)]
    assert bits == [{0.0}, {1.0}, {2.0}, {3.0}]
    assert not columns.extra_T["turn_faults"][~columns.loss_mask_T].any()
    assert result.episodes[0].counts == {THINKS: 2.0, CALLS: 2.0}


def said(text: str, *, opened: bool = False, call: str = "") -> JudgedTurn:
    return JudgedTurn(
        text + call, text, opened, bool(call), faults_of(text, opened=opened, called=bool(call), broken=False)
    )


CALL = '<tool_call>{"name": "add"}</tool_call>'


@pytest.mark.parametrize(
    ("turns", "faults"),
    [
        ([said("a</think>5", opened=True)], set()),
        ([said("5</think> 5\n", opened=True)], {"duplicated-thinking"}),
        ([said("a</think>", opened=True)], {"empty-answer"}),
        ([said("")], {"empty-answer"}),
        ([said("a</think>", opened=True, call=CALL)], set()),
        ([said("a</think>", opened=True, call=CALL), said("b</think>", opened=True)], {"empty-answer"}),
        ([said("a</think>so", opened=True, call=CALL), said("b</think>", opened=True)], set()),
        ([said("a", opened=True)], {"empty-answer", "malformed-thinking"}),
        ([said("<think>a</think>5")], {"malformed-thinking"}),
        ([said("5</think>")], {"malformed-thinking", "empty-answer"}),
        ([said("a</think>5</think>", opened=True)], {"malformed-thinking"}),
        ([said("5")], set()),
    ],
)
def test_faults_that_take_the_reward_are_those_of_nemo_rl(turns: list[JudgedTurn], faults: set[str]) -> None:
    """Its `reward_penalties`: the thought is the answer, the last message is empty, or a turn has other tags than the
    one that ends the thought of its prompt."""
    assert episode_faults(turns) == faults


@pytest.mark.parametrize("limits", [{"no_reward": ["malformed-thinking"]}, {"unwanted_tokens": [7]}, {}])
def test_an_episode_with_such_a_fault_has_no_reward(tiny_llama: Path, limits: dict[str, Any]) -> None:
    config = RlConfig.model_validate({"environment": {"name": "guess-number", "turns": 1, **limits}})
    encoder = PromptEncoder.build(load_tokenizer(tiny_llama, config.model), config.model, config.data, tiny_llama)
    row = PromptRow(0, "row 0", "2 + 3?", "5")
    play = EnvironmentEpisodes.open(config, encoder, row)
    assert play is not None
    engine = Saying(encoder.tokenizer, "<think>")
    engine.answers[0].append(7)
    episode = Episode(engine, "0", episode_request(0, row, encoder, [1], 2), 1, Sampling(64))  # type: ignore[arg-type]
    session = Session(0, reward=0.5)
    asyncio.run(EpisodePlayer(replace(play, max_length=512), None)._played(episode, session))  # type: ignore[arg-type]
    assert sum(episode.rewards) == (0.0 if limits else 1.0)  # of the step, and at the end
    assert ("no_reward" in episode.counts) == bool(limits)
