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
from support.runs import cut_after, results, resume, started, wait_for_step, wait_until_gone

Here = Callable[[list[str]], subprocess.CompletedProcess[str]]


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


def mixed(folder: Path, *sources: str, weights: tuple[float, ...]) -> Path:
    """Write a configuration of a plain source and of sources with environments."""
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"Say {word}"}) + "\n" for word in "abcdef"))
    (folder / "mine.py").write_text(
        "def even(completions, **_):\n    return [float(len(text) % 2 == 0) for text in completions]\n"
    )
    environments = [
        {"weight": weight, "size": 50, "reward": {"terms": []}, "environment": json.loads(source)}
        for source, weight in zip(sources, weights[1:], strict=True)
    ]
    terms = [{"name": f"{folder}/mine.py:even"}]
    path = folder / "mix.yaml"
    rows = {"name": f"{folder}/rows.jsonl", "weight": weights[0]}
    path.write_text(json.dumps({"data": {"sources": [rows, *environments]}, "reward": {"terms": terms}}))
    return path


def on_sources(model: Path, mix: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        "rlctl", "train", "grpo", "--model", str(model), "--config", str(mix), "--gpu", "cpu", "--steps", "4",
        "--prompts", "4", "--generations", "2", "--max-new-tokens", "6", "--lr", "1e-3", "--seed", "1",
        "--run-dir", str(run_dir), "--set", "training.dp=1", "--set", "training.threads=1",
        "--set", "generation.threads=1", "--set", "run.checkpoint_every=2", "--set", "run.log_rollouts=8", *more,
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.guard), "async"])
def test_a_run_of_several_environments_is_resumed_to_bitwise_the_same(
    here: Here, tiny_llama: Path, tmp_path: Path, mode: str
) -> None:
    """Half of the prompts have one turn, a quarter `Even`'s two, a quarter `Counting`'s three, each with its reward."""
    even, counting = (json.dumps({"name": f"{TOYS}:{name}", "turns": 5}) for name in ("Even", "Counting"))
    mix = mixed(tmp_path, even, counting, weights=(2, 1, 1))
    asked = ("--async", "--max-staleness", "1", "--set", "refit.in_flight=wait") if mode == "async" else ()
    asked += ("--set", "validation.holdout=2", "--set", "validation.every=2")
    done = here(on_sources(tiny_llama, mix, tmp_path / "whole", *asked))
    assert done.returncode == 0, done.stderr
    assert here(resume(cut_after(2, tmp_path / "whole", tmp_path / "cut"))).returncode == 0
    assert results(tmp_path / "cut") == results(tmp_path / "whole")
    if mode == "sync":
        the_sources_are_tasks_of_an_evaluation(here, tiny_llama, tmp_path)
    validated = read_metrics(tmp_path / "whole" / "metrics.jsonl")[1]["validation"]
    assert validated[f"sources/{TOYS}:Counting/reward_mean"] == 1.5
    rewards = [validated[f"sources/{name}/reward_mean"] for name in (f"{tmp_path}/rows.jsonl", f"{TOYS}:Even")]
    assert validated["reward_mean"] == pytest.approx(sum([1.5, *rewards]) / 3)
    turns = {f"{tmp_path}/rows.jsonl": 1, f"{TOYS}:Even": 2, f"{TOYS}:Counting": 3}
    for line in read_metrics(tmp_path / "whole" / "metrics.jsonl"):
        rollouts = tmp_path / "whole" / "rollouts" / f"step_{line['step']}.jsonl"
        samples = [json.loads(text) for text in rollouts.read_text().splitlines()]
        assert len(samples) == line["sampled_rollouts"] == 8
        assert line["sources"].keys() == turns.keys()
        for source, found in line["sources"].items():
            own = [sample for sample in samples if sample["source"] == source]
            said = [[turn["text"] for turn in sample.get("turns", ()) if turn["role"] == "assistant"] for sample in own]
            rewards = [float(len(sample["completion"]) % 2 == 0) for sample in own]
            if turns[source] == 2:
                rewards = [float(sum(len(text) % 2 == 0 for text in texts)) for texts in said]
            if turns[source] == 3:
                rewards = [1.5] * len(own)
            assert [len(texts) or 1 for texts in said] == [turns[source]] * len(own)
            assert found["rollouts"] == len(own) == (4 if turns[source] == 1 else 2)
            assert found["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
            assert found.get("turns_mean", 1.0) == turns[source]
            assert found["response_tokens_mean"] == sum(sample["tokens"] for sample in own) / len(own)


def the_sources_are_tasks_of_an_evaluation(here: Here, model: Path, folder: Path) -> None:
    """Each source is measured in its environment, the held-out rows of the plain one, and a model beside the run."""
    file = folder / "samples.jsonl"
    words = ["rlctl", "eval", "--run-dir", str(folder / "whole"), "--model", str(model), "--gpu", "cpu"]
    done = here([*words, "--limit", "4", "--temperature", "1", "--json", "--output", str(file)])
    assert done.returncode == 0, done.stderr
    tasks = json.loads(done.stdout)["tasks"]
    plain, even, counting = f"{folder}/rows.jsonl", f"{TOYS}:Even", f"{TOYS}:Counting"
    assert [(task["task"], task["model"], task["samples"]) for task in tasks] == [
        (label, name, count)
        for label, count in ((plain, 2), (even, 4), (counting, 4))
        for name in ("whole step 4", model.name)
    ]
    samples = [one for line in file.read_text().splitlines() if "row" in (one := json.loads(line))]
    logged = [line for path in (folder / "whole" / "rollouts").iterdir() for line in path.read_text().splitlines()]
    trained = {sample["prompt"] for sample in map(json.loads, logged) if sample["source"] == plain}
    assert trained.isdisjoint(sample["prompt"] for sample in samples if sample["task"] == plain)
    for sample in samples:
        said = [turn["text"] for turn in sample.get("turns", ()) if turn["role"] == "assistant"]
        texts = {plain: [sample["completion"]], even: said, counting: said}[sample["task"]]
        assert len(texts) == {plain: 1, even: 2, counting: 3}[sample["task"]]
        scores = [0.5 if sample["task"] == counting else float(len(text) % 2 == 0) for text in texts]
        assert sample["score"] == sum(scores)
    for task in tasks:
        own = [s["score"] for s in samples if (s["task"], s["model"]) == (task["task"], task["model"])]
        assert task["metrics"]["score@1"]["value"] == pytest.approx(sum(own) / len(own))


@pytest.mark.slow
def test_a_source_that_fails_is_paused_and_the_run_goes_on(here: Here, tiny_llama: Path, tmp_path: Path) -> None:
    failing = json.dumps({"name": f"{TOYS}:Failing", "params": {"how": "raise"}, "retries": 0})
    done = here(on_sources(tiny_llama, mixed(tmp_path, failing, weights=(1, 1)), tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    lines, name = read_metrics(tmp_path / "run" / "metrics.jsonl"), f"{TOYS}:Failing"
    first = next(number for number, line in enumerate(lines) if "paused" in line)
    assert "raised KeyError: 'nothing'" in lines[first]["paused"][name]
    assert sum(line.get("failed_episodes", {}).get("raised", 0) for line in lines) > 0.05 * 10 * 4
    assert f"{name} is paused, and the run continues with the other sources" in done.stdout + done.stderr
    for number, line in enumerate(lines):
        assert line["sources"].get(name, {}).keys() == set() or number <= first
        assert (line.get("paused_sources") == [name]) == (number >= first)


@pytest.mark.slow
def test_a_run_whose_environments_all_fail_says_why_in_its_first_batch(
    here: Here, tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "down.py").write_text(
        "class Down:\n    def reset(self, row, seed):\n        return 'Begin.'\n\n"
        "    def step(self, text):\n        raise ConnectionError('the judge does not answer')\n"
    )
    done = here(
        playing(tiny_llama, tmp_path / "run", "--env", f"{tmp_path}/down.py:Down", "--set", "environment.retries=0")
    )
    assert done.returncode == 2, done.stderr
    assert "No episode of the first batch was whole: all 8 episodes failed" in done.stderr
    assert "step raised ConnectionError: the judge does not answer" in done.stderr
    assert "Traceback" not in done.stderr
