"""Whole runs that several files of this folder look at, and how to make one in the process of the tests."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import Run
from support.runs import command, finish


@pytest.fixture
def here(run_here: Run) -> Callable[[list[str]], subprocess.CompletedProcess[str]]:
    """As `finish`, in the process of the tests."""
    return lambda arguments: run_here(*arguments[1:])


@pytest.fixture(scope="session")
def uninterrupted(tiny_llama, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The directory of a run of the installed command from start to end, and what it printed."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    done = finish(command(tiny_llama, run_dir, "--json"))
    assert done.returncode == 0, done.stderr
    return run_dir, done
