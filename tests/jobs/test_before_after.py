"""The end of a run: a held-out prompt answered before and after training, and a command that can be pasted."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.data.prompt_rows import PromptRow
from rlctl.jobs import run_journal
from rlctl.jobs.before_after import answered_twice, command_to_try
from rlctl.jobs.run_journal import RunJournal
from rlctl.methods.configuration import resolve
from rlctl.report.reported_run import ReportedRun
from rlctl.report.run_report import reported
from rlctl.rollouts.validation import Validated
from rlctl.runs.directory import RunDirectory
from rlctl.telemetry.display import Display
from support.groups import group

LINES = [
    {"step": 1, "validation_at_start": {"reward_mean": 0.0}},
    {"step": 2, "validation": {"reward_mean": 0.5}},
    {"step": 4, "validation": {"reward_mean": 1.0}},
]


def sample(position: int, completion: str, reward: float | None, **more: Any) -> dict[str, Any]:
    prompt = [{"role": "system", "content": "Answer."}, {"role": "user", "content": f"What is {position} + 1?"}]
    return {"position": position, "sample": 0, "prompt": prompt, "completion": completion, "reward": reward, **more}


def run_with(path: Path, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> RunDirectory:
    run = RunDirectory(path)
    for step, rows in ((0, before), (4, after)):
        run.write_rollouts(step, rows, "validation")
    return run


def test_a_prompt_is_shown_whose_reward_moved_as_the_mean(tmp_path: Path) -> None:
    before = [sample(1, "2", 1.0), sample(2, "I  do\nnot know", 0.0, truncated=True), sample(3, "9", 0.0)]
    after = [sample(3, "4", 1.0), sample(2, "3", 1.0), sample(1, "7", 0.0)]
    assert answered_twice(run_with(tmp_path, before, after), LINES) == [
        "held-out prompt: What is 2 + 1?",
        "  before step 1  I do not know (reward 0, cut off)",
        "  after step 4   3 (reward 1)",
    ]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ([sample(1, "a", 0.0), sample(2, "b", 0.0)], [sample(1, "a", 0.0), sample(2, "c", 0.0)], "What is 2 + 1?"),
        ([sample(1, "a", None)], [sample(1, "b", None)], "What is 1 + 1?"),
        ([sample(1, "a", 0.0)], [sample(1, "a", 0.0)], "What is 1 + 1?"),
        ([sample(1, "a", 0.0)], [sample(2, "a", 0.0)], None),
        ([], [], None),
    ],
)
def test_other_prompts_are_shown_where_none_moved(
    before: list[dict[str, Any]], after: list[dict[str, Any]], said: str | None, tmp_path: Path
) -> None:
    lines = answered_twice(run_with(tmp_path, before, after), LINES)
    assert lines[:1] == ([f"held-out prompt: {said}"] if said else [])
    assert answered_twice(RunDirectory(tmp_path), LINES[:1]) == []  # one validation


def test_validations_keep_the_same_prompts_and_the_report_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the rewards are, and also after a resume, which begins a new journal."""
    monkeypatch.setattr(run_journal, "fetch", lambda ref: [f"{ref}.{number}" for number in range(8)])
    config = resolve(preset="laptop", sets=["run.log_rollouts=3"], environment={}).config
    prompts = SimpleNamespace(kind="prompt")
    job: Any = SimpleNamespace(config=config, prompts=prompts)
    rewards = {0: [0.0, 0.0, 1.0, 0.0, 0.5], 4: [1.0, 0.0, 0.0, 1.0, 0.0]}
    for step, values in rewards.items():
        with Display(steps=4) as display:
            journal = RunJournal(job, RunDirectory(tmp_path), display, (), SimpleNamespace())  # pyright: ignore[reportArgumentType]
            groups = tuple(group(position, [value], [3]) for position, value in enumerate(values))
            journal.validated(step, Validated({"reward_mean": 0.5}, 5, groups[::-1]))
    kept = {
        step: [json.loads(line) for line in (tmp_path / "validation" / f"step_{step}.jsonl").read_text().splitlines()]
        for step in rewards
    }
    assert [[row["position"] for row in rows] for rows in kept.values()] == [[0, 1, 2]] * 2
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    RunDirectory(tmp_path).write_manifest({"config": {}})
    shown: ReportedRun = reported(RunDirectory(tmp_path), "finished")
    assert [(step, [row["position"] for row in rows]) for step, rows in shown.validated] == [
        (0, [0, 1, 2]), (4, [0, 1, 2]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "values", "environment", "scorers", "words"),
    [
        ("laptop", [], None, ["task"], "eval --run-dir {run} --task reasoning-gym:chain_sum --limit 32"),
        ("laptop", ["data.name=my data.csv"], None, ["f.py:f"], "eval --run-dir {run} --task 'my data.csv' --limit 32"),
        (
            "laptop", ["data.name=a.jsonl", "validation.data.name=b.csv"], None, ["exact-match"],
            "eval --run-dir {run} --task b.csv --limit 32",
        ),
        ("laptop", [], None, ["model:dir"], "generate --run-dir {run} --prompt 'Whose is it?'"),
        ("laptop-tools", [], "calculator", None, "rollout --run-dir {run} -n 3"),
        ("laptop-sft", [], None, None, "generate --run-dir {run} --prompt 'Whose is it?'"),
        ("laptop-dpo", ["run.algorithm=rm"], None, None, "convert megatron-to-hf {run} 'my run-hf'"),
    ],
)  # fmt: skip
def test_the_command_at_the_end_can_be_pasted(
    preset: str, values: list[str], environment: str | None, scorers: list[str] | None, words: str, tmp_path: Path
) -> None:
    """A shell takes it apart into words that rlctl's own parser takes."""
    config = resolve(preset=preset, sets=values, environment={}).config
    rows = ["A long question with many words?", "Whose is it?", ""]
    prompts = SimpleNamespace(
        environment=environment, prompt_at=lambda position: PromptRow(position, "", rows[position % 3], None)
    )
    rewards = None if scorers is None else SimpleNamespace(scorers=scorers)
    job: Any = SimpleNamespace(config=config, prompts=prompts, rewards=rewards)
    run = RunDirectory(tmp_path / "my run")
    command = command_to_try(job, run)
    assert command == f"rlctl {words.format(run=shlex.quote(str(run.path)))}"
    assert "..." not in command
