"""The program of the environment `verifiers`: one rollout that asks the policy. It runs in a Python with `verifiers`
and without rlctl. python verifiers_program.py ENVIRONMENT '{"argument": value}'"""

import asyncio
import json
import os
import sys
from importlib import import_module
from itertools import islice

sys.path = [place for place in sys.path if os.path.abspath(place) != os.path.dirname(os.path.abspath(__file__))]
# The directory of this file has an adapter named `verifiers` too.

ADDRESS, KEY, MODEL = os.environ["OPENAI_BASE_URL"], "OPENAI_API_KEY", os.environ["OPENAI_MODEL"]
SEED = int(os.environ["EPISODE_SEED"])
TASKS = 10_000
"""Most tasks examined to find the requested one."""


async def environment(verifiers, name, arguments):
    """Play a rollout of an environment as versions below 0.3 have them."""
    made = verifiers.load_environment(name, **arguments)
    if getattr(made, "requires_group_rollouts", False):  # score_rollout of verifiers 0.2 would fail at the end
        raise SystemExit(
            f"the environment {name} has reward functions of whole groups, and a rollout is scored alone here; "
            "write them as a function of `completions` for --reward"
        )
    rows = made.get_dataset()
    client = verifiers.ClientConfig(api_key_var=KEY, api_base_url=ADDRESS)
    rollout = await made.run_rollout(rows[SEED % len(rows)], client, MODEL, {})
    if rollout.get("error"):
        raise SystemExit(f"the environment {name} failed: {rollout['error']}")
    return {**(rollout.get("metrics") or {}), "reward": rollout["reward"]}


async def agent(verifiers, name, arguments):
    """Play a task of a set as later versions have them; `harness` among the arguments names the agent's program."""
    harness = arguments.pop("harness", "null")
    tasks = list(islice(verifiers.load_taskset(verifiers.taskset_config_type(name)(id=name, **arguments)), TASKS))
    config = verifiers.AgentConfig(
        model=MODEL,
        client=verifiers.EvalClientConfig(base_url=ADDRESS, api_key_var=KEY),
        runtime=verifiers.SubprocessConfig(),
        harness={"id": harness},
    )
    async with verifiers.Agent(config) as playing:
        trace = await playing.run(tasks[SEED % len(tasks)])
    if trace.errors:
        raise SystemExit(f"the task of {name} failed: {trace.errors[0]}")
    return {"turns": trace.num_turns, "reward": trace.reward}


def main():
    play = environment
    verifiers = import_module("verifiers")
    if not hasattr(verifiers, "load_environment"):
        play, verifiers = agent, import_module("verifiers.v1")
    result = asyncio.run(play(verifiers, sys.argv[1], json.loads(sys.argv[2])))
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
