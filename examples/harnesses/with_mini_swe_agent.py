"""mini-swe-agent solves a row with its bash tool; the reward is 1 if the submission contains the row's answer."""

import json
import os
import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

SYSTEM = "You solve tasks with bash commands."
TASK = """{{task}}

When you know the answer, run one command that prints COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT and then it."""

row = json.load(sys.stdin)
model = LitellmModel(
    model_name=f"openai/{os.environ['OPENAI_MODEL']}",
    model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]},
    cost_tracking="ignore_errors",  # the policy has no price
)
agent = DefaultAgent(model, LocalEnvironment(), system_template=SYSTEM, instance_template=TASK)
end = agent.run(row["prompt"])
print(json.dumps({"reward": float(row["answer"] in end["submission"])}))
