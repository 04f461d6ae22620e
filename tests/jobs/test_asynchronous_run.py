"""Asynchronous runs as a user starts them, cut off and resumed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.crew import ASYNC
from support.runs import command, finish, results, resume, started, wait_for_step, wait_until_gone

pytestmark = pytest.mark.slow
CHOOSING = (
    "--set", "filter.groups=replace", "--set", "data.order=pass-rate", "--set", "data.size=6",
    "--set", "loss.importance_correction=ratio",
)  # fmt: skip
KILLS = 15
KILLS_ITSELF = """
import os, signal, sys, threading
from importlib import import_module
where, which, when = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
module, _, path = where.partition(":")
*owners, name = path.split(".")
owner = import_module(module)
for one in owners:
    owner = getattr(owner, one)
function, calls = getattr(owner, name), []
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def method(*args, **kwargs):
    calls.append(name)
    chosen = eval(which, {"args": args, "call": len(calls)})
    if chosen and when == "before":
        die()
    if chosen and when == "during":
        threading.Timer(0.02, die).start()
    found = function(*args, **kwargs)
    if chosen:
        die()
    return found
setattr(owner, name, method)
from rlctl.cli import main
main()
"""
MOMENTS = (
    ("rlctl.jobs.training_run:start_run_workers", "call == 1", "before"),
    ("rlctl.cluster.workers:WorkerGroup.ready", "call == 1", "during"),
    ("rlctl.refit.session:RefitSession._move", "call == 1", "during"),
    ("rlctl.runs.directory:NewCheckpoint.begin", "call == 1", "after"),
    ("rlctl.backends.clients:PolicyClient.save_begin", "call == 1", "after"),
    ("rlctl.runs.directory:NewCheckpoint.put_in_place", "call == 1", "before"),
    ("rlctl.runs.directory:NewCheckpoint.put_in_place", "call == 2", "after"),
    ("rlctl.telemetry.metrics:MetricsFile.log", "call == 2", "before"),
    ("rlctl.rollouts.scored_groups:GroupMaker.scored", "call == 3", "before"),
    ("rlctl.refit.session:RefitSession._move", "call == 3", "during"),
    ("rlctl.rollouts.asynchronous:AsynchronousSource.write", "call == 2", "before"),
    ("rlctl.rollouts.asynchronous:AsynchronousSource.next", "args[1] == 11", "after"),
    ("rlctl.refit.session:RefitSession._move", "args[1] == 12", "during"),
    ("rlctl.runs.directory:NewCheckpoint.put_in_place", "args[0].step == 12", "before"),
)
"""A function, which of its calls, and where in it: in the start, the first refit, saves, scoring, a refit, and at last
the last of 12 steps."""
TURNS = ("--set", "training.offload=true")
FAST = ("--set", "generation.engines=2", "--set", "refit.in_flight=keep", "--set", "rollouts.order=arrival")


def trained_positions(lines: list[dict[str, Any]]) -> list[int]:
    return [p for line in lines for first, last in line["positions"] for p in range(first, last + 1)]


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
        trained = trained_positions(whole)
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
    trained = trained_positions(lines)
    assert (sorted(trained) if settings else trained) == list(range(300))


def killed_in(moment: tuple[str, str, str], arguments: list[str], log: Path) -> None:
    """Start the run, which kills itself in a call of a function: before it, in the midst of it, or after it."""
    with started([sys.executable, "-c", KILLS_ITSELF, *moment, *arguments[1:]], log) as process:
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.family()  # is ended with it
            time.sleep(0.1)
        assert process.returncode == -signal.SIGKILL, log.read_text()


@pytest.mark.parametrize("settings", [(), FAST], ids=["position", "arrival"])
def test_at_whatever_moment_it_is_killed_a_run_trains_on_each_prompt_once(tiny_llama, tmp_path, settings):
    run_dir, log, steps = tmp_path / "run", tmp_path / "log", 20
    arguments = command(tiny_llama, run_dir, *ASYNC, *settings, "--steps", str(steps))
    for moment in MOMENTS:
        killed_in(moment, arguments, log)
        if (run_dir / "manifest.json").exists():
            arguments = resume(run_dir)
    done = finish(resume(run_dir))
    assert done.returncode == 0, done.stderr
    lines = results(run_dir)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    trained = trained_positions(lines)
    assert (sorted(trained) if settings else trained) == list(range(2 * steps))


def test_engines_that_pause_for_the_policy_give_the_run_that_goes_on_beside_it(run_here, tiny_llama, tmp_path):
    """As on GPUs that both share: where nothing is under way when weights change, the numbers are the same."""
    options = (*ASYNC[:3], "--set", "refit.verify_every=1", "--steps", "4")
    found = {}
    for name, more in (("beside", ()), ("turns", TURNS), ("kept", (*TURNS, *FAST))):
        done = run_here(*command(tiny_llama, tmp_path / name, *options, *more)[1:])
        assert done.returncode == 0, done.stderr
        found[name] = results(tmp_path / name)
    freed = [line.pop("offloaded_bytes") for lines in found.values() for line in lines]
    assert (freed[:4], min(freed[4:]) > 0) == ([0] * 4, True)
    assert found["turns"] == found["beside"]
    kept = found["kept"]
    assert max(line["staleness"]["max"] for line in kept) == 1
    assert sorted(trained_positions(kept)) == list(range(8))


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
    trained = trained_positions(results(run_dir))
    assert len(trained) == len(set(trained)) == 400
