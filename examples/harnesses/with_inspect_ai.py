"""A solver of inspect-ai answers a row with a calculator; the reward is inspect-ai's score. The first argument is one
of inspect-ai's providers: openai-api/policy (chat completions), openai (responses) or anthropic (messages)."""

import json
import os
import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(first: float, second: float) -> float:
        """Add two numbers.

        Args:
            first: A number.
            second: Another number.
        """
        return first + second

    return execute


row = json.load(sys.stdin)
provider = sys.argv[1] if len(sys.argv) > 1 else "openai-api/policy"
os.environ["POLICY_BASE_URL"], os.environ["POLICY_API_KEY"] = (
    os.environ[f"OPENAI_{n}"] for n in ("BASE_URL", "API_KEY")
)
sample = Sample(row["prompt"], target=row["answer"])
task = Task(dataset=[sample], solver=[use_tools(add()), generate()], scorer=includes())
with tempfile.TemporaryDirectory() as logs:
    [log] = eval(task, model=f"{provider}/{os.environ['OPENAI_MODEL']}", log_dir=logs, display="none")
    if log.error is not None or not log.samples or not log.samples[0].scores:
        sys.exit(f"inspect-ai failed: {log.error and log.error.message}")
    reward = float(log.samples[0].scores["includes"].value == "C")
print(json.dumps({"reward": reward}))
