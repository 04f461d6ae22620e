"""Environments of other libraries: TextArena and SkyRL-gym as they are; the protocols and forms of the others."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlctl.environments.adapters.nemo_rl import NemoRL
from rlctl.environments.adapters.openenv import OpenEnv
from rlctl.environments.adapters.skyrl_gym import SkyRLGym
from rlctl.environments.adapters.textarena import TextArena
from rlctl.environments.adapters.verifiers import Verifiers
from rlctl.environments.gateway.exchange import Answer, Question
from rlctl.environments.gateway.server import Gateway
from rlctl.environments.sandboxes import SandboxPlan
from rlctl.errors import InputError


def test_a_game_of_textarena_is_played_to_its_end() -> None:
    pytest.importorskip("textarena", reason="needs the environments extra")
    game = TextArena("GuessTheNumber-v0")
    assert "between 1 and 20" in game.reset({}, 3)
    replies = []
    for guess in range(1, 21):
        replies.append(game.step(f"[{guess}]"))
        if replies[-1].done:
            break
    assert "higher" in replies[0].messages
    assert "between 1 and 20" not in replies[0].messages  # only what is new
    assert (replies[-1].reward, replies[-1].messages) == (1.0, ())


def test_an_environment_of_skyrl_gym_scores_the_row() -> None:
    pytest.importorskip("skyrl_gym", reason="needs the environments extra")
    row = {"prompt": "2 + 3?", "reward_spec": {"method": "rule", "ground_truth": "5"}}
    for answer, reward in (("#### 5", 1.0), ("#### 6", 0.0)):
        gym = SkyRLGym("gsm8k")
        assert not gym.reset(row, 0)
        found = gym.step(answer)
        assert (found.reward, found.done) == (reward, True)
        gym.close()


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(InputError, match="The environment nemo-rl needs the package no_such_package"):
        NemoRL("no_such_package:Game").reset({"prompt": "?"}, 0)


async def server(capacity: int) -> Any:
    """A server with OpenEnv's protocol, and its address: a number to be guessed, in as many sessions as it takes."""
    from aiohttp import web

    sessions = 0

    async def session(request: web.Request) -> web.WebSocketResponse:
        nonlocal sessions
        socket, number = web.WebSocketResponse(), 0
        await socket.prepare(request)
        sessions += 1
        async for message in socket:
            asked = message.json()
            said: dict[str, Any] = {"observation": {"text": "Guess."}, "reward": None, "done": False}
            kind = "observation"
            if asked["type"] == "reset" and sessions > capacity:
                kind, said = "error", {"message": "Server at capacity", "code": "CAPACITY_REACHED"}
            elif asked["type"] == "reset":
                number = asked["data"]["seed"]
            elif not asked["data"]["text"].isdigit():
                kind, said = "error", {"message": "that is not a number", "code": "EXECUTION_ERROR"}
            else:
                right = int(asked["data"]["text"]) == number
                said = {"observation": {"text": "right" if right else "wrong"}, "reward": float(right), "done": right}
            await socket.send_json({"type": kind, "data": said})
        return socket

    app = web.Application()
    app.router.add_get("/ws", session)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def test_a_server_of_openenv_has_a_session_for_each_episode() -> None:
    async def play() -> None:
        runner, address = await server(capacity=2)
        one, other, third = OpenEnv(address), OpenEnv(address + "/"), OpenEnv(address)
        assert (await one.reset({}, 3)).messages == "Guess."
        assert (await other.reset({}, 4)).messages == "Guess."
        assert (await one.step("4")).messages == "wrong"
        found = await other.step("4")
        assert (found.reward, found.done) == (1.0, True)
        refused = await one.step("four")
        assert (refused.messages, refused.metrics) == ("Error: that is not a number", {"refused_actions": 1.0})
        with pytest.raises(RuntimeError, match="raise max_concurrent_envs"):
            await third.reset({}, 5)
        for each in (one, other, third):
            await each.close()
        await runner.cleanup()

    asyncio.run(play())


