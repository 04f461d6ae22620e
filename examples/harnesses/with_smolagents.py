"""An agent of smolagents solves a row with a calculator; the reward is 1 if its answer contains the row's."""

import json
import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(first: float, second: float) -> float:
    """Add two numbers.

    Args:
        first: A number.
        second: Another number.
    """
    return first + second


row = json.load(sys.stdin)
model = OpenAIServerModel(
    os.environ["OPENAI_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=4, verbosity_level=0)
print(json.dumps({"reward": float(row["answer"] in str(agent.run(row["prompt"])))}))
