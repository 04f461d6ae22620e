"""The asynchronous source: what is begun when, what a batch holds, and what a checkpoint keeps."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.backends.messages import GroupRequest, GroupResult
from rlctl.config.schema import RlctlConfig
from rlctl.errors import ConfigError, InputError, WorkerError
from rlctl.rollouts import asynchronous, scored_groups
from rlctl.rollouts.asynchronous import GROUPS_FILE, AsynchronousSource
from rlctl.rollouts.source import RolloutBatch, refuse_async, sample_seed
from rlctl.telemetry.phases import StepTimer
from support.rollouts import VERSION, Prompts, Scorer, answer


class Call:
    """A call of an engine, which ends when the test says so."""

    def __init__(self, engine: str, requests: list[GroupRequest], ready: Callable[[Call], list[GroupResult] | None]):
        self.engine, self.requests, self.ready, self.call = engine, requests, ready, self

    def results(self) -> list[GroupResult]:
        found = self.ready(self)
        assert found is not None
        return found


class Engines:
    """Two engines, whose groups finish as `allow` says."""

    def __init__(self) -> None:
        self.engines = ["a", "b"]
        self.begun: list[GroupRequest] = []
        self.held: dict[str, list[GroupRequest]] = {"a": [], "b": []}
        self.allowed: set[int] = set()
        self.all_allowed = True
        self.dead: set[str] = set()
        self.chance = random.Random(7)

    def allow(self, *positions: int) -> None:
        self.allowed |= set(positions)

    def begin(self, engine: str, requests: Sequence[GroupRequest], *_: Any) -> Call:
        self.begun += requests
        return Call(engine, list(requests), self._whole)

    def submit(self, engine: str, requests: Sequence[GroupRequest], _: Any) -> None:
        self.begun += requests
        self.held[engine] += requests

    def collect(self, engine: str, *_: Any) -> Call:
        return Call(engine, [], self._first)

    def _may(self, request: GroupRequest) -> bool:
        return self.all_allowed or request.group in self.allowed

    def _whole(self, call: Call) -> list[GroupResult] | None:
        if call.engine in self.dead:
            raise WorkerError(f"{call.engine} is gone")
        return [answer(request) for request in call.requests] if all(map(self._may, call.requests)) else None

    def _first(self, call: Call) -> list[GroupResult] | None:
        if call.engine in self.dead:
            raise WorkerError(f"{call.engine} is gone")
        free = [request for request in self.held[call.engine] if self._may(request)]
        if not free:
            return None
        request = self.chance.choice(free)
        self.held[call.engine].remove(request)
        found = [answer(request)]
        call.ready = lambda _: found
        return found


class Sync:
    """Replaces a lost engine by another."""

    def __init__(self, engines: Engines) -> None:
        self.engines, self.recovered = engines, []
        self.before_refit: Callable[[], None] = lambda: None

    def recover(self, error: Exception, version: int) -> None:
        self.recovered.append(version)
        lost = self.engines.dead.pop()
        self.engines.engines[self.engines.engines.index(lost)] = f"{lost}2"
        self.engines.held[f"{lost}2"] = []


def first_done(calls: Sequence[Call], timeout_s: float) -> list[Call]:
    def ended(call: Call) -> bool:
        try:
            return call.ready(call) is not None
        except WorkerError:
            return True

    time.sleep(0.002)
    return [call for call in calls if ended(call)]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[AsynchronousSource, Engines, Sync]]]:
    monkeypatch.setattr(asynchronous, "first_done", first_done)
    monkeypatch.setattr(scored_groups, "fetch", lambda handle: handle)
    monkeypatch.setattr(scored_groups, "put", lambda value: value)
    made: list[AsynchronousSource] = []

    def build(in_flight: str = "keep", **rollouts: Any) -> tuple[AsynchronousSource, Engines, Sync]:
        config = RlctlConfig.model_validate({
            "batch": {"prompts": 2, "generations": 2}, "run": {"seed": 5}, "refit": {"in_flight": in_flight},
            "rollouts": {"mode": "async", **rollouts},
        })  # fmt: skip
        engines, prompts, workers = Engines(), Prompts(), Scorer()
        sync = Sync(engines)
        source = AsynchronousSource(config, prompts, engines, workers, sync, StepTimer())  # type: ignore[arg-type]
        made.append(source)
        return source, engines, sync

    yield build
    for source in made:
        source.close()


def positions(batch: RolloutBatch) -> list[int]:
    return [group.position for group in batch.groups]


def later(source: AsynchronousSource, version: int) -> tuple[threading.Thread, list[RolloutBatch]]:
    """`next`, called in a thread of its own."""
    found: list[RolloutBatch] = []
    thread = threading.Thread(target=lambda: found.append(source.next(version)), daemon=True)
    thread.start()
    return thread, found


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("in_flight", ["wait", "keep"])
def test_groups_are_begun_as_far_ahead_as_their_age_allows(make: Any, in_flight: str) -> None:
    source, engines, _ = make(in_flight, max_staleness=2)
    for version in range(3):
        source.next(version)
        assert sorted(request.group for request in engines.begun) == list(range(2 * (2 + version + 1)))
    first = next(request for request in engines.begun if request.group == 3)
    assert first.seeds == (sample_seed(5, 3, 0), sample_seed(5, 3, 1))


def test_batches_by_position_hold_the_next_positions_whatever_finishes_first(make: Any) -> None:
    source, engines, _ = make(order="position")
    engines.all_allowed = False
    engines.allow(3, 2, 1)
    thread, found = later(source, 0)
    wait(lambda: len(source._progress.finished) == 3)
    assert not found
    engines.allow(0)
    thread.join(30)
    assert positions(found[0]) == [0, 1]
    assert positions(source.next(1)) == [2, 3]


def test_batches_by_arrival_hold_what_finished_first_and_wait_for_what_is_old(make: Any) -> None:
    source, engines, _ = make(order="arrival", max_staleness=1)
    engines.all_allowed = False
    engines.allow(3)
    thread, found = later(source, 0)
    wait(lambda: len(source._progress.finished) == 1)
    engines.allow(1)
    thread.join(30)
    assert positions(found[0]) == [3, 1]
    engines.allow(4, 5, 2)
    thread, found = later(source, 1)  # 0 and 2 were begun one version ago
    wait(lambda: len(source._progress.finished) == 3)
    assert not found
    engines.allow(0)
    thread.join(30)
    assert sorted(positions(found[0])) == [0, 2]
    assert found[0].metrics["versions_since_admission"] == 1


def test_weights_change_only_when_nothing_is_in_flight_where_it_is_to_be_waited_for(make: Any) -> None:
    source, engines, sync = make("wait")
    engines.all_allowed = False
    engines.allow(0, 1, 2)
    asked: list[int] = []
    thread, _ = later(source, 0)
    settling = threading.Thread(target=lambda: (sync.before_refit(), asked.append(len(engines.begun))), daemon=True)
    wait(lambda: len(engines.begun) == 4)
    settling.start()
    settling.join(0.1)
    assert not asked
    engines.allow(3)
    settling.join(30)
    thread.join(30)
    assert asked == [4]


@pytest.mark.parametrize("in_flight", ["wait", "keep"])
def test_groups_of_a_lost_engine_are_begun_again_with_their_seeds(make: Any, in_flight: str) -> None:
    source, engines, sync = make(in_flight)
    engines.all_allowed = False
    thread, found = later(source, 0)
    wait(lambda: len(engines.begun) == 4)
    engines.dead.add("a")
    engines.all_allowed = True
    thread.join(30)
    assert sync.recovered == [0]
    assert positions(found[0]) == [0, 1]
    again = engines.begun[4:]
    assert len(again) == 2
    assert all(request in engines.begun[:4] for request in again)


def test_an_error_of_a_scorer_ends_the_wait(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise InputError("the reward function raised")

    source, _, _ = make()
    monkeypatch.setattr(source._groups, "scored", fail)
    with pytest.raises(InputError, match="the reward function raised"):
        source.next(0)


@pytest.mark.parametrize("order", ["position", "arrival"])
@pytest.mark.parametrize("in_flight", ["wait", "keep"])
def test_however_often_a_run_is_cut_off_each_position_is_trained_once(
    make: Any, tmp_path: Path, order: str, in_flight: str
) -> None:
    """The run goes on from its newest checkpoint; what came after it is forgotten."""
    chance = random.Random(7)
    source, _, _ = make(in_flight, order=order, max_staleness=2)
    trained: list[list[int]] = []
    kept: tuple[int, dict[str, Any]] | None = None
    while len(trained) < 40:
        trained.append(positions(source.next(len(trained))))
        if chance.random() < 0.4:
            kept = len(trained), json.loads(json.dumps(source.state()))
            source.write(tmp_path)
        if kept and chance.random() < 0.3:
            source.close()
            source, _, _ = make(in_flight, order=order, max_staleness=2)
            trained = trained[: kept[0]]
            source.restore(kept[1], tmp_path)
    flat = sorted(position for batch in trained for position in batch)
    if order == "position":
        assert flat == list(range(80))
    else:
        assert len(set(flat)) == 80
        assert set(range(60)) <= set(flat)  # the newest may be in flight, those that were begun again too


def test_finished_groups_come_back_with_their_columns(make: Any, tmp_path: Path) -> None:
    source, _, _ = make("wait")
    source.next(0)
    state = source.state()
    assert (state["trained"], state["finished"], state["under_way"]) == ([[0, 1]], [[2, 3]], [])
    source.write(tmp_path)
    again, engines, _ = make("wait")
    again.restore(json.loads(json.dumps(state)), tmp_path)
    batch = again.next(1)
    assert positions(batch) == [2, 3]
    assert sorted(request.group for request in engines.begun) == [4, 5]
    expected = answer(GroupRequest(2, (2, 1), (0, 0)))
    found: Any = batch.groups[0].columns
    for name in scored_groups.COLUMNS:
        assert np.array_equal(getattr(found, name), getattr(expected.columns, name))
    assert batch.groups[0].texts == expected.texts
    assert [rollout.first_version for rollout in batch.groups[0].rollouts] == [VERSION] * 2


def test_a_damaged_file_of_finished_groups_is_named(make: Any, tmp_path: Path) -> None:
    source, _, _ = make("wait")
    source.next(0)
    source.write(tmp_path)
    content = bytearray((tmp_path / GROUPS_FILE).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / GROUPS_FILE).write_bytes(content)
    again, _, _ = make("wait")
    with pytest.raises(InputError, match=GROUPS_FILE):
        again.restore(source.state(), tmp_path)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"training": {"offload": True}}, "training.offload=false"),
        ({"refit": {"in_flight": "abort"}}, "in_flight = abort"),
        ({"loss": {"importance_correction": "off"}}, "need a correction"),
        ({"training": {"router_replay": True}, "refit": {"in_flight": "keep"}}, "router_replay"),
    ],
)
def test_what_cannot_be_made_while_the_policy_trains_is_refused(sections: Any, words: str) -> None:
    config = RlctlConfig.model_validate({"rollouts": {"mode": "async"}, **sections})
    with pytest.raises(ConfigError) as caught:
        refuse_async(config)
    assert words in f"{caught.value.message} {caught.value.hint}"
    refuse_async(RlctlConfig.model_validate(sections))
