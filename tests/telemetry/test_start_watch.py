"""A start that stands still is reported with its stacks and ends; one that works, here or in a child, goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import subprocess, sys, threading, time
from pathlib import Path
from rlctl.cluster.ray_session import BesideSession
from rlctl.telemetry.start_watch import StartWatch, bounded_wait

held = threading.Lock()
held.acquire()
threading.Thread(target=held.acquire, name="waits for a lock", daemon=True).start()
spins = "import time; end = time.monotonic() + 5\\nwhile time.monotonic() < end: pass"
log = Path(sys.argv[2])
with StartWatch(lambda: "planning", lambda: log, ends_process=sys.argv[3] == "command", look_s=0.05):
    if sys.argv[1] == "stands still":
        BesideSession()._answered.wait(5)
    if sys.argv[1] == "never answered":
        BesideSession().wait()
    if sys.argv[1] == "works":
        exec(spins)
    if sys.argv[1] == "a child works":
        subprocess.run([sys.executable, "-c", spins])
    if sys.argv[1] == "waits with a limit":
        with bounded_wait():
            time.sleep(5)
print("went on")
"""


def start(what: str, log: Path, owner: str = "command") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, what, str(log), owner]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_start_that_stands_still_writes_its_stacks_and_ends_with_1(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    done = start("never answered", log)
    assert (done.returncode, done.stdout) == (1, "")
    quiet, ended = done.stderr.splitlines()[:2]
    place = "planning; the main thread is in wait, rlctl/cluster/ray_session.py:"
    assert quiet.startswith(f"No CPU time was used for a minute ({place}")
    assert f"rlctl: The start stands still: no CPU time was used for five minutes ({place}" in ended
    assert f"The stacks of all threads are in {log}." in ended
    stacks = log.read_text()
    assert stacks.count("No CPU time was used for a minute") == 1
    assert 'ray_session.py", line' in stacks
    assert "acquire" in stacks or "<string>" in stacks  # the thread that waits for the lock
    assert stacks.count("Thread 0x") >= 4  # of three threads, twice each but for the current one


@pytest.mark.parametrize("what", ["works", "a child works", "waits with a limit"])
@pytest.mark.slow
@pytest.mark.guard
def test_a_start_that_works_is_left_alone(what: str, tmp_path: Path) -> None:
    done = start(what, tmp_path / "run.log")
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


def test_a_program_that_calls_rlctl_is_told_and_not_ended(tmp_path: Path) -> None:
    done = start("stands still", tmp_path / "run.log", "program")
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert len(done.stderr.splitlines()) == 1
