"""The requests of a sampled episode as a tree, for people, and as a trajectory in Harbor's format (ATIF 1.8).

A path is a conversation that goes on without a break: the first of an episode, and one for each branch. Auxiliary
requests, which are not trained, come last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import rlctl
from rlctl.telemetry.conversation import conversation

SCHEMA = "ATIF-v1.8"
SHOWN_CALLS = 60
"""Characters of a call's arguments in a tree."""
SOURCES = {"assistant": "agent", "user": "user", "tool": "user"}
GATEWAY = "gateway/"
COUNTED = {
    "gateway/matched_tokens": "tokens matched",
    "gateway/branched_tokens": "tokens read again in branches",
    "gateway/dropped_tokens": "tokens not trained",
    "gateway/retries": "retries",
    "gateway/token_counts": "counts of tokens",
}
"""Counts of an episode (`rollouts/gateway_episodes.py`) below its tree."""
Record = Mapping[str, Any]
"""A record of a `Turn` (`data/rollouts.py`)."""


def request_tree(sample: Record) -> list[str]:
    """Return a line per request of a sample, with branches indented: when it began, how long its tools and the model
    took, its tokens, reward and calls, or why it is not trained; and a line with the counts of their tokens. Empty: no
    program made requests."""
    answers = [turn for turn in sample.get("turns") or () if turn.get("request")]
    children: dict[int | None, list[Record]] = {}
    for turn in sorted(answers, key=lambda turn: turn["request"]["number"]):
        children.setdefault(turn["request"]["parent"], []).append(turn)
    requests = {turn["request"]["number"]: turn["request"] for turn in answers}
    begins = [turn for parent, turns in children.items() if parent not in requests for turn in turns]
    lines, waiting = list[str](), [(0, turn) for turn in reversed(begins)]
    while waiting:
        depth, turn = waiting.pop()
        request = turn["request"]
        lines.append("  " * depth + _line(turn, requests.get(request["parent"])))
        following = children.get(request["number"], [])
        waiting += [(depth + (len(following) > 1), child) for child in reversed(following)]
    return [*lines, *_counted(sample)] if lines else []


def _counted(sample: Record) -> list[str]:
    """Return a line with what became of the sampled tokens."""
    counts = sample.get("counts") or {}
    texts = [f"{counts[name]:,.0f} {words}" for name, words in COUNTED.items() if counts.get(name) is not None]
    return [", ".join(texts)] if texts else []


def _line(turn: Record, parent: Record | None) -> str:
    request = turn["request"]
    waited = "" if parent is None else f" after {max(0.0, request['began_s'] - parent['ended_s']):.1f} s of tools"
    parts = [
        f"{request['number']} · at {request['began_s']:.1f} s{waited}, {request['ended_s'] - request['began_s']:.1f} s",
        f"read {request['prompt_tokens']:,} and wrote {turn['tokens']:,} tokens",
        *([f"not trained: {turn['auxiliary']}"] if turn.get("auxiliary") else []),
        *([f"reward {turn['reward']:g}"] if turn.get("reward") else []),
        *(f"{call['name']}({_cut(call['arguments'])})" for call in request["calls"]),
    ]
    return " · ".join(parts)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CALLS else f"{text[:SHOWN_CALLS]}..."


def trajectory(sample: Record, run: str) -> dict[str, Any]:
    """Return a sample as a trajectory of the format of harbor 0.26.0 (harbor/models/trajectories). Further branches and
    auxiliary requests are its embedded trajectories, whose `extra` names the request that they continue, and why they
    are not trained."""
    first, *others = paths(sample.get("turns") or _without_turns(sample))
    name = f"{run}, step {sample['step']}, prompt {sample.get('position')}, sample {sample.get('sample')}"
    kept = ("step", "position", "sample", "seed", "reward", "terms", "stop_reason", "error", "answer")
    whole = _trajectory(first, name)
    counts = {key: value for key, value in (sample.get("counts") or {}).items() if key.startswith(GATEWAY)}
    whole["final_metrics"] |= {
        "total_completion_tokens": sample.get("tokens"),
        "extra": {key: sample[key] for key in kept if sample.get(key) is not None} | counts,
    }
    branches = [
        _trajectory(path, name) | {"trajectory_id": f"branch {number}", "extra": _of_branch(path)}
        for number, path in enumerate(others, start=1)
    ]
    return whole | ({"subagent_trajectories": branches} if branches else {})


def _of_branch(path: Sequence[Record]) -> dict[str, Any]:
    answer = next(turn for turn in path if turn.get("request"))
    reason = {"not_trained": answer["auxiliary"]} if answer.get("auxiliary") else {}
    return {"continues_request": answer["request"]["parent"]} | reason


def paths(turns: Sequence[Record]) -> list[list[Record]]:
    """Return the conversations of an episode. A turn whose request does not continue the one before begins another,
    with the messages before it."""
    groups, between, last = [list[Record]()], list[Record](), None
    for turn in turns:
        between.append(turn)
        if turn["role"] != "assistant":
            continue
        request = turn.get("request")
        if request and last is not None and (request["parent"] != last or turn.get("auxiliary")):
            groups.append([])
        last = request["number"] if request else None
        groups[-1] += between
        between = []
    groups[-1] += between
    return groups


def _trajectory(turns: Sequence[Record], name: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for turn in turns:
        calls = steps[-1].get("tool_calls", []) if steps else []
        results = steps[-1].setdefault("observation", {"results": []})["results"] if calls else []
        if turn["role"] == "tool" and len(results) < len(calls):
            results.append({"source_call_id": calls[len(results)]["tool_call_id"], "content": turn["text"]})
        else:
            steps.append({"step_id": len(steps) + 1, **_step(turn)})
    for step in steps:
        if step.get("observation") == {"results": []}:
            del step["observation"]
    agent = {"name": "rlctl", "version": rlctl.__version__}
    read = sum(step.get("metrics", {}).get("prompt_tokens", 0) for step in steps)
    totals = {"total_steps": len(steps), "total_prompt_tokens": read}
    return {"schema_version": SCHEMA, "session_id": name, "agent": agent, "steps": steps, "final_metrics": totals}


def _step(turn: Record) -> dict[str, Any]:
    source = SOURCES.get(turn["role"], "system")
    if source != "agent":
        return {"source": source, "message": turn["text"]}
    request = turn.get("request") or {}
    calls = [
        {"tool_call_id": call["id"], "function_name": call["name"], "arguments": _arguments(call["arguments"])}
        for call in request.get("calls") or ()
    ]
    read = {"prompt_tokens": request["prompt_tokens"]} if request else {}
    seconds = {"began_s": request["began_s"], "ended_s": request["ended_s"]} if request else {}
    rewards = {} if turn.get("reward") is None else {"reward": turn["reward"]}
    return {
        "source": source,
        "message": turn["text"],
        **({"tool_calls": calls} if calls else {}),
        "metrics": {**read, "completion_tokens": turn["tokens"]},
        "llm_call_count": 1,
        "extra": {**seconds, **rewards},
    }


def _arguments(text: str) -> dict[str, Any]:
    """Return arguments as an object, which the format requires."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"value": value}


def _without_turns(sample: Record) -> list[Record]:
    """Return the messages of a completion without an environment."""
    *prompt, answer = conversation(sample)
    before = [{"role": m.role.replace("prompt", "user"), "text": m.text, "tokens": 0} for m in prompt]
    reward = sample.get("reward")
    return [*before, {"role": "assistant", "text": answer.text, "tokens": sample.get("tokens") or 0, "reward": reward}]
