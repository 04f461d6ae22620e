"""An agent of openai-agents 0.24.0 adds two numbers with a tool. Half of the reward is for a call with both numbers,
half for an output with the sum."""

import json
import re
import sys

from agents import Agent, AgentsException, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)  # traces would go to OpenAI
row = json.load(sys.stdin)
calls = []


@function_tool
def add(first: int, second: int) -> int:
    """Add two numbers."""
    calls.append((first, second))
    return first + second


def example(number, first, second):
    """Return the items of a conversation that adds two numbers with the tool."""
    call = {"call_id": f"example{number}", "name": "add", "arguments": json.dumps({"first": first, "second": second})}
    return [
        {"role": "user", "content": f"What is {first} + {second}?"},
        {"type": "function_call", **call},
        {"type": "function_call_output", "call_id": call["call_id"], "output": str(first + second)},
        {"role": "assistant", "content": f"The sum is {first + second}."},
    ]


def numbers(text):
    return list(map(int, re.findall(r"\d+", text)))


model = OpenAIResponsesModel("policy", AsyncOpenAI())
agent = Agent("adder", instructions="Use the tool for each sum.", model=model, tools=[add])
items = [*example(1, 11, 12), *example(2, 35, 48), {"role": "user", "content": row["prompt"]}]
try:
    output = Runner.run_sync(agent, items, max_turns=3).final_output
except AgentsException:  # an answer that was cut, an unknown tool, too many turns: the model's fault
    output = ""
called = sorted(numbers(row["prompt"])) in [sorted(call) for call in calls]
right = int(row["answer"]) in numbers(output)
print(json.dumps({"reward": (called + right) / 2, "called": float(called), "right": float(right)}))
