"""Children of reward functions end with the process that scores; answers given twice do no harm."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlctl.data.prompt_rows import PromptRow
from rlctl.errors import WorkerError
from rlctl.processes.child import PACKAGES
from rlctl.rewards.reward_plan import RewardPlan
from rlctl.rewards.scoring_process import ScoringProcess, Work
from rlctl.settings.rewards import RewardTerm
from support.processes import is_alive

ROW = PromptRow(0, "data.jsonl, line 1", "q", "a")

# One in a session of its own whose parent is gone, one that ignores signals, one that a shell has started.
STARTS_OTHERS = """
import os, pathlib, signal, subprocess, time

def score(completion):
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                (pathlib.Path(completion) / str(os.getpid())).touch()
                time.sleep(600)
            os._exit(0)
    subprocess.Popen(["sh", "-c", f"sleep 600 & touch {completion}/$!; touch {completion}/$$; wait"])
    while len(os.listdir(completion)) < 4:
        time.sleep(0.01)
    return 0.5
"""

# What a reward worker does, in a process that can be killed.
WORKER = """
import pickle, sys, time
from rlctl.rewards.scoring_process import ScoringProcess
plan, work = pickle.load(sys.stdin.buffer)
process = ScoringProcess(plan)
print(process.score(work), flush=True)
time.sleep(600)
"""


def plan_of(directory: Path, code: str) -> RewardPlan:
    file = directory / "mine.py"
    file.write_text(code)
    return RewardPlan((RewardTerm(name=f"{file}:score"),), "full", None, None, None, 60.0)


def ended(pid: int) -> bool:
    try:
        return not is_alive(psutil.Process(pid))  # the init of some containers buries nobody
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen in 30 s")


def processes_of(process: ScoringProcess) -> list[int]:
    """Return the outer supervisor, the inner one, and the process that scores."""
    found = [process.lanes[0].server.process.pid]
    while len(found) < 3:
        found.append(psutil.Process(found[-1]).children()[0].pid)
    return found


@pytest.mark.parametrize("killed", ["nobody", "outer supervisor", "inner supervisor", "scorer"])
def test_what_a_reward_function_started_ends_with_its_process(tmp_path: Path, killed: str) -> None:
    started = tmp_path / "started"
    started.mkdir()
    process = ScoringProcess(plan_of(tmp_path, STARTS_OTHERS))
    assert [score.value for score in process.score([Work(0, str(started), ROW)])] == [0.5]
    chain = processes_of(process)
    pids = [int(name) for name in os.listdir(started)]
    assert len(pids) == 4
    assert not any(map(ended, pids))
    if killed == "nobody":
        process.close()
    else:
        os.kill(
            dict(zip(("outer supervisor", "inner supervisor", "scorer"), chain, strict=True))[killed], signal.SIGKILL
        )
    wait_for(lambda: all(map(ended, [*pids, *chain[1:]])))
    if killed != "nobody":
        with pytest.raises(WorkerError, match=r"mine\.py:score ended its process \(signal 9\)"):
            process.score([Work(0, str(started), ROW)])
    process.close()
    assert all(map(ended, chain))


def test_what_a_reward_function_started_ends_when_the_worker_is_killed(tmp_path: Path) -> None:
    started = tmp_path / "started"
    started.mkdir()
    plan = plan_of(tmp_path, STARTS_OTHERS)
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": PACKAGES},
    )
    worker.stdin.write(pickle.dumps((plan, [Work(0, str(started), ROW)])))
    worker.stdin.close()
    assert b"value=0.5" in worker.stdout.readline()
    below = [child.pid for child in psutil.Process(worker.pid).children(recursive=True)]
    worker.kill()
    worker.wait()
    worker.stdout.close()
    wait_for(lambda: all(map(ended, [*below, *map(int, os.listdir(started))])))


FORKS = """
import ctypes, os

def score(completion):
    here = os.getpid()
    (os.fork if completion == "os" else ctypes.CDLL(None).fork)()
    return 0.5 if os.getpid() == here else 0.125
"""


@pytest.mark.parametrize("kind", ["os", "libc"])
def test_a_function_that_forks_and_returns_twice_shifts_no_reward(tmp_path: Path, kind: str) -> None:
    process = ScoringProcess(plan_of(tmp_path, FORKS))
    try:
        for _ in range(3):
            assert [score.value for score in process.score([Work(0, kind, ROW)] * 4)] == [0.5] * 4
    finally:
        process.close()


def test_the_process_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do modules next to the reward function replace installed ones; others next to it are found."""
    for name in ("random", "json", "numpy", "pydantic", "psutil"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'a').write({name!r})\n")
    (tmp_path / "neighbor.py").write_text("VALUE = 0.25\n")
    code = "import json, random, numpy\nfrom neighbor import VALUE\ndef score(completion):\n    return VALUE\n"
    monkeypatch.chdir(tmp_path)
    process = ScoringProcess(plan_of(tmp_path, code))
    assert process.score([Work(0, "x", ROW)])[0].value == 0.25
    process.close()
    assert not (tmp_path / "marker").exists()
