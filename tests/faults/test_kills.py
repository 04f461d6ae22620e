"""Processes of a run that are killed or stopped at random moments: each run resumes to the same numbers."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlctl.telemetry.metrics import read_metrics
from support.runs import LIMIT_S, command, finish, results, resume, started, wait_for_step, wait_until_gone, worker_name

WORKERS = ("policy-0", "engine-0", "reward-0")
OF_RAY = ("raylet", "gcs_server")
STEPS = 30
SLOWER = """
import time
def even(completion, answer, prompt, **row):
    time.sleep(0.05)
    return float(len(completion) % 2 == 0)
"""
"""A reward that makes a step long enough for signals to arrive in every part of it."""


def long_run(model: Path, run_dir: Path, steps: int) -> list[str]:
    reward = model.parent / "slower.py"
    reward.write_text(SLOWER)
    more = ("--steps", str(steps), "--set", "run.checkpoint_every=3", "--set", "run.keep_last=2")
    # A replaced engine computes the same within rounding: here its death ends the run, which resumes to the same bits.
    more += ("--set", "cluster.engine_restarts=0", "--set", "cluster.policy_restarts=0")
    arguments = command(model, run_dir, *more)
    arguments[arguments.index("--reward", arguments.index("--reward") + 1) + 1] = f"{reward}:even"
    return arguments


def processes_of(run: psutil.Popen, run_dir: Path) -> dict[str, psutil.Process]:
    """The processes of a run by what they are: the driver, its workers, and Ray's own."""
    found: dict[str, psutil.Process] = {"driver": psutil.Process(run.pid)}
    for one in run.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if (name := worker_name(one, run_dir)) is not None:
                found.setdefault(name, one)
            elif one.name() in OF_RAY:
                found[one.name()] = one
    return found


def step_of(name: str) -> int:
    return int(name.removeprefix("step_"))


def newest_checkpoint(run_dir: Path) -> int:
    return max((step_of(path.name) for path in (run_dir / "checkpoints").glob("step_*")), default=0)


def finished_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(read_metrics(path)) if path.exists() else 0


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict]]:
    """Metrics of so many steps of the same run when nothing happens to it; a shorter run begins like a longer one."""
    made: list[dict] = []

    def metrics(steps: int) -> list[dict]:
        if len(made) < steps:
            run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
            done = finish(long_run(tiny_llama, run_dir, steps))
            assert done.returncode == 0, done.stderr
            made[:] = results(run_dir)
        return made[:steps]

    return metrics


def disturb(arguments: list[str], run_dir: Path, log: Path, kind: str, after: int, delay_s: float) -> int:
    """Start a run, kill its process of `kind` some time after `after` steps, and return how the run ended."""
    with started(arguments, log) as run:
        wait_for_step(run, run_dir, after, log)
        time.sleep(delay_s)
        family = run.family()
        workers = [p for p in family if worker_name(p, run_dir) is not None]
        victim = processes_of(run, run_dir).get(kind)
        if victim is not None:  # the run may have ended meanwhile
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        code = run.wait(LIMIT_S)
        wait_until_gone(workers, family)  # Ray's own agents take a minute more to notice
    assert "Traceback" not in log.read_text()
    return code


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_run_whose_processes_are_killed_resumes_to_the_same_numbers(undisturbed, tiny_llama, tmp_path, seed):
    """Every kind of process is killed once; no checkpoint is lost, and no step is skipped or repeated."""
    choose = random.Random(seed)
    kinds = ["driver", *WORKERS, *OF_RAY]
    choose.shuffle(kinds)
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments, ended = long_run(tiny_llama, run_dir, STEPS), False
    for number, kind in enumerate(kinds):
        after = max(finished_steps(run_dir), 1) + choose.randint(1, STEPS // (2 * len(kinds)))
        newest = newest_checkpoint(run_dir)
        code = disturb(arguments, run_dir, tmp_path / f"log-{number}", kind, min(after, STEPS), choose.random() * 0.4)
        assert newest_checkpoint(run_dir) >= newest, f"the killed {kind} lost the checkpoint of step {newest}"
        ended = code == 0
        if ended:
            break
        arguments = resume(run_dir)
    if not ended:
        done = finish(resume(run_dir))
        log.write_text(done.stderr)
        assert done.returncode == 0, done.stderr
    assert results(run_dir) == undisturbed(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["driver", *WORKERS, "raylet"])
def test_a_process_that_is_stopped_for_a_while_changes_nothing(undisturbed, tiny_llama, tmp_path, kind):
    """SIGSTOP and SIGCONT: to the process, it is a clock that jumps, as when a laptop's lid is closed."""
    run_dir, log, steps = tmp_path / "run", tmp_path / "log", 8
    with started(long_run(tiny_llama, run_dir, steps), log) as run:
        wait_for_step(run, run_dir, 2, log)
        victim = processes_of(run, run_dir)[kind]
        victim.send_signal(signal.SIGSTOP)
        time.sleep(8)
        victim.send_signal(signal.SIGCONT)
        assert run.wait(LIMIT_S) == 0, log.read_text()
    assert results(run_dir) == undisturbed(steps)
