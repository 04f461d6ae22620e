"""What a plan reads of this machine."""

from __future__ import annotations

import subprocess

import pytest

from rlctl.errors import MachineError
from rlctl.planner import from_config
from rlctl.planner.from_config import local_gpus

LISTED = "0, GPU-aa11, NVIDIA H100 80GB HBM3\n1, GPU-aa22, NVIDIA H100 80GB HBM3\n2, GPU-bb33, NVIDIA A100-SXM4-80GB\n"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_config.shutil, "which", lambda name: f"/usr/bin/{name}")
    done = subprocess.CompletedProcess([], 0, LISTED, "")
    monkeypatch.setattr(from_config.subprocess, "run", lambda *_, **__: done)


@pytest.mark.parametrize(
    ("wanted", "types"),
    [
        (None, ["H100", "H100", "A100"]),
        ("2,0", ["A100", "H100"]),
        ("GPU-bb,GPU-aa11", ["A100", "H100"]),
        ("", []),
        ("-1", []),
        ("1,7,0", ["H100"]),  # CUDA ends the list at what is not there
        ("GPU-aa", []),  # two begin like this
    ],
)
def test_a_plan_counts_the_gpus_that_are_left_to_the_process(
    driver: None, monkeypatch: pytest.MonkeyPatch, wanted: str | None, types: list[str]
) -> None:
    if wanted is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    assert [name.split()[1][:4] for name in local_gpus()] == types


def test_a_driver_that_hangs_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 30)

    monkeypatch.setattr(from_config.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(from_config.subprocess, "run", hang)
    with pytest.raises(MachineError, match="nvidia-smi did not answer"):
        local_gpus()
