"""The journal of a run: which rollouts it keeps, with what, and when it shows the best and the worst."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlctl.checkpoints.locations import NAMED
from rlctl.checkpoints.model_files import ModelFiles
from rlctl.errors import InputError, MachineError
from rlctl.jobs import run_journal
from rlctl.jobs.run_journal import RunJournal
from rlctl.jobs.run_summary import RunSummary, how_to_resume
from rlctl.jobs.run_weights import converted, crowded, load_newest
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.planner.inputs.cluster import GIB, make_cluster
from rlctl.planner.inputs.request import Workload
from rlctl.refit.records import RefitReport
from rlctl.rollouts.source import RolloutBatch
from rlctl.runs.directory import RunDirectory
from rlctl.telemetry.display import Display
from support.catalog_models import make_plan, model
from support.groups import group

STEP = {"seconds": {"total": 1.0}}


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Takes five steps with these keys of `run`; returns what was said."""
    monkeypatch.setattr(run_journal, "LiveReport", lambda *_: SimpleNamespace(step=lambda: None))
    monkeypatch.setattr(run_journal, "fetch", lambda handle: [f"{handle}.{sample}" for sample in range(2)])

    def take(**keys: Any) -> str:
        config = RlConfig.model_validate({"run": {"steps": 5, **keys}})
        machine: Any = SimpleNamespace(metrics=dict, losses=dict)
        encoder = SimpleNamespace(text=lambda row: f"<user>{row.prompt}</user>")
        job: Any = SimpleNamespace(config=config, prompts=encoder)
        path = tmp_path / "stderr"
        with path.open("w") as stream, Display(steps=5, stream=stream) as display:
            journal = RunJournal(job, RunDirectory(tmp_path), display, (), machine)
            for step in range(1, 6):
                journal.keep_rollouts(step, RolloutBatch((group(1, [0.5, 1.0], [3, 3]), group(2, [0.0, 0.5], [3, 3]))))
                journal.log(step, STEP)
        return path.read_text()

    return take


def test_samples_hold_step_rendered_prompt_and_terms(steps: Any, tmp_path: Path) -> None:
    said = steps(log_rollouts=3)
    assert "best" not in said  # nobody looks on, and nobody has asked
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "step_4.jsonl").read_text().splitlines()]
    assert [(row["step"], row["reward"], row["completion"]) for row in rows] == [
        (4, 1.0, "texts1.1"), (4, 0.0, "texts2.0"), (4, 0.5, "texts1.0"),
    ]  # fmt: skip
    assert rows[0]["rendered"] == "<user>question 1</user>"
    assert rows[0]["terms"] == {}


def test_the_best_and_the_worst_are_shown_every_so_many_steps(steps: Any, tmp_path: Path) -> None:
    lines = steps(show_samples=2, log_rollouts=0).splitlines()
    kinds = [next(kind for kind in ("step", "best", "worst") if f" {kind} " in line) for line in lines]
    assert kinds == ["step", "best", "worst", "step"] * 2 + ["step", "best", "worst"]
    assert "best 1.000  question 1 -> texts1.1" in lines[1]
    assert not (tmp_path / "rollouts").exists()


def test_a_text_part_that_other_nodes_may_not_see_ends_a_run_that_converts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    text = ModelFiles(tmp_path / "home" / "rlctl" / "gemma-text", "gemma", origin=tmp_path / "gemma")
    plan, other = SimpleNamespace(cluster=SimpleNamespace(nodes=2)), ModelFiles(tmp_path / "llama", "llama")
    for source, teacher in ((text, None), (other, SimpleNamespace(files=text))):
        job: Any = SimpleNamespace(converts=False, base_model=source, teacher=teacher, further_teachers=(), plan=plan)
        with Display(steps=1) as display, pytest.raises(MachineError, match="gemma: other nodes may not see"):
            converted(job, display)


def test_the_end_of_a_run_has_a_colour_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    def first(interrupted: bool) -> str:
        by = {"stopped_by": "SIGTERM"} if interrupted else {}
        return RunSummary("runs/a", 3, interrupted, None, (), 4.0, "runs/a/step_3", **by).text().splitlines()[0]

    assert first(False) == "\x1b[32mfinished\x1b[0m step 3 in 4 s"
    assert first(True) == "\x1b[33mstopped by SIGTERM after\x1b[0m step 3 in 4 s, saved"


def test_a_manifest_whose_changes_the_checkpoint_cannot_be_loaded_with_does_not_replace_the_stored_one(
    tmp_path: Path,
) -> None:
    def loads(_: Path) -> None:
        raise InputError("the checkpoint holds no critic.")

    run = RunDirectory(tmp_path)
    run.write_manifest({"config": {}, "command": "before"})
    new = run.new_checkpoint(2)
    new.begin()
    new.commit({"version": 2, "source": {}, "metrics": {}, "files": {"shard": "0"}})
    policy: Any = SimpleNamespace(damaged_files=lambda *_: [], load_saved=loads)
    with Display(steps=3) as display:
        with pytest.raises(InputError):
            load_newest(run, policy, display, {"config": {}, "command": "after"})
        assert run.manifest()["command"] == "before"
        policy.load_saved = lambda _: None
        load_newest(run, policy, display, {"config": {}, "command": "after"})
        assert run.manifest()["command"] == "after"


def test_commands_to_go_on_with_can_be_copied(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a run's")
    run.path.mkdir()
    new = run.new_checkpoint(2)
    new.begin()
    new.commit({"version": 2, "source": {}, "metrics": {}, "files": {"shard": "0"}})
    told = [how_to_resume(run), *RunSummary(str(run.path), 3, True, None, (), 4.0, "c", 0).text().splitlines()]
    commands = [shlex.split(line.partition(": ")[2]) for line in told if ": rlctl" in line]
    assert [words[words.index("--run-dir") + 1] for words in commands] == [str(run.path)] * 2


def test_it_is_a_warning_if_most_of_the_weights_were_not_compared() -> None:
    def said(**more: Any) -> list[str]:
        lines: list[str] = []
        report = RefitReport(1, {}, 1000, 0, verified=12, **more)
        RunJournal.refitted(cast(Any, SimpleNamespace(say=lines.append)), report)
        return lines

    reason = "is kept in the order of the kernel TrtLlm"
    few, most = (said(unread=48, unread_bytes=size, unread_why=reason) for size in (400, 900))
    assert len(few) == len(said()) == 1
    assert most[1:] == [f"warning: 90% of the weights in the engine were not compared with the policy's: {reason}."]


def test_a_plan_is_checked_with_what_sleeping_processes_really_hold() -> None:
    plan = make_plan(model("Qwen3-8B"), make_cluster("h100", 1, 8), Workload())
    planned = int(plan.memory["generation"].parts["policy asleep"] + plan.memory["training"].parts["engine asleep"])
    size = int(79.2 * GIB)
    assert crowded(plan, (planned, size), "") == ""
    left = int(size - plan.memory["training"].total)
    assert crowded(plan, (planned + left - GIB, size), "") == ""
    assert "with --flag (no CUDA" in crowded(plan, (planned + left + GIB, size), "--flag")
