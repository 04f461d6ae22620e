"""The tree of an episode's requests, and its export as a trajectory of Harbor's format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rlctl.data.rollouts import ModelRequest, Turn
from rlctl.report.page import _sample
from rlctl.runs.request_tree import request_tree, trajectory
from rlctl.runs.samples import sample_text
from support.commands import rlctl

# `Trajectory.model_json_schema()` of harbor 0.26.0 (Apache License 2.0), harbor/models/trajectories/trajectory.py.
SCHEMA = json.loads((Path(__file__).parents[1] / "support" / "atif_1.8.schema.json").read_text())
CALL = {"id": "call00000", "name": "bash", "arguments": '{"command": "ls"}'}


def asked(number: int, parent: int | None, began_s: float, ended_s: float, *calls: dict[str, str]) -> Turn:
    return Turn(
        "assistant", f"answer {number}", 10 * number, 0.0, ModelRequest(number, parent, began_s, ended_s, 100, calls)
    )


TURNS = [
    Turn("system", "You help.", 100, None),
    Turn("user", "Look.", 0, None),
    asked(1, None, 0.0, 1.0, CALL),
    Turn("tool", "a.txt", 5, None),
    asked(2, 1, 3.5, 4.0),
    Turn("user", "Other agent.", 5, None),
    asked(3, 1, 3.5, 5.0, CALL | {"arguments": "not JSON"}),
    Turn("tool", "Error", 5, None),
    asked(4, 3, 5.25, 6.0),
    Turn("user", "A new conversation.", 9, None),
    asked(5, None, 6.0, 7.0),
]


@pytest.fixture
def sample() -> dict[str, Any]:
    turns = json.loads(json.dumps([turn.record() for turn in TURNS]))
    messages = [{"role": turn.role, "content": turn.text} for turn in TURNS]
    turns[-1]["reward"] = 1.0
    title = [Turn("user", "A title?", 8, None), asked(6, None, 0.1, 0.2)]
    turns += json.loads(json.dumps([replace(turn, auxiliary="title").record() for turn in title]))
    return {
        "step": 3, "position": 7, "sample": 0, "seed": 1, "prompt": "Look.", "completion": "answer 5", "reward": 1.0,
        "terms": {"environment": 1.0}, "tokens": 150, "stop_reason": "done", "turns": turns, "messages": messages,
        "counts": {"asked": 2.0, "gateway/matched_tokens": 1080.0, "gateway/dropped_tokens": 60.0},
    }  # fmt: skip


def test_requests_are_a_tree_with_times_tokens_reward_and_calls(sample: dict[str, Any]) -> None:
    tree = request_tree(sample)
    assert tree == [
        '1 · at 0.0 s, 1.0 s · read 100 and wrote 10 tokens · bash({"command": "ls"})',
        "  2 · at 3.5 s after 2.5 s of tools, 0.5 s · read 100 and wrote 20 tokens",
        "  3 · at 3.5 s after 2.5 s of tools, 1.5 s · read 100 and wrote 30 tokens · bash(not JSON)",
        "  4 · at 5.2 s after 0.2 s of tools, 0.8 s · read 100 and wrote 40 tokens",
        "5 · at 6.0 s, 1.0 s · read 100 and wrote 50 tokens · reward 1",
        "6 · at 0.1 s, 0.1 s · read 100 and wrote 60 tokens · not trained: title",
        "1,080 tokens matched, 60 tokens not trained",
    ]
    assert f"  requests\n    {tree[0]}\n" in sample_text(sample)
    assert _sample(sample)["messages"][0] == ("said", "requests", "\n".join(tree))
    plain = {**sample, "turns": [Turn("assistant", "a", 1, 0.0).record()]}
    assert request_tree(plain) == []
    assert Turn.of(sample["turns"][2]).record() == TURNS[2].record() | {"request": sample["turns"][2]["request"]}


def test_an_exported_episode_is_a_trajectory_of_harbor(sample: dict[str, Any]) -> None:
    made = trajectory(sample, "my-run")
    jsonschema.validate(made, SCHEMA)
    assert [(step["source"], step["message"]) for step in made["steps"]] == [
        ("system", "You help."), ("user", "Look."), ("agent", "answer 1"), ("agent", "answer 2"),
    ]  # fmt: skip
    called = made["steps"][2]
    assert called["tool_calls"] == [
        {"tool_call_id": "call00000", "function_name": "bash", "arguments": {"command": "ls"}}
    ]
    assert called["observation"] == {"results": [{"source_call_id": "call00000", "content": "a.txt"}]}
    assert called["metrics"] == {"prompt_tokens": 100, "completion_tokens": 10}
    assert made["final_metrics"]["extra"]["reward"] == 1.0
    assert made["final_metrics"]["extra"]["gateway/dropped_tokens"] == 60
    branch, other, title = made["subagent_trajectories"]
    assert [step["message"] for step in title["steps"]] == ["A title?", "answer 6"]
    assert title["extra"] == {"continues_request": None, "not_trained": "title"}
    assert [step["message"] for step in branch["steps"]] == ["Other agent.", "answer 3", "answer 4"]
    assert branch["steps"][1]["tool_calls"][0]["arguments"] == {"value": "not JSON"}
    assert (branch["extra"], other["extra"]) == ({"continues_request": 1}, {"continues_request": None})
    # What the schema does not say, and the package checks: numbers in order, and distinct names.
    for one in (made, branch, other, title):
        assert [step["step_id"] for step in one["steps"]] == list(range(1, len(one["steps"]) + 1))
    assert len({branch["trajectory_id"], other["trajectory_id"], title["trajectory_id"]}) == 3


def test_samples_are_written_as_trajectories(
    sample: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "manifest.json").write_text("{}")
    plain = {"step": 3, "prompt": "2 + 2?", "completion": "4", "reward": None, "position": 8, "sample": 1, "tokens": 1}
    lines = "".join(json.dumps(one) + "\n" for one in (sample, plain))
    (tmp_path / "run" / "rollouts" / "step_3.jsonl").write_text(lines)
    code, out, _ = rlctl(capsys, "samples", str(tmp_path / "run"), "--atif", str(tmp_path / "made"), "--json")
    assert code == 0
    assert len(json.loads(out)["rollouts"]) == 2
    written = sorted((tmp_path / "made").iterdir())
    assert [path.name for path in written] == ["step_3_prompt_7_sample_0.json", "step_3_prompt_8_sample_1.json"]
    for path in written:
        jsonschema.validate(json.loads(path.read_text()), SCHEMA)
    (tmp_path / "file").write_text("")
    code, _, err = rlctl(capsys, "samples", str(tmp_path / "run"), "--atif", str(tmp_path / "file" / "made"))
    assert (code, "--atif" in err) == (2, True)
