"""Runs that learn from a teacher, as a user starts them: no reward, a larger teacher, and its checks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest

from rlctl.errors import InputError
from rlctl.telemetry.metrics import read_metrics
from rlctl.tiny_models.text import write_tiny_family
from support.commands import Run
from support.runs import cut_after

LAYOUT = ("--gpu", "cpu", "--set", "training.threads=1", "--set", "generation.threads=1", "--set", "training.tp=1")
SHARED = ("--set", "teacher.tp=2", "--set", "training.dp=1", "--set", "batch.optimizer_steps=2")
"""A teacher on two ranks next to a student on one."""
LEARNS = ("--prompts", "4", "--generations", "8", "--max-new-tokens", "8", "--lr", "3e-3", "--seed", "1")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random Llama than the student, wider and deeper, that reads the same tokens."""
    wider = {"hidden_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}
    return write_tiny_family(tmp_path_factory.mktemp("models") / "tiny-teacher", seed=5, **wider)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts without answers: there is nothing to score."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one two", "three", "four five", "six")))
    return path


def command(student: Path, teacher: Path, prompts: Path, *more: str) -> list[str]:
    return [
        "train", "grpo", "--model", str(student), "--algorithm", "distillation", "--teacher", str(teacher),
        "--data", str(prompts), *LAYOUT, *LEARNS, *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_student_comes_nearer_to_a_larger_teacher_also_when_it_is_resumed(
    run_here: Run, tiny_llama: Path, teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = run_here(*command(tiny_llama, teacher, prompts, *SHARED, "--steps", "3", "--run-dir", str(run)))
    assert done.returncode == 0, done.stderr
    assert "mean reward" not in done.stdout + (run / "report.html").read_text()
    assert "step 1/3 length" in done.stderr
    assert "no reward" in run_here("rollouts", str(run)).stdout
    sample = json.loads((run / "rollouts" / "step_1.jsonl").read_text().splitlines()[0])
    assert (sample["reward"], sample["terms"]) == (None, {})
    assert (run / "logs" / "teacher-1.log").exists()
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["plan"]["teacher"]["tp"], manifest["config"]["teacher.dp"]["origin"]) == (2, "planner")

    done = run_here("train", "grpo", "--resume", "--run-dir", str(run), "--steps", "14")
    assert done.returncode == 0, done.stderr
    lines = read_metrics(run / "metrics.jsonl")
    assert len(lines) == 14
    kl = [line["teacher_kl"] for line in lines]
    assert fmean(kl[-4:]) < 0.85 * fmean(kl[:4]), kl
    assert not any("reward" in name or name == "groups_without_signal" for line in lines for name in line)
    assert all(line["seconds"]["reward"] == 0 for line in lines)
    done = run_here("train", "grpo", "--resume", "--run-dir", str(run), "--steps", "15", "--teacher", str(tiny_llama))
    assert done.returncode == 2
    assert f"{tiny_llama} is not the teacher that the run began with" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_student_that_is_resumed_goes_on_where_it_was(
    run_here: Run, tiny_llama: Path, teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    more = ("--steps", "5", "--set", "run.checkpoint_every=3", "--run-dir", str(tmp_path / "whole"))
    assert run_here(*command(tiny_llama, teacher, prompts, *SHARED, *more)).returncode == 0
    part = cut_after(3, tmp_path / "whole", tmp_path / "part")
    done = run_here("train", "grpo", "--resume", "--run-dir", str(part))
    assert done.returncode == 0, done.stderr
    whole, part = (
        [line["teacher_kl"] for line in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("whole", "part")
    )
    assert part == pytest.approx(whole, rel=1e-4)


@pytest.mark.slow
def test_the_most_likely_tokens_of_a_teacher_are_learned_next_to_rewards(
    run_here: Run, tiny_llama: Path, teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def even(completion, **row):\n    return float(len(completion) % 2 == 0)\n")
    form = [f"distillation.{key}" for key in ("loss=top-k", "top_k=16", "reward_weight=0.1", "forward_share=0.5")]
    sets = [part for one in form for part in ("--set", one)]
    more = (
        *sets,
        "--set",
        "teacher.pp=3",
        "--reward",
        f"{reward}:even",
        "--steps",
        "10",
        "--run-dir",
        str(tmp_path / "r"),
    )
    done = run_here(*command(tiny_llama, teacher, prompts, *more))
    assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "r" / "metrics.jsonl")
    loss = [line["top_kl"] for line in lines]
    assert fmean(loss[-3:]) < 0.9 * fmean(loss[:3]), loss
    assert all(0 < line["top_mass"] < 1 and line["reward_std"] > 0 for line in lines)


def dry(run_here: Run, *arguments: str) -> tuple[int, str]:
    done = run_here(*arguments, "--dry-run")
    return done.returncode, done.stdout + done.stderr


def test_a_dry_run_shows_the_teacher_and_that_nothing_is_scored(
    run_here: Run, tiny_llama: Path, teacher: Path, prompts: Path
) -> None:
    code, said = dry(run_here, *command(tiny_llama, teacher, prompts), "--generations", "1")
    assert code == 0, said
    assert f"teacher: {teacher}" in "".join(said.split("\n")).replace("      ", "")
    assert "reward: none" in said


def test_a_teacher_that_reads_other_tokens_is_refused_with_both_names(
    run_here: Run, tiny_llama: Path, teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other-tokens"
    shutil.copytree(teacher, other)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    code, said = dry(run_here, *command(tiny_llama, other, prompts))
    assert code == InputError.exit_code
    flat = " ".join(said.split())
    assert f"The teacher {other} does not read the tokens of {tiny_llama}: 2 tokens" in flat


def test_a_teacher_that_takes_shorter_texts_or_is_not_there_is_refused(
    run_here: Run, tiny_llama: Path, teacher: Path, prompts: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    shutil.copytree(teacher, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    code, said = dry(run_here, *command(tiny_llama, short, prompts), "--max-length", "128")
    assert code == 2
    assert "is more than the 64 tokens that the teacher" in " ".join(said.split())
    code, said = dry(run_here, *command(tiny_llama, tmp_path / "absent", prompts))
    assert code == 2
    assert "teacher.model" in said
    code, said = dry(run_here, *command(tiny_llama, teacher, prompts), "--set", "distillation.reward_weight=1")
    assert code == 2
    assert "No reward" in said
