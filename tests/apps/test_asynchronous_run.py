"""Asynchronous runs as a user starts them, cut off and resumed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from support.runs import command, finish, results, resume, started, wait_for_step, wait_until_gone

pytestmark = pytest.mark.slow
ASYNC = ("--async", "--max-staleness", "1", "--set", "run.checkpoint_every=1")
CHOOSING = (
    "--set", "filter.groups=replace", "--set", "data.order=pass-rate", "--set", "data.size=6",
    "--set", "loss.importance_correction=ratio",
)  # fmt: skip
KILLS = 15
FAST = ("--set", "generation.engines=2", "--set", "refit.in_flight=keep", "--set", "rollouts.order=arrival")


def killed_at_random(
    arguments: list[str], run_dir: Path, log: Path, steps: int, chance: random.Random, within_s: float = 0.5
) -> None:
    """Start the run, and kill it some time after it has taken `steps` steps."""
    with started(arguments, log) as process:
        if steps:
            wait_for_step(process, run_dir, steps, log)
        time.sleep(chance.uniform(0, within_s))
        family = process.family()
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        wait_until_gone(family)


@pytest.mark.parametrize("settings", [(), CHOOSING], ids=["plain", "choosing prompts"])
def test_an_asynchronous_run_that_is_killed_resumes_to_bitwise_the_same_metrics(
    run_here, tiny_llama, tmp_path, settings
):
    """Batches by position, and no rollout in flight when weights change: two runs are the same to the bit."""
    options = (*ASYNC, *settings, "--steps", "8")
    done = run_here(*command(tiny_llama, tmp_path / "whole", *options)[1:])
    assert done.returncode == 0, done.stderr
    whole = results(tmp_path / "whole")
    if settings:
        assert sum(line["dropped_groups"] for line in whole) > 0
        assert all(line["missing_groups"] == 0 for line in whole)
        trained = [p for line in whole for first, last in line["positions"] for p in range(first, last + 1)]
        assert trained == list(range(len(trained)))
    else:
        assert [line["positions"] for line in whole] == [[[2 * step, 2 * step + 1]] for step in range(8)]
        assert [line["staleness"]["max"] for line in whole] == [0] + [1] * 7
    run_dir, log = tmp_path / "run", tmp_path / "log"
    killed_at_random(command(tiny_llama, run_dir, *options), run_dir, log, 3, random.Random(1))
    done = run_here(*resume(run_dir)[1:])
    assert done.returncode == 0, done.stderr
    assert "resuming after step" in done.stderr
    assert results(run_dir) == whole


@pytest.mark.parametrize("settings", [(), FAST], ids=["position", "arrival"])
def test_however_often_it_is_killed_a_run_trains_on_each_prompt_once(tiny_llama, tmp_path, settings):
    """Thirty kills over both orders: most soon after a step, some while the run starts."""
    run_dir, log, chance = tmp_path / "run", tmp_path / "log", random.Random(len(settings))
    steps = 0
    arguments = command(tiny_llama, run_dir, *ASYNC, *settings, "--steps", "150")
    for kill in range(KILLS):
        if kill % 5 == 4:
            killed_at_random(arguments, run_dir, log, 0, chance, within_s=10.0)
        else:
            killed_at_random(arguments, run_dir, log, steps + 1, chance, within_s=2.0)
        steps = len(results(run_dir))
        arguments = resume(run_dir)
    done = finish(resume(run_dir))
    assert done.returncode == 0, done.stderr
    lines = results(run_dir)
    assert [line["step"] for line in lines] == list(range(1, 151))
    assert max(line["staleness"]["max"] for line in lines) == 1
    trained = [p for line in lines for first, last in line["positions"] for p in range(first, last + 1)]
    assert (sorted(trained) if settings else trained) == list(range(300))


def test_an_engine_that_dies_during_an_asynchronous_run_is_replaced(tiny_llama, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    from support.runs import worker_name

    arguments = command(tiny_llama, run_dir, *ASYNC, *FAST, "--steps", "200", "--set", "run.checkpoint_every=0")
    with started(arguments, log) as process:
        wait_for_step(process, run_dir, 2, log)
        next(p for p in process.family() if worker_name(p, run_dir) == "engine-1").kill()
        assert process.wait(900) == 0, log.read_text()
    text = log.read_text()
    assert "engine 1 is lost" in text
    assert "2 engine(s) hold version" in text
    trained = [p for line in results(run_dir) for a, b in line["positions"] for p in range(a, b + 1)]
    assert len(trained) == len(set(trained)) == 400
