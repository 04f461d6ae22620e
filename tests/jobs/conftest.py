"""Whole runs that several files of this folder read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.runs import command, finish


@pytest.fixture(scope="session")
def uninterrupted(tiny_llama, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The directory of a run of the installed command from start to end, and what it printed."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    done = finish(command(tiny_llama, run_dir, "--json"))
    assert done.returncode == 0, done.stderr
    return run_dir, done
