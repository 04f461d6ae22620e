"""What ends a run before any process is started: one sentence, the right exit code, nothing left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlctl.cli import run
from rlctl.rl import launch
from rlctl.rl.job import prepare_job
from rlctl.runs.directory import MANIFEST, RunDirectory, write_json

BROKEN = """
def raises(completion, **row):
    return 1 / 0

def words(completion, **row):
    return "good"
"""


@pytest.fixture(autouse=True)
def no_engine_is_started(monkeypatch, tmp_path):
    """Every case here must end before; a case that does not is shown by this error and not by a minute of waiting."""

    def started(*_: object) -> None:
        raise AssertionError("the run would have started")

    monkeypatch.setattr(launch, "run_grpo", started)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def files(tmp_path) -> Path:
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "questions.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "noconfig").mkdir()
    return tmp_path


def train(model: Path, *more: str) -> list[str]:
    return [
        "train", "grpo", "--model", str(model), "--gpu", "cpu", "--data", "sums.jsonl", "--reward", "exact-match",
        "--steps", "4", "--prompts", "2", "--generations", "2", "--max-new-tokens", "4", "--run-dir", "run", *more,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--data", "absent.jsonl"], 2, "absent.jsonl does not exist"),
        (["--data", "questions.jsonl"], 2, "questions.jsonl, line 1: no field 'prompt'"),
        (["--data", "empty.jsonl"], 2, "empty.jsonl has no rows"),
        (["--reward", "broken.py:raises"], 2, "division by zero"),
        (["--reward", "broken.py:words"], 2, "broken.py:words"),
        (["--reward", "broken.py:absent"], 2, "no function 'absent'"),
        (["--model", "noconfig"], 2, "noconfig has no config.json"),
        (["--max-length", "4"], 2, "--max-new-tokens 4 leaves no room"),
        (["--lr", "0"], 2, "`optimizer.lr` = 0.0 (flag --lr)"),
        (["--preset", "1gpu"], 3, "no GPU"),
        (["--gpu", "h100", "--gpus-per-node", "8"], 3, "this machine has none"),
        (["--run-dir", "sums.jsonl"], 2, "sums.jsonl is a file"),
        (["--run-dir", "noconfig/../sums.jsonl/run"], 2, "--run-dir"),
        (["--resume"], 2, "run holds no run"),
    ],
)
def test_a_mistake_is_a_sentence(files, tiny_llama, capsys, monkeypatch, more, code, said):
    monkeypatch.setattr("rlctl.planner.from_config.local_gpus", list)
    monkeypatch.setattr("rlctl.rl.job.local_gpus", list)
    if "--preset" in more:
        more = [*more, "--gpu", "auto"]
    assert run(train(tiny_llama, *more)) == code
    shown = capsys.readouterr()
    assert said in shown.err.replace("\n", " ")
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert not (files / "run").exists()


def test_a_run_that_fails_to_start_can_be_started_again_at_the_same_place(files, tiny_llama, capsys, monkeypatch):
    def fails(job, run_directory, *_: object) -> None:
        run_directory.logs.mkdir()
        (run_directory.logs / "engine-0.log").write_text("why")
        raise launch.MachineError("no engine.")

    monkeypatch.setattr(launch, "run_grpo", fails)
    for _ in range(2):
        assert run(train(tiny_llama)) == 3
        assert "no engine." in capsys.readouterr().err
        assert [path.name for path in (files / "run").iterdir()] == ["logs"]


def test_a_run_that_is_interrupted_while_it_starts_leaves_nothing(files, tiny_llama, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run_grpo", interrupted)
    assert run(train(tiny_llama)) == 130
    assert not (files / "run").exists()


def begun(arguments: list[str], path: Path) -> None:
    """The directory of a run that was begun with `arguments` and finished two steps."""
    from rlctl.commands import options

    flags = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    resolved = options.resolve_config(
        model=flags["--model"], gpu="cpu", data="sums.jsonl", reward=["exact-match"], steps=4, prompts=2,
        generations=2, max_new_tokens=4, run_dir=flags["--run-dir"],
    )  # fmt: skip
    directory = RunDirectory(path)
    directory.create()
    directory.write_manifest(prepare_job(resolved).manifest())
    with directory.checkpoint(2, {}):
        pass
    directory.release()


def resumed(monkeypatch) -> list[tuple]:
    """The calls with which a resumed run would start."""
    calls: list[tuple] = []

    def start(job, run_directory, display, stop, checkpoint) -> launch.RunSummary:
        calls.append((job, checkpoint))
        return launch.RunSummary(str(run_directory.path), 4, False, 0.0, 0.5, 1.0, None)

    monkeypatch.setattr(launch, "run_grpo", start)
    return calls


def test_a_resume_takes_what_may_change_and_refuses_what_may_not(files, tiny_llama, capsys, monkeypatch):
    begun(train(tiny_llama), files / "run")
    calls = resumed(monkeypatch)
    resume = ["train", "grpo", "--resume", "--run-dir", "run"]
    assert run([*resume, "--steps", "6"]) == 0
    assert "mean reward 0.000 -> 0.500" in capsys.readouterr().out
    job, checkpoint = calls[0]
    assert (job.config.grpo.steps, checkpoint.step, job.config.generation.max_new_tokens) == (6, 2, 4)
    for more, said in (
        (["--lr", "0.5"], "`optimizer.lr` = 0.5 (flag --lr), but the run was begun with 1e-06"),
        (["--seed", "7"], "`run.seed` = 7"),
        (["--steps", "2"], "has finished its 2 steps"),
        (["--set", "grpo.clip_low=0.3"], "`grpo.clip_low` = 0.3 (--set)"),
    ):
        assert run([*resume, *more]) == 2
        assert said in capsys.readouterr().err
    assert len(calls) == 1


def test_a_resume_knows_model_and_data_by_content(files, tiny_llama, tiny_llama_tied, capsys, monkeypatch):
    begun(train(tiny_llama), files / "run")
    calls = resumed(monkeypatch)
    resume = ["train", "grpo", "--resume", "--run-dir", "run"]
    os.symlink(tiny_llama, files / "moved")
    assert run([*resume, "--model", "moved"]) == 0
    assert calls[0][0].config.model.name == "moved"
    assert run([*resume, "--model", str(tiny_llama_tied)]) == 2
    assert "does not hold the model that the run began with" in capsys.readouterr().err
    (files / "sums.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    assert run([*resume, "--model", str(tiny_llama)]) == 2
    assert "--data is not what the run began with (rows, sha256 changed)" in capsys.readouterr().err


def test_a_damaged_run_directory_is_a_sentence(files, capsys):
    (files / "run").mkdir()
    write_json(files / "run" / MANIFEST, {"config": {"grpo.stps": {"value": 1, "origin": "--set"}}})
    for content, said in ((None, "unknown key `grpo.stps`"), ("{", "cannot be read"), ("[]", "is not the manifest")):
        if content is not None:
            (files / "run" / MANIFEST).write_text(content)
        assert run(["train", "grpo", "--resume", "--run-dir", "run"]) == 2
        assert said in capsys.readouterr().err
