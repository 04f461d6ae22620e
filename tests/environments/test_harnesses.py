"""Agent packages as they are published, against the gateway: `examples/harnesses`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlctl.environments.gateway.exchange import Answer, Question, ToolCall
from rlctl.environments.gateway.matching import Answers, conversation_digests
from rlctl.environments.gateway.server import Gateway

HARNESSES = Path(__file__).parents[2] / "examples" / "harnesses"
PACKAGES = (
    "litellm==1.110.2", "mini-swe-agent==2.4.6", "openai-agents==0.24.0", "smolagents==1.26.0", "inspect-ai==0.3.285",
    "anthropic==2.14.0",
)  # fmt: skip
PROGRAMS = ("@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.171.0")
CALLS = {
    "add": '{ "second" :3.0, "first": 2e0 }',
    "bash": '{"command": "echo 5"}',
    "final_answer": '{"answer": "It is 5."}',
}
"""Arguments with other blanks, order and numbers than a client would write."""
SUBMIT = json.dumps({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 5"})


class Calling:
    """An episode that calls a tool, and then answers."""

    def __init__(self) -> None:
        self.answers: Answers[int] = Answers()
        self.requests: list[tuple[int, int | None]] = []
        """Of each request: the number of its messages, and the number of the answer that it continues."""

    def asked(self, question: Question) -> asyncio.Future[Sequence[Answer]]:
        digests = conversation_digests(question.messages, question.tools)
        number, again = len(self.requests), any(message["role"] == "assistant" for message in question.messages)
        self.requests.append((len(question.messages), self.answers.continued(question.messages, digests)[1]))
        names = [tool["function"]["name"] for tool in question.tools]
        name = "final_answer" if again and "final_answer" in names else next((n for n in names if n in CALLS), None)
        name = name or (names[0] if names and not again else None)  # a coding agent's own tool
        calls: tuple[ToolCall, ...] = ()
        if name is not None and (not again or name in ("bash", "final_answer")):
            calls = (ToolCall(f"call{number:05}", name, SUBMIT if again and name == "bash" else CALLS.get(name, "{}")),)
        text = "" if calls else " It is 5.\n"
        answer = Answer(text, calls, [1, 2, 3], [4, 5], [-0.5, -0.25], cut=False, thought="I add them.\n")
        self.answers.add(digests[-1], answer.message(), number)

        async def answered() -> Sequence[Answer]:
            await asyncio.sleep(0.01)
            return [answer]

        return asyncio.ensure_future(answered())

    def tokens_of(self, question: Question) -> int:
        return 3


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("harness")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    installed = subprocess.run([place / "bin" / "pip", "install", "--quiet", *PACKAGES], check=False)
    if installed.returncode:
        pytest.skip("the packages could not be installed")
    return place / "bin" / "python"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("programs")
    if (npm := shutil.which("npm")) is None:
        pytest.skip("npm is not installed")
    if subprocess.run(
        [npm, "install", "--silent", "--no-audit", "--no-fund", *PROGRAMS], cwd=place, check=False
    ).returncode:
        pytest.skip("the programs could not be installed")
    return place / "node_modules" / ".bin"


async def played(command: Sequence[str], variables: dict[str, str], home: Path) -> tuple[Any, Calling]:
    """Play an episode; return the program's last line and the episode."""
    gateway, episode = Gateway(), Calling()
    address = await gateway.open(episode)
    model = {"BASE_URL": f"{address.url}/v1", "API_KEY": address.key, "MODEL": "policy"}
    anthropic = model | {"BASE_URL": address.url}
    env = {**os.environ, "HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "True", **variables}
    env |= {f"OPENAI_{name}": value for name, value in model.items()}
    env |= {f"ANTHROPIC_{name}": value for name, value in anthropic.items()}
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(*command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, cwd=home)
    row = json.dumps({"prompt": "What is 2 + 3?", "answer": "5"}).encode()
    try:
        out, err = await asyncio.wait_for(program.communicate(row), 300)
    finally:
        gateway.close()
    assert program.returncode == 0, err.decode()[-3000:]
    return json.loads(out.decode().strip().splitlines()[-1]), episode


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "variables", "continues"),
    [
        (["with_litellm.py"], {}, True),
        (["with_litellm.py", "anthropic"], {}, True),
        (["with_mini_swe_agent.py"], {}, True),
        (["with_openai_agents.py"], {}, True),
        (["with_openai_agents.py"], {"OPENAI_AGENTS_CHAT": "1"}, True),
        (["with_smolagents.py"], {}, False),  # it writes its calls into a text
        (["with_inspect_ai.py", "openai-api/policy"], {}, True),
        (["with_inspect_ai.py", "openai"], {}, True),
        (["with_inspect_ai.py", "anthropic"], {}, True),
    ],
)
def test_a_package_calls_a_tool_and_continues_the_sampled_answer(
    python: Path, tmp_path: Path, arguments: list[str], variables: dict[str, str], continues: bool
) -> None:
    command = [str(python), str(HARNESSES / arguments[0]), *arguments[1:]]
    result, episode = asyncio.run(played(command, variables, tmp_path))
    assert result == {"reward": 1.0}
    require_continued(episode, continues)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["claude", "codex"])
def test_a_coding_agent_continues_the_sampled_answer(programs: Path, tmp_path: Path, kind: str) -> None:
    command = [sys.executable, str(HARNESSES / "with_coding_agent.py"), kind, str(programs / kind)]
    result, episode = asyncio.run(played(command, {}, tmp_path))
    assert result == {"reward": 1.0, "exit_code": 0}
    require_continued(episode, True)


def require_continued(episode: Calling, continues: bool) -> None:
    (_, first), *_, (messages, second) = episode.requests
    assert first is None
    assert messages >= 3
    assert (second is not None) == continues, episode.requests
