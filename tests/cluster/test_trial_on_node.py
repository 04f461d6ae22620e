"""Rewards on a running Ray cluster are tried on the node that computes them, which has another PATH than the driver."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlctl.cli import run
from support.runs import ended, wait_for
from support.toy_gym import free_port

pytestmark = pytest.mark.slow
REWARD = """
import shutil, subprocess
def checked(completion, **row):
    return float(subprocess.run(["answer-checker"]).returncode == 0)
def found(completion, **row):
    return float(shutil.which("answer-checker") is not None) + len(completion) / 1000
"""
PORT = free_port()  # processes that share out the tests of this file each start a cluster
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
ENVIRONMENT |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def train(tiny_llama: Path, folder: Path, function: str, *more: str) -> list[str]:
    return [
        "train", "grpo", "--model", str(tiny_llama), "--gpu", "cpu", "--data", str(folder / "sums.jsonl"), "--reward",
        f"{folder / 'reward.py'}:{function}", "--steps", "1", "--prompts", "2", "--generations", "2",
        "--max-new-tokens", "4", "--ray-address", f"127.0.0.1:{PORT}", "--run-dir", str(folder / function), *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trial")
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "bin").mkdir()
    checker = folder / "bin" / "answer-checker"
    checker.write_text("#!/bin/sh\nexit 0\n")
    checker.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[None]:
    """A head on the loopback, without the folder of the program in its PATH."""
    start = [
        tool("ray"), "start", "--head", "--block", "--port", str(PORT), "--node-ip-address", "127.0.0.1", "--num-cpus",
        "4", "--include-dashboard", "false", "--disable-usage-stats", "--object-store-memory", "100000000",
    ]  # fmt: skip
    log, sessions = folder / "head.log", f"/tmp/trial-{os.getpid()}"  # the names of sockets are short
    with log.open("w") as out:
        head = psutil.Popen([*start, "--temp-dir", sessions], stdout=out, stderr=out, env=ENVIRONMENT)
    with ended(head):
        wait_for(_answers, head, log)
        yield
    shutil.rmtree(sessions, ignore_errors=True)


def _answers() -> bool:
    asked = [tool("ray"), "status", "--address", f"127.0.0.1:{PORT}"]
    return subprocess.run(asked, env=ENVIRONMENT, capture_output=True, check=False, timeout=60).returncode == 0


def finish(folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = [tool("rlctl"), *arguments]
    return subprocess.run(
        command, env={**ENVIRONMENT, "PATH": path}, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.guard
def test_a_program_that_the_node_lacks_is_missed_before_engines_start(
    tiny_llama: Path, folder: Path, cluster: None
) -> None:
    ended = finish(folder, train(tiny_llama, folder, "checked"))
    said = " ".join(ended.stderr.split())
    assert ended.returncode == 2, said
    assert "reward.py:checked raised FileNotFoundError" in said
    assert "'answer-checker'" in said
    assert re.search("The trial was on node [0-9.]+, where the rewards of the run are computed", said)
    assert not [*(folder / "checked").rglob("policy-*.log"), *(folder / "checked").rglob("engine-*.log")]


def test_another_score_on_the_node_is_told_and_the_run_goes_on(tiny_llama: Path, folder: Path, cluster: None) -> None:
    ended = finish(folder, train(tiny_llama, folder, "found"))
    said = " ".join(ended.stderr.split())
    assert ended.returncode == 0, said
    assert "found gives 0.001 to '1'" in said
    assert "and gave 1.001 where rlctl was started" in said


@pytest.mark.guard
def test_a_dry_run_says_where_the_trial_was(
    tiny_llama: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    dry = [*train(tiny_llama, folder, "found"), "--run-dir", str(folder / "dry"), "--dry-run", "--json"]
    assert run(dry) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any(note.startswith("note: the rewards were tried on this machine; a run tries them") for note in notes)
    assert run([*dry, "--set", "cluster.ray_address=null"]) == 0
    assert "were tried on this machine" not in capsys.readouterr().out
