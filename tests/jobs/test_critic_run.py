"""Runs of PPO as a user starts them: a critic learns next to the policy, warms up, is saved and resumed."""

from __future__ import annotations

import json

import pytest

from rlctl.telemetry.metrics import read_metrics
from support.runs import command, cut_after, results, resume, same_run

pytestmark = pytest.mark.slow
PPO = (
    "--algorithm", "ppo", "--prompts", "8", "--generations", "1", "--set", "batch.optimizer_steps=2",
    "--set", "critic.lr=3e-3", "--set", "loss.kl_coefficient=0.01",
)  # fmt: skip


def test_a_critic_learns_and_a_resumed_run_is_bitwise_the_same(run_here, tiny_llama, tmp_path):
    """With one rollout of each prompt, and both models in host memory while they wait."""
    whole, more = tmp_path / "whole", ("--set", "training.offload=true", "--set", "critic.warmup_steps=1")
    done = run_here(*command(tiny_llama, whole, *PPO, *more)[1:])
    assert done.returncode == 0, done.stderr
    cut = cut_after(2, whole, tmp_path / "cut")
    done = run_here(*resume(cut)[1:])
    assert done.returncode == 0, done.stderr
    assert results(cut) == results(whole)
    lines = read_metrics(cut / "metrics.jsonl")
    assert ["loss" in line for line in lines] == [False, True, True, True]  # the first step is the critic's alone
    critics = [line["critic"] for line in lines]
    assert critics[0]["values_mean"] == 0
    assert critics[-1]["loss"] < critics[0]["loss"]
    assert all(line["grad_norm"] > 0 for line in lines[1:])
    assert all(line["seconds"]["critic"] > 0 for line in lines)
    assert list((whole / "checkpoints" / "step_4" / "policy" / "critic").glob("*.distcp"))
    config = json.loads((cut / "manifest.json").read_text())["config"]
    assert config["advantage.baseline"] == {"value": "critic", "origin": "algorithm ppo"}


def test_two_ranks_compute_the_same_run_and_either_layout_goes_on(run_here, tiny_llama, tmp_path):
    whole, other = tmp_path / "whole", tmp_path / "other"
    done = run_here(*command(tiny_llama, whole, *PPO)[1:])
    assert done.returncode == 0, done.stderr
    done = run_here(*command(tiny_llama, other, *PPO, "--set", "training.tp=2", "--steps", "2")[1:])
    assert done.returncode == 0, done.stderr
    done = run_here(*resume(other, "--steps", "4", "--set", "training.tp=1", "--set", "training.pp=2")[1:])
    assert done.returncode == 0, done.stderr
    same_run(results(whole), results(other))
    done = run_here("generate", "--run-dir", str(other), "--prompt", "1 + 1", "--max-new-tokens", "2", "--gpu", "cpu")
    assert done.returncode == 0, done.stderr  # the critic is not needed for it


def test_an_asynchronous_run_has_a_critic_too(run_here, tiny_llama, tmp_path):
    done = run_here(*command(tiny_llama, tmp_path / "run", *PPO, "--async", "--max-staleness", "1")[1:])
    assert done.returncode == 0, done.stderr
    lines = results(tmp_path / "run")
    assert [line["staleness"]["max"] for line in lines] == [0, 1, 1, 1]
    assert all("explained_variance" in line["critic"] for line in lines)
