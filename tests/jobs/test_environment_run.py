"""Runs whose rollouts have turns: killed in the middle of episodes, asynchronous, validated, and looked at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlctl.jobs.episodes_job import episodes_job
from rlctl.methods.configuration import resolve
from rlctl.telemetry.metrics import read_metrics
from support.commands import Run
from support.crew import TOYS, playing
from support.runs import results, resume, started, wait_for_step, wait_until_gone

Here = Callable[[list[str]], subprocess.CompletedProcess[str]]


@pytest.mark.guard
@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_episodes_goes_on_as_if_it_had_not_been(
    here: Here, tiny_llama: Path, tmp_path: Path
) -> None:
    hold, log, validated = tmp_path / "hold", tmp_path / "log", ("--set", "validation.every=2")
    of_both = (*validated, "--set", "validation.max_prompts=2", "--set", f"environment.params.hold={hold}")
    done = here(playing(tiny_llama, tmp_path / "whole", *of_both))
    assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert all(line["turns_max"] == 2 and line["environment"] == {"said": 2.0} for line in lines)
    assert all(sum(line["stop_reasons"].values()) == 8 for line in lines)
    assert all(set(line["stop_reasons"]) <= {"done", "length"} for line in lines)
    assert all(line["logprob_diff"]["max"] < 1e-3 for line in lines)
    assert "reward_mean" in lines[1]["validation"]
    with started(playing(tiny_llama, tmp_path / "cut", *of_both), log) as process:
        wait_for_step(process, tmp_path / "cut", 2, log)
        hold.touch()  # the third step's episodes wait for their environments
        family = process.family()
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        wait_until_gone(family)
    hold.unlink()
    done = here(resume(tmp_path / "cut"))
    assert done.returncode == 0, done.stderr
    assert results(tmp_path / "cut") == results(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["wait", "turns", "keep"])
def test_episodes_go_on_while_the_policy_trains(here: Here, tiny_llama: Path, tmp_path: Path, in_flight: str) -> None:
    flags = ("--async", "--max-staleness", "1", "--backend", "dtensor", "--set", "training.tp=1")
    flags += ("--set", "environment.params.seconds=2")
    # Where tools take long, the plan has new weights wait for turns alone.
    flags += ("--set", "environment.tool_s=100" if in_flight == "turns" else f"refit.in_flight={in_flight}")
    done = here(playing(tiny_llama, tmp_path / "run", *flags))
    assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["turns_mean"] for line in lines] == [2.0] * 4
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["config"]["refit.in_flight"]["value"] == in_flight
    positions = [first for line in lines for one in line["positions"] for first in range(one[0], one[-1] + 1)]
    assert sorted(positions) == list(range(8))
    sample = json.loads((tmp_path / "run" / "rollouts" / "step_1.jsonl").read_text().splitlines()[0])
    assert [turn["role"] for turn in sample["turns"]] == ["user", "assistant", "user", "assistant"]
    assert sample["reward"] == sum(turn["reward"] for turn in sample["turns"] if turn["role"] == "assistant")


def test_episodes_are_opened_without_data(tiny_llama: Path) -> None:
    """An environment makes its own prompts, as in training."""
    flags = {"environment.name": f"{TOYS}:Even", "model.name": str(tiny_llama), "cluster.gpus_per_node": 0}
    job = episodes_job(resolve(environment={}, flags=flags), None, 3, False, print)
    assert job.prompts.environment is not None
    assert any("Even" in line for line in job.describe())


@pytest.mark.slow
def test_episodes_are_looked_at_without_training(run_here: Run, tiny_llama: Path) -> None:
    words = (
        "rollout",
        "--env",
        f"{TOYS}:Even",
        "--model",
        str(tiny_llama),
        "--gpu",
        "cpu",
        "-n",
        "3",
        "--max-new-tokens",
        "6",
    )
    done = run_here(*words, "--check", "--json")
    assert done.returncode == 0, done.stderr
    episodes = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["episode"] for one in episodes] == [0, 1, 2]
    for one in episodes:
        assert one["stop_reason"] == "length"
        assert [turn["role"] for turn in one["turns"]] == ["user", "assistant", "user", "assistant"]
        assert one["logprob_diff"]["mean"] <= one["logprob_diff"]["max"] < 1e-3
        assert one["reward"] == sum(turn["reward"] or 0 for turn in one["turns"])
    done = run_here(*words)
    assert "ended by length" in done.stdout
    command = f"environment.params.command={sys.executable} {TOYS.with_name('toy_program.py')} chat"
    asking = ["program" if one == f"{TOYS}:Even" else one for one in words]
    done = run_here(*asking, "--set", command, "--check", "--json")
    assert done.returncode == 0, done.stderr
    for one in map(json.loads, done.stdout.splitlines()):  # of two conversations, and so two contexts
        assert sum(turn["reward"] is not None for turn in one["turns"]) == one["counts"]["asked"] == 3
        assert one["logprob_diff"]["mean"] <= one["logprob_diff"]["max"] < 1e-3


@pytest.mark.slow
def test_an_environment_is_a_task_of_an_evaluation(run_here: Run, tiny_llama: Path, tmp_path: Path) -> None:
    words = ("eval", "--env", f"{TOYS}:Even", "--model", str(tiny_llama), "--gpu", "cpu", "--limit", "4", "--n", "2")
    file = tmp_path / "samples.jsonl"
    done = run_here(*words, "--max-new-tokens", "6", "--temperature", "1", "--output", str(file), "--json")
    assert done.returncode == 0, done.stderr
    samples = [one for line in file.read_text().splitlines() if "row" in (one := json.loads(line))]
    assert len(samples) == 8
    rewards = [sum(turn["reward"] or 0 for turn in one["turns"]) for one in samples]
    assert rewards == [one["score"] for one in samples]
    (found,) = json.loads(done.stdout)["tasks"]
    assert found["metrics"]["mean@2"]["value"] == pytest.approx(sum(reward >= 1 for reward in rewards) / 8)
