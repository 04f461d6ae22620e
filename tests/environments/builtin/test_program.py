"""The server that answers a program in the place of OpenAI's."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.data.prompt_rows import PromptRow
from rlctl.environments.environment_plan import plan_environment
from rlctl.environments.running_episode import RunningEpisode
from rlctl.settings.rewards import EnvironmentConfig

AGENT = """
import json, os, sys, urllib.request
row, tool = json.load(sys.stdin), {"name": "remove", "parameters": {"type": "object", "properties": {"path": {}}}}
body = {"model": "policy", "messages": [{"role": "user", "content": row["prompt"]}],
        "tools": [{"type": "function", "function": tool}]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
                               {"Content-Type": "application/json"})
(choice,) = json.load(urllib.request.urlopen(asked))["choices"]
reasons = {"stop": 1, "length": 2, "tool_calls": 3}
print(json.dumps({"reward": reasons[choice["finish_reason"]], "calls": len(choice["message"].get("tool_calls", []))}))
"""
CODER = "<tool_call>\n<function=remove>\n<parameter=path>\n/srv\n</parameter>\n"
HERMES = '<tool_call>\n{"name": "remove", "arguments": {"path": "/srv"}}\n</tool_call>\n'


@pytest.mark.parametrize(
    ("form", "text", "stop_reason", "finish_reason", "calls"),
    [
        ("qwen3-coder", CODER, "length", "length", 0),
        ("qwen3-coder", f"{CODER}</function>\n</tool_call>", "stop", "tool_calls", 1),
        ("hermes", HERMES.removesuffix("\n</tool_call>\n"), "length", "length", 0),
        ("hermes", f'{HERMES}<tool_call>\n{{"name": "rem', "length", "length", 0),
        ("hermes", f"{HERMES}And then I", "length", "length", 1),
        ("hermes", HERMES, "stop", "tool_calls", 1),
        ("hermes", "I would rather", "length", "length", 0),
        ("hermes", "No.", "stop", "stop", 0),
    ],
)
def test_an_answer_that_the_token_limit_has_cut_says_so(
    form: str, text: str, stop_reason: str, finish_reason: str, calls: int, tmp_path: Path
) -> None:
    """OpenAI's reference: `length` if the maximum number of tokens was reached."""
    (agent := tmp_path / "agent.py").write_text(AGENT)
    params = {"command": [sys.executable, str(agent)]}
    loaded = plan_environment(EnvironmentConfig(name="program", params=params)).load()
    loaded.plan = replace(loaded.plan, form=form)
    message = {"role": "assistant", "content": text, "tokens": [1], "logprobs": [0.0], "prompt_tokens": [1]}

    async def played() -> tuple[float, float]:
        episode = RunningEpisode(loaded)
        await episode.reset(PromptRow(0, "row 1", "Clean up.", None), 0)
        ended = await episode.step({**message, "stop_reason": stop_reason})
        return (await episode.close()).reward, ended.metrics["calls"]

    assert asyncio.run(played()) == ({"stop": 1, "length": 2, "tool_calls": 3}[finish_reason], calls)
