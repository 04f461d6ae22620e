"""The samples of rollouts that a run keeps, and `rlctl samples`, which shows them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl import cli
from rlctl.runs.directory import RunDirectory
from rlctl.runs.samples import chosen, one_line, read_samples, sample_text
from support.commands import rlctl
from support.groups import group


def places(count: int, *rewards: list[float]) -> list[tuple[int, int]]:
    groups = [group(10 * (number + 1), values, [3] * len(values)) for number, values in enumerate(rewards)]
    return [(rollout.position, rollout.sample) for _, rollout in chosen(groups, count)]


def test_samples_are_of_different_prompts_the_best_and_the_worst_first() -> None:
    rewards = [[0.5, 0.0], [0.5, 1.0], [0.5, 0.5], [-1.0, 0.5]]
    assert places(4, *rewards) == [(20, 1), (40, 0), (10, 0), (30, 0)]
    assert places(6, *rewards)[4:] == [(10, 1), (20, 0)]
    assert places(99, *rewards).__len__() == len(set(places(99, *rewards))) == 8
    assert places(0, *rewards) == []


def test_a_single_prompt_has_its_own_best_and_worst() -> None:
    assert places(2, [0.5, 1.0, 0.0]) == [(10, 1), (10, 2)]
    assert places(3, [1.0, 1.0]) == [(10, 0), (10, 1)]


def row(step: int, reward: float, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "prompt": "3 + 4?", "rendered": "<user>3 + 4?</user>\n", "answer": "7",
        "completion": f"It is {reward}.", "reward": reward, "terms": {"task": reward, "format": 0.5}, "right": True,
        "tokens": 6, "truncated": False, "position": 3, "sample": 1, "seed": 1, **more,
    }  # fmt: skip


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "rollouts").mkdir()
    for step, rewards in ((2, [0.25, 0.75]), (10, [0.5, 0.0])):
        lines = [json.dumps(row(step, reward)) for reward in rewards]
        (tmp_path / "rollouts" / f"step_{step}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[tuple[int, float]]:
    code, out, _ = rlctl(capsys, "samples", *arguments, "--json")
    assert code == 0
    return [(one["step"], one["reward"]) for one in json.loads(out)["rollouts"]]


def test_samples_shows_the_last_step_or_the_one_asked_for(run_directory: Path, capsys: Any) -> None:
    run = str(run_directory)
    assert shown(capsys, run) == [(10, 0.5), (10, 0.0)]
    assert shown(capsys, run, "--step", "2", "-n", "1") == [(2, 0.25)]
    assert shown(capsys, run, "--best", "-n", "2") == [(2, 0.75), (10, 0.5)]
    assert shown(capsys, run, "--best", "--worst", "-n", "1") == [(2, 0.75), (10, 0.0)]
    assert cli.run(["rollouts", run, "--step", "2"]) == 0  # its earlier name
    text = capsys.readouterr().out
    for part in ("step 2 · prompt 3, sample 1 · reward 0.250 (task 0.250, format 0.500) · right · 6 tokens",
                 "    <user>3 + 4?</user>", "    It is 0.75.", "    7"):  # fmt: skip
        assert part in text, text


def test_samples_names_what_is_not_there(run_directory: Path, tmp_path: Path, capsys: Any) -> None:
    for arguments, words in (
        ([str(run_directory), "--step", "3"], "It kept some of steps 2 to 10"),
        ([str(tmp_path / "rollouts")], "is not the directory of a run"),
    ):
        assert cli.run(["samples", *arguments]) == 2
        assert words in capsys.readouterr().err
    (run_directory / "rollouts" / "step_2.jsonl").write_text("{")
    assert cli.run(["samples", str(run_directory), "--step", "2"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_completion_may_hold_any_end_of_a_line(run_directory: Path, capsys: Any) -> None:
    r"""JSON escapes \n and \r alone; Unicode knows more, and a model may write each of them."""
    RunDirectory(run_directory).write_rollouts(11, [row(11, 1.0, completion="a\u2028b\u0085c\x0bd\re\nf")])
    assert shown(capsys, str(run_directory)) == [(11, 1.0)]


def test_rollouts_that_no_run_wrote_are_named(run_directory: Path, capsys: Any) -> None:
    (run_directory / "rollouts" / "step_11.jsonl").write_text('{"reward": "high"}')
    assert cli.run(["samples", str(run_directory)]) == 2
    assert "step_11.jsonl cannot be read: a reward is not a number" in capsys.readouterr().err


def test_a_sample_of_messages_is_read_too() -> None:
    messages = [{"role": "user", "content": "3 + 4?"}]
    assert "  user\n    3 + 4?" in sample_text(row(1, 1.0, prompt=messages, rendered=None))
    line = one_line(row(1, 1.0, prompt=messages, completion="word " * 50), "best", 60)
    assert line.startswith("   best 1.000  3 + 4? -> word")
    assert line.endswith("...")
    assert len(line) <= 60


def test_samples_of_a_run_without_rewards_say_so(run_directory: Path) -> None:
    none = row(1, 0.0) | {"reward": None, "terms": {}}
    assert "no reward" in sample_text(none)
    assert one_line(none, "best", 80).startswith("sample  3 + 4?")
    unscored = [replace(one, reward=None) for one in group(1, [0.0, 0.0], [3, 3]).rollouts]
    groups = [replace(group(1, [0.0, 0.0], [3, 3]), rollouts=tuple(unscored))]
    assert len(chosen(groups, 2)) == 2
    (run_directory / "rollouts" / "step_10.jsonl").write_text(json.dumps(none) + "\n")
    assert [one["reward"] for one in read_samples(run_directory, 10)] == [None]
