"""The next batch of a run of a sweep begins before it is due."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import InputError, WorkerError
from rlctl.rollouts.sampled_ahead import SampledAhead
from rlctl.rollouts.source import RolloutBatch
from rlctl.telemetry.phases import Phase, StepTimer


class Source:
    """Counts its batches. `errors` are raised by the calls of `next` that come first."""

    def __init__(self, *errors: Exception) -> None:
        self.made, self.errors, self.may = 0, [*errors], threading.Event()

    def next(self, version: int) -> RolloutBatch:
        self.may.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.made += 1
        return RolloutBatch((), {"batch": self.made, "version": version})

    def state(self) -> dict[str, Any]:
        return {"made": self.made}

    def write(self, directory: Path) -> None: ...
    def restore(self, state: Any, directory: Path) -> None: ...


class Sync:
    def __init__(self) -> None:
        self.policy_elsewhere, self.recovered = False, list[tuple[str, int]]()

    def recover(self, error: WorkerError, version: int) -> None:
        assert not self.policy_elsewhere
        self.recovered.append((error.message, version))


def ahead_of(source: Source) -> tuple[SampledAhead, Sync, StepTimer]:
    sync, timer = Sync(), StepTimer()
    return SampledAhead(source, sync, timer), sync, timer  # type: ignore[arg-type]


def test_a_checkpoint_does_not_count_a_batch_that_no_step_has_trained_on() -> None:
    ahead, sync, timer = ahead_of(source := Source())
    source.may.set()
    assert ahead.next(0).metrics == {"batch": 1, "version": 0}  # nothing had begun
    ahead.begin(1)
    ahead.close()
    assert (source.state(), ahead.state(), sync.policy_elsewhere) == ({"made": 2}, {"made": 1}, True)
    assert ahead.next(1).metrics == {"batch": 2, "version": 1}
    assert (ahead.state(), sync.policy_elsewhere) == ({"made": 2}, False)
    assert ahead.next(2).metrics == {"batch": 3, "version": 2}
    assert timer.seconds()[Phase.WAITING] > 0


def test_a_lost_engine_is_replaced_once_the_policy_has_the_runs_adapter() -> None:
    ahead, sync, _ = ahead_of(source := Source(WorkerError("engine 1 died.")))
    ahead.begin(3)
    assert not sync.recovered
    source.may.set()
    assert ahead.next(3).metrics == {"batch": 1, "version": 3}
    assert sync.recovered == [("engine 1 died.", 3)]


def test_another_error_of_a_batch_is_the_steps() -> None:
    ahead, sync, _ = ahead_of(source := Source(InputError("a reward function failed", "Fix it.")))
    source.may.set()
    ahead.begin(0)
    with pytest.raises(InputError, match="a reward function failed"):
        ahead.next(0)
    assert (ahead.state(), sync.recovered) == ({"made": 0}, [])
    assert ahead.next(0).metrics["batch"] == 1
