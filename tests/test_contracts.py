"""The structure of the code: which way imports point, and what a fast start may import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.cli import COMMANDS

ROOT = Path(__file__).parents[1]
ENGINES = ("torch", "ray", "vllm", "transformers", "megatron")


def imported_after(code: str) -> set[str]:
    """The engines that a fresh interpreter has imported after `code`."""
    report = "\nimport sys; print('LOADED', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = next(line for line in done.stdout.splitlines() if line.startswith("LOADED")).split()
    return set(ENGINES) & set(loaded)


def test_imports_point_down() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]


def test_help_imports_no_engine() -> None:
    assert imported_after("from rlctl.cli import run\nassert run(['--help']) == 0") == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_importing_a_command_imports_no_engine(name: str) -> None:
    assert imported_after(f"from rlctl.cli import load_command\nload_command({name!r})") == set()


def test_resolving_a_configuration_imports_no_engine() -> None:
    assert imported_after("from rlctl.config.load import resolve\nresolve('1node')") == set()
