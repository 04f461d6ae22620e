"""An agent of openai-agents solves a row with a calculator; the reward is 1 if its output contains the row's answer.
OPENAI_AGENTS_CHAT=1 asks through chat completions in place of responses."""

import json
import os
import sys

from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)  # traces would go to OpenAI


@function_tool
def add(first: float, second: float) -> float:
    """Add two numbers."""
    return first + second


row = json.load(sys.stdin)
kind = OpenAIChatCompletionsModel if os.environ.get("OPENAI_AGENTS_CHAT") else OpenAIResponsesModel
model = kind(os.environ["OPENAI_MODEL"], AsyncOpenAI())
try:
    output = Runner.run_sync(Agent("solver", model=model, tools=[add]), row["prompt"]).final_output
except AgentsException:  # an answer that was cut, an unknown tool, too many turns: the model's fault
    output = ""
print(json.dumps({"reward": float(row["answer"] in output)}))
