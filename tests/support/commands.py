"""Commands run in the tests' own process, in the Ray session that all tests share.

They spare the start of Ray and the driver's imports. What a test holds about the process of a command (its signals, its
death, what the installed script prints) is held by tests that start one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from rlctl import cli
from rlctl.commands.output import JsonMode

Run = Callable[..., subprocess.CompletedProcess[str]]


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
