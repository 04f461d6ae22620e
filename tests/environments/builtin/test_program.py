"""The answers that a program reads from the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlctl.environments.gateway.exchange import Question, finish_of
from rlctl.rollouts.gateway_episodes import ModelTurns
from rlctl.rollouts.turn_faults import JudgedTurn

TOOL = {
    "type": "function",
    "function": {"name": "remove", "parameters": {"type": "object", "properties": {"path": {}}}},
}
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
    form: str, text: str, stop_reason: str, finish_reason: str, calls: int
) -> None:
    """OpenAI's reference: `length` if the maximum number of tokens was reached."""
    judged = JudgedTurn(text, text, False, False, ())
    play: Any = SimpleNamespace(plan=SimpleNamespace(form=form), judged=lambda *_, **__: judged)
    result: Any = SimpleNamespace(
        text=text, stop_reason=stop_reason, tokens_R=np.array([1]), logprobs_R=np.array([0.0], np.float32)
    )
    turns, question = ModelTurns(play, SimpleNamespace()), Question(tools=[TOOL])  # type: ignore[arg-type]
    answer, _ = turns._judged(question, (1,), result)
    assert (finish_of(answer), len(answer.calls)) == (finish_reason, calls)
    assert not answer.calls or "<tool_call>" not in answer.text
