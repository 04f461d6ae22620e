"""Workers tell how far they are in a call, and take it back at its end; nobody else is troubled."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from ray import cloudpickle

from rlctl.cluster import progress
from rlctl.cluster.placement import Placement
from rlctl.cluster.workers import WorkerGroup, WorkerSpec

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module


class Counter:
    """A worker that comes two parts of eight far, and waits there until a file is there."""

    def work(self, path: Path) -> None:
        progress.report(2, 8)
        while not path.exists():
            time.sleep(0.02)
        progress.report(8, 8)


def test_the_driver_sees_how_far_a_worker_is(placement: Placement, tmp_path: Path) -> None:
    group = WorkerGroup(
        "counter", Counter, [WorkerSpec({}, (placement.bundles[0],))], placement, tmp_path, start_timeout_s=120,
        call_timeout_s=60,
    )  # fmt: skip
    try:
        assert group.progress() == {}
        call = group.submit(Counter.work, tmp_path / "go")
        deadline = time.monotonic() + 60
        while not (seen := group.progress()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert seen == {0: (2, 8)}
        (tmp_path / "go").touch()
        call.results()
        assert group.progress() == {}
    finally:
        group.kill()


def test_outside_of_a_worker_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_store", lambda: pytest.fail("the store was asked"))
    progress.report(1, 2)
    progress.report(2, 2)
