"""Commands run in the tests' own process, in the Ray session that all tests share.

They spare the start of Ray and the driver's imports. What a test holds about the process of a command (its signals, its
death, what the installed script prints) is held by tests that start one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_here(placement: Any, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs `rlctl` with the given arguments; returns the exit code and what was printed."""
    from rlctl.cli import run
    from rlctl.commands.output import JsonMode

    def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
        JsonMode.wanted = JsonMode.printed = False
        capfd.readouterr()
        code = run(list(arguments))
        printed = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, code, printed.out, printed.err)

    return run_command
