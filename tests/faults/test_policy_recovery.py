"""A policy that loses a rank, or its host, in a run: the run goes on, and computes what an undisturbed one does."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlctl.cluster.memory_files import SHARED_MEMORY
from rlctl.telemetry.metrics import read_metrics
from support.runs import (
    LIMIT_S,
    command,
    finish,
    layout,
    results,
    started,
    wait_for,
    wait_for_step,
    wait_until_gone,
    worker_name,
)

OF_RECOVERY = ("policy_restarts", "policy_failure", "lost_ranks")
HOLD = """
import os, time
def even(completion, answer, prompt, **row):
    time.sleep(0.1)
    return float(len(completion) % 2 == 0)
"""


def slow_run(model: Path, run_dir: Path, *more: str) -> list[str]:
    """A run whose steps are long enough to be cut off in each part."""
    reward = model.parent / "held.py"
    reward.write_text(HOLD)
    arguments = command(model, run_dir, "--steps", "6", *more)
    arguments[arguments.index("--reward", arguments.index("--reward") + 1) + 1] = f"{reward}:even"
    return arguments


def rank(run: psutil.Popen, run_dir: Path, name: str) -> psutil.Process:
    return next(one for one in run.family() if worker_name(one, run_dir) == name and one.is_running())


def without_recovery(run_dir: Path) -> list[dict]:
    return [{name: value for name, value in line.items() if name not in OF_RECOVERY} for line in results(run_dir)]


def restarts(run_dir: Path) -> int:
    return sum(line.get("policy_restarts", 0) for line in read_metrics(run_dir / "metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "sizes", "more"),
    [
        pytest.param("dtensor", ("tp=1", "dp=1"), (), id="dtensor"),
        pytest.param("megatron", ("tp=2", "dp=1"), ("--async", "--set", "refit.in_flight=wait"), id="megatron-async"),
    ],
)
def test_a_lost_policy_rank_is_started_again_and_the_run_computes_the_same(tiny_llama, tmp_path, backend, sizes, more):
    """Two ranks die, one before there is a checkpoint and one after."""
    more = ("--backend", backend, *layout(*sizes), "--set", "run.checkpoint_every=3", *more)
    whole = finish(slow_run(tiny_llama, tmp_path / "whole", *more))
    assert whole.returncode == 0, whole.stderr
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with started(slow_run(tiny_llama, run_dir, *more), log) as run:
        wait_for_step(run, run_dir, 1, log)
        engine = rank(run, run_dir, "engine-0")
        rank(run, run_dir, "policy-0").kill()
        wait_for_step(run, run_dir, 4, log)
        rank(run, run_dir, "policy-0").kill()
        assert engine.is_running()
        assert run.wait(LIMIT_S) == 0, log.read_text()
    said = log.read_text()
    assert "Traceback" not in said
    assert said.count("policy rank 0") >= 2
    assert restarts(run_dir) == 2
    assert without_recovery(run_dir) == results(tmp_path / "whole")


def folders_in_memory() -> set[Path]:
    return set(SHARED_MEMORY.glob("rlctl-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "sizes"), [("megatron", ("tp=1", "dp=2")), ("dtensor", ("tp=1", "dp=2"))], ids=["megatron", "dtensor"]
)
def test_a_lost_policy_goes_on_from_memory_after_the_last_step(tiny_llama, tmp_path, backend, sizes):
    """There is no checkpoint on disk. The second time the driver is killed, and nothing is left in memory."""
    before = folders_in_memory()
    more = ("--backend", backend, *layout(*sizes), "--set", "run.checkpoint_every=0", "--steps", "8")
    whole = finish(slow_run(tiny_llama, tmp_path / "whole", *more))
    assert whole.returncode == 0, whole.stderr
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = (*more, "--set", "run.memory_checkpoint_every=1")
    with started(slow_run(tiny_llama, run_dir, *more), log) as run:
        wait_for_step(run, run_dir, 3, log)
        assert len(folders_in_memory() - before) == 1
        rank(run, run_dir, "policy-1").kill()
        wait_for_step(run, run_dir, 6, log)
        family = run.family()
        workers = [one for one in family if worker_name(one, run_dir) is not None]
        run.kill()
        run.wait(30)
        wait_until_gone(workers, family)
    said = log.read_text()
    assert "Traceback" not in said
    assert re.search(r"continues from its checkpoint in memory, of step [234]", said)
    assert not re.search(r"trains again on ([2-9]|\d\d) batch", said)
    lines = without_recovery(run_dir)
    assert lines == results(tmp_path / "whole")[: len(lines)]
    assert wait_for_none(lambda: folders_in_memory() - before)


def wait_for_none(left: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 30
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not left()


@pytest.mark.slow
def test_a_policy_that_is_lost_too_often_ends_the_run(tiny_llama, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = slow_run(tiny_llama, run_dir, "--set", "cluster.policy_restarts=1", "--set", "run.checkpoint_every=1")
    with started(arguments, log) as run:
        wait_for_step(run, run_dir, 1, log)
        rank(run, run_dir, "policy-0").kill()
        wait_for((run_dir / "checkpoints" / "step_2").exists, run, log)
        rank(run, run_dir, "policy-0").kill()
        assert run.wait(LIMIT_S) == 1, log.read_text()
    said = " ".join(log.read_text().split())
    assert "The policy was lost 2 times in this run, more than cluster.policy_restarts = 1" in said
    assert f"rlctl train grpo --resume --run-dir {run_dir}" in said
