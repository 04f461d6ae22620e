"""Whole training runs of tests: the command, a run in the background, and what it left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rlctl.telemetry.metrics import read_metrics
from support.hosts import Host
from support.metric_lines import without_timing
from support.processes import is_alive

STEPS = 4
LIMIT_S = 900
TASK = (
    "--data", "reasoning-gym:chain_sum", "--set", "data.params.min_terms=2", "--set", "data.params.max_terms=2",
    "--set", "data.params.min_digits=1", "--set", "data.params.max_digits=1", "--reward", "exact-match",
)  # fmt: skip
ROLLOUTS = 8  # of a step
# A reward that a random model earns: answers with an even number of characters. A run may be held up in it.
REWARD = """
import itertools, os, time
scored = itertools.count(1)
def even(completion, answer, prompt, **row):
    if next(scored) > int(os.environ.get("HOLD_AFTER", 1 << 40)):
        time.sleep(200)
    return float(len(completion) % 2 == 0)
"""


def command(model: Path, run_dir: Path, *more: str) -> list[str]:
    reward = model.parent / "reward.py"  # beside the model: its path names the metric, and runs are compared
    reward.write_text(REWARD)
    return [
        str(Path(sys.executable).with_name("rlctl")), "train", "grpo", "--model", str(model), *TASK,
        "--reward", f"{reward}:even", "--gpu", "cpu", "--steps", str(STEPS), "--prompts", "2", "--seed", "1",
        "--generations", "4", "--max-new-tokens", "6", "--lr", "1e-3", "--run-dir", str(run_dir), "--set",
        "run.checkpoint_every=2", "--set", "reward.timeout_s=300", "--set", "training.dp=1",
        "--set", "training.threads=1", "--set", "generation.threads=1", *more,
    ]  # fmt: skip


def resume(run_dir: Path, *more: str) -> list[str]:
    return [str(Path(sys.executable).with_name("rlctl")), "train", "grpo", "--resume", "--run-dir", str(run_dir), *more]


def layout(*sizes: str) -> list[str]:
    """The words of a command line that give the policy these sizes."""
    return [word for size in sizes for word in ("--set", f"training.{size}")]


def finish(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@contextlib.contextmanager
def started(arguments: list[str], log: Path):
    """A run in the background; at the end of the block its remaining processes are killed."""
    with log.open("w") as out:
        process = psutil.Popen(arguments, stdout=out, stderr=subprocess.STDOUT)
    with ended(process):
        yield process


@contextlib.contextmanager
def in_terminal(arguments: list[str], log: Path):
    """A run in a pseudo-terminal. Another process writes the terminal's output to `log` until the terminal closes."""
    ours, theirs = pty.openpty()
    with open(theirs, "wb", closefd=True) as out:
        process = psutil.Popen(
            arguments, stdin=out, stdout=out, stderr=out, start_new_session=True,
            preexec_fn=_take_terminal,
        )  # fmt: skip
    with log.open("wb") as shown:
        reader = psutil.Popen(["cat"], stdin=ours, stdout=shown, stderr=subprocess.DEVNULL)
    os.close(ours)
    with ended(process):
        try:
            yield process, SimpleNamespace(close=reader.kill)
        finally:
            reader.kill()
            reader.wait(30)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup


@contextlib.contextmanager
def ended(process: psutil.Popen):
    """Whatever is left of a run at the end is killed."""
    family: list[psutil.Process] = []
    process.family = lambda: family.extend(process.children(recursive=True)) or family  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family.extend(process.children(recursive=True))
        for one in (process, *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(30)


def wait_for_step(process: psutil.Popen, run_dir: Path, steps: int, log: Path) -> None:
    """Until `steps` lines of metrics are there."""
    path = run_dir / "metrics.jsonl"
    wait_for(lambda: path.exists() and len(read_metrics(path)) >= steps, process, log)


def wait_for(there: Callable[[], bool], process: psutil.Popen, log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if there():
            return
        assert process.poll() is None, f"the run ended early:\n{log.read_text()}"
        time.sleep(0.05)
    pytest.fail(f"not there in {LIMIT_S} s:\n{log.read_text()}")


def wait_until_gone(processes: list[psutil.Process], others: Iterable[psutil.Process] = ()) -> None:
    """Wait for the end of `processes`. Orphans become children of this process while it has a session of Ray, so it
    buries them and `others`: a worker takes a dead raylet that nobody has buried for a living one."""
    deadline = time.monotonic() + 120
    while alive := [one for one in processes if is_alive(one)]:
        assert time.monotonic() < deadline, alive
        for one in (*processes, *others):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(one.pid, os.WNOHANG)
        time.sleep(0.1)


def results(run_dir: Path) -> list[dict]:
    return [without_timing(line) for line in read_metrics(run_dir / "metrics.jsonl")]


def worker_name(process: psutil.Process, run_dir: Path) -> str | None:
    """Name of the worker whose log the process writes to; None: it is not a worker of the run."""
    with contextlib.suppress(OSError):
        output = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        if output.parent == run_dir / "logs":
            return output.stem
    return None


def host_of(hosts: list[Host], name: str, run_dir: Path) -> Host:
    """The host on which a worker of the run lives."""
    for process in psutil.process_iter():
        if worker_name(process, run_dir) == name:
            return next(host for host in hosts if host.holds(process.pid))
    raise AssertionError(f"{name} is not there")


def cut_after(steps: int, whole: Path, run_dir: Path) -> Path:
    """A copy of a run's directory in which the checkpoint of step `steps` is the newest, as when the run was killed."""
    shutil.copytree(whole, run_dir)
    for path in (run_dir / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > steps:
            shutil.rmtree(path)
    assert (run_dir / "checkpoints" / f"step_{steps}").exists()
    return run_dir


def same_run(one: list[dict], other: list[dict]) -> None:
    """Two runs that sampled the same tokens and computed the same, to float32's rounding."""
    assert len(one) == len(other)
    for ours, theirs in zip(one, other, strict=True):
        assert theirs.get("logprob_diff", {"max": 0.0})["max"] < 1e-4  # a step whose samples teach nothing has none
        for name in ("reward_mean", "response_tokens_mean", "entropy", "grad_norm", "loss"):
            assert (name in theirs) == (name in ours), name  # a step that trains on nothing has no loss
            assert theirs.get(name, 0.0) == pytest.approx(ours.get(name, 0.0), rel=1e-4, abs=1e-6), name