def test_a_server_that_is_not_there_and_a_field_that_is_not_there_are_named() -> None:
    async def play() -> None:
        runner, address = await server(capacity=1)
        named = OpenEnv(address, observation="board")
        with pytest.raises(InputError, match=r"has no field 'board'; its fields are text"):
            await named.reset({}, 1)
        await named.close()
        await runner.cleanup()
        gone = OpenEnv(address)
        with pytest.raises(InputError, match="There is no OpenEnv server"):
            await gone.reset({}, 1)
        await gone.close()

    asyncio.run(play())


Return = namedtuple("Return", "observations metadata next_stop_strings rewards terminateds answers")


class Countdown:
    """An environment in the form of NeMo-RL: batched and without a state."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.word = config["word"]

    def step(self, logs: list[list[dict[str, str]]], metadata: list[dict[str, int]]) -> Return:
        (log,), (left,) = logs, metadata
        assert log[-1]["role"] == "assistant"
        said = {"role": "environment", "content": f"{self.word} {left['left'] - 1}"}
        done = left["left"] == 1
        return Return([said], [{"left": left["left"] - 1}], [["</go>"]], [float(done)], [done], None)


def test_an_environment_of_nemo_rl_gets_its_metadata_back() -> None:
    made = NemoRL(f"{__name__}:Countdown", {"word": "left:"}, "left")
    made.reset({"prompt": "Go.", "left": {"left": 2}}, 0)
    first, last = asyncio.run(made.step("a")), asyncio.run(made.step("b"))
    assert (first.messages, first.stop) == ([{"role": "user", "content": "left: 1"}], ("</go>",))
    assert (last.reward, last.done, last.messages) == (1.0, True, [])
    assert [one["role"] for one in made.log] == ["user", "assistant", "environment", "assistant", "environment"]


VERIFIERS = """
import json, os, urllib.request
ClientConfig = dict
class Made:
    def __init__(self, word): self.word = word
    def get_dataset(self): return ["none", "first", "second"]
    async def run_rollout(self, row, client, model, sampling):
        assert client == {"api_key_var": "OPENAI_API_KEY", "api_base_url": os.environ["OPENAI_BASE_URL"]}
        body = {"model": model, "messages": [{"role": "user", "content": f"{self.word} {row}"}]}
        asked = urllib.request.Request(client["api_base_url"] + "/chat/completions", json.dumps(body).encode(),
                                       {"Content-Type": "application/json"})
        found = json.load(urllib.request.urlopen(asked))
        return {"reward": 0.5, "metrics": {"length": len(found["choices"][0]["message"]["content"])}}
def load_environment(name, word): return Made(f"{name} {word}")
"""


class Five:
    """An episode that answers "five"."""

    def __init__(self, asked: list[Question]) -> None:
        self.questions = asked

    def asked(self, question: Question) -> asyncio.Future[Sequence[Answer]]:
        self.questions.append(question)
        answer = asyncio.get_running_loop().create_future()
        answer.set_result([Answer("five", (), [2], [1], [-0.5], cut=False)])
        return answer

    def tokens_of(self, question: Question) -> int:
        return 1


def test_an_environment_of_verifiers_is_a_program_that_asks(tmp_path: Path) -> None:
    (tmp_path / "verifiers.py").write_text(VERIFIERS)

    async def play() -> None:
        made = Verifiers("sums", sys.executable, {"word": "is"})
        made.variables["PYTHONPATH"] = str(tmp_path)
        gateway, asked = Gateway(), list[Question]()
        address = await gateway.open(Five(asked))
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as bystander:  # as Ray is in the process of the tests
            made.sandbox = SandboxPlan().opened(tmp_path / "episode")
            assert await made.run({}, 4, address) == {"length": 4, "reward": 0.5}
            bystander.communicate(b"", timeout=60)
            assert bystander.returncode == 0
        assert [question.messages for question in asked] == [[{"role": "user", "content": "sums is first"}]]
        code = VERIFIERS + "Made.requires_group_rollouts = True\n"  # a property of verifiers 0.2.1's environments
        (tmp_path / "verifiers.py").write_text(code)
        with pytest.raises(RuntimeError, match="has reward functions of whole groups"):
            await made.run({}, 4, address)
        gateway.close()

    asyncio.run(play())
