"""Calibration measures what is there: plausible rates, and nothing where nothing can be measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlctl.doctor import calibrate
from rlctl.errors import MachineError


def test_rates_of_this_machine_are_plausible() -> None:
    device = torch.device("cpu")
    size = 256
    a = torch.randn(size, size)
    matmul = calibrate.rate(2.0 * size**3, lambda: torch.mm(a, a), device)
    assert 1e8 < matmul < 1e14
    copied = torch.ones(1 << 20)
    target = torch.empty_like(copied)
    assert 1e7 < calibrate.rate(8.0 * (1 << 20), lambda: target.copy_(copied), device) < 1e13


def test_the_disk_is_measured_where_the_checkpoints_will_be(tmp_path: Path) -> None:
    written, read = calibrate.disk_rates(tmp_path / "not" / "there" / "yet", count=32 * calibrate.MIB)
    assert written is not None
    assert read is not None
    assert written > 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    assert calibrate.disk_rates(tmp_path) == (None, None)


@pytest.mark.slow
def test_two_processes_measure_their_link() -> None:
    bus, pair = calibrate.group_rates(2, cuda=False)
    assert bus > 1e6
    assert pair > 1e6


@pytest.mark.slow
def test_a_group_that_does_not_come_up_names_how_long_it_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "GROUP_TIMEOUT_S", 0.1)
    with pytest.raises(MachineError, match="2 local processes"):
        calibrate.group_rates(2, cuda=False)
