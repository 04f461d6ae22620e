"""Commands run in the tests' own process, in the Ray session that all tests share.

They spare the start of Ray and the driver's imports. What a test holds about the process of a command (its signals, its
death, what the installed script prints) is held by tests that start one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlctl import cli
from rlctl.commands.output import JsonMode

Run = Callable[..., subprocess.CompletedProcess[str]]
SEVERAL = """
import contextlib, io, json, sys
from rlctl.cli import run
from rlctl.commands.output import JsonMode
answers = []
for words in json.load(sys.stdin):
    JsonMode.wanted = JsonMode.printed = False
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run(words)
    answers.append((words, code, out.getvalue(), err.getvalue()))
print(json.dumps(answers))
"""


def rlctl(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run `rlctl` in this process; return the exit code and what was printed to stdout and stderr."""
    JsonMode.wanted = JsonMode.printed = False
    capsys.readouterr()
    code = cli.run(list(arguments))
    captured = capsys.readouterr()
    JsonMode.wanted = JsonMode.printed = False
    return code, captured.out, captured.err


@pytest.fixture
def run_here(placement: Any, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs `rlctl` with the given arguments; returns the exit code and what was printed."""

    return lambda *arguments: subprocess.CompletedProcess(arguments, *rlctl(capfd, *arguments))


@pytest.fixture
def here(run_here: Run) -> Callable[[list[str]], subprocess.CompletedProcess[str]]:
    """Run a command line in the process of the tests; the first argument is the program."""
    return lambda arguments: run_here(*arguments[1:])


def rlctl_with(package: Path, *commands: list[str]) -> list[subprocess.CompletedProcess[str]]:
    """Run commands one after the other in one other process, which imports once what they need. In it a folder with a
    package is installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL], input=json.dumps(commands), capture_output=True, text=True, env=environment,
        timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [subprocess.CompletedProcess(*answer) for answer in json.loads(done.stdout)]
