"""Policy and engines take turns on devices that they share: none comes before the other has given its memory back."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from rlctl.backends.base import PolicySpec
from rlctl.backends.clients import EngineClient, PolicyClient
from rlctl.cluster.workers import WorkerGroup, WorkerSpec
from rlctl.errors import WorkerError
from rlctl.refit.sync import DeviceHandover, DeviceHolder
from rlctl.settings.training import TrainingConfig
from support.engines import tiny_facts

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Party:
    """A process that keeps account of what it was asked for, by the machine's clock."""

    def __init__(self, name: str) -> None:
        self.name, self.asked, self.broken = name, list[tuple[int, str]](), False

    def engine(self) -> Party:
        return self

    def sleep(self, flag: bool = False) -> int:
        """`flag`: of the policy whether its weights stay, of an engine whether a refit follows."""
        more = (", weights kept" if self.name == "policy" else ", refit next") if flag else ""
        self.asked.append((time.monotonic_ns(), f"{self.name} sleeps{more}"))
        return 7

    def device_used(self) -> tuple[int, int]:
        self.asked.append((time.monotonic_ns(), f"{self.name}'s device is looked at"))
        return 3, 80

    def break_down(self) -> None:
        self.broken = True

    def wake(self) -> None:
        if self.broken:
            raise MemoryError("no memory")
        self.asked.append((time.monotonic_ns(), f"{self.name} wakes"))

    def start(self) -> None:
        self.asked.append((time.monotonic_ns(), f"{self.name} starts"))

    def take(self) -> list[tuple[int, str]]:
        asked, self.asked = self.asked, []
        return asked


@pytest.fixture(scope="module")
def parties(placement: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    logs = tmp_path_factory.mktemp("parties")
    made = [
        WorkerGroup(name, Party, [WorkerSpec({"name": name}, (placement.bundles[0],))], placement, logs,
                    start_timeout_s=240, call_timeout_s=60)
        for name in ("policy", "engine")
    ]  # fmt: skip
    yield made[0], made[1]
    for group in made:
        group.kill()


def handover_of(policy: WorkerGroup, engines: WorkerGroup, *, shared: bool = True) -> DeviceHandover:
    """Turns between the two; `shared`: on the same devices."""
    spec = PolicySpec(tiny_facts(tied=False))
    client = PolicyClient(policy, spec, TrainingConfig(), micro_batch_tokens=64)
    return DeviceHandover(client, EngineClient(engines), offload=shared, engines_sleep=shared)


def happened(parties: tuple[WorkerGroup, ...]) -> list[str]:
    return [what for _, what in sorted(entry for group in parties for entry in group.call(Party.take)[0])]


def test_a_step_on_shared_devices(parties: tuple[WorkerGroup, WorkerGroup]) -> None:
    devices = handover_of(*parties)
    devices.to_weights()
    assert happened(parties) == ["policy sleeps, weights kept"]
    with devices.generating() as freed:
        assert (freed, devices.holder) == (7, DeviceHolder.ENGINES)
        assert happened(parties) == ["policy sleeps", "engine wakes"]
    assert devices.holder is DeviceHolder.POLICY
    assert happened(parties) == ["engine sleeps", "policy wakes"]
    devices.to_weights()
    devices.to_policy()  # to save
    assert happened(parties) == ["policy sleeps, weights kept", "engine sleeps", "policy wakes"]


def test_engines_hear_whether_a_refit_follows(parties: tuple[WorkerGroup, WorkerGroup]) -> None:
    """After sampling it does, after a validation or a check of decoding it does not."""
    devices = handover_of(*parties)
    for refit_next, more in ((True, ", refit next"), (False, "")):
        with devices.generating(refit_next):
            happened(parties)
        assert happened(parties) == [f"engine sleeps{more}", "policy wakes"]


def test_memory_is_looked_at_once_when_both_sleep(parties: tuple[WorkerGroup, WorkerGroup]) -> None:
    devices, told = handover_of(*parties), list[tuple[int, int]]()
    devices.when_all_sleep = told.append
    devices.to_weights()
    devices.to_policy()
    assert told == []  # the engines have captured no graphs yet
    happened(parties)
    for looked in (["policy's device is looked at"], []):
        with devices.generating():
            happened(parties)
        assert happened(parties) == ["engine sleeps", *looked, "policy wakes"]
    assert told == [(3, 80)]


def test_weights_move_in_the_middle_of_a_generation(parties: tuple[WorkerGroup, WorkerGroup]) -> None:
    """As they do when an engine was lost: caches are dropped before the policy comes back."""
    devices = handover_of(*parties)
    devices.to_engines()
    happened(parties)
    devices.to_weights()
    assert happened(parties) == ["engine sleeps", "policy wakes", "policy sleeps, weights kept"]


def test_an_engine_that_is_gone_holds_nobody_up(placement: Any, parties: Any, tmp_path: Path) -> None:
    specs = [WorkerSpec({"name": f"engine {rank}"}, (placement.bundles[0],)) for rank in range(2)]
    engines = WorkerGroup("two", Party, specs, placement, tmp_path, start_timeout_s=240, call_timeout_s=60)
    try:
        devices = handover_of(parties[0], engines)
        os.kill(engines.pids[0], signal.SIGKILL)
        with devices.generating():
            assert happened((parties[0], engines.part([1]))) == ["policy sleeps", "engine 1 wakes"]
        assert happened((parties[0], engines.part([1]))) == ["engine 1 sleeps", "policy wakes"]
        engines.part([1]).call(Party.break_down)
        with pytest.raises(WorkerError, match="no memory"):
            devices.to_engines()
        assert happened((parties[0],)) == ["policy sleeps"]
    finally:
        engines.kill()


def test_nothing_moves_where_nothing_is_shared(parties: tuple[WorkerGroup, WorkerGroup]) -> None:
    devices = handover_of(*parties, shared=False)
    devices.to_weights()
    with devices.generating() as freed:
        assert freed == 0
    assert happened(parties) == []


def test_engines_of_a_lost_host_are_set_aside_and_taken_back(
    placement: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [WorkerSpec({"name": f"engine {rank}"}, (placement.bundles[rank],)) for rank in range(2)]
    group = WorkerGroup("engine", Party, specs, placement, tmp_path, start_timeout_s=240, call_timeout_s=60)
    client, told = EngineClient(group), list[str]()
    before = client.engines
    client.set_aside([0])
    assert client.engines == before[1:]
    assert not client.take_back(told.append)  # its place is where it was
    monkeypatch.setattr(placement, "moved", lambda bundles: True)
    assert client.take_back(told.append)
    assert client.engines[0] == before[1]  # one that comes back is another engine, after those that stayed
    assert [found[0][1] for found in group.call(Party.take) if found] == ["engine 0 starts"]
    monkeypatch.undo()
    assert not client.take_back(told.append)
    assert told == []
    group.kill()
