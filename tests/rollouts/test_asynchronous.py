"""The asynchronous source: what is begun when, what a batch holds, and what a checkpoint keeps."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.backends.messages import GroupRequest, SampledGroup
from rlctl.data.rollouts import RolloutGroup
from rlctl.errors import ConfigError, InputError, WaitTimeoutError, WorkerError
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.methods.rl.rollout_method import refuse_async
from rlctl.rollouts import asynchronous, scored_groups
from rlctl.rollouts.asynchronous import GROUPS_FILE, AsynchronousSource
from rlctl.rollouts.scored_groups import Scorers
from rlctl.rollouts.source import RolloutBatch, sample_seed
from rlctl.telemetry.phases import StepTimer
from support.toy_sources import VERSION, Prompts, Scorer, answer


class Call:
    """A call of an engine, which ends when the test says so."""

    def __init__(self, engine: str, ready: Callable[[Call], list[SampledGroup] | None]):
        self.engine, self.ready, self.call = engine, ready, self
        self.until = math.inf

    def late(self) -> WaitTimeoutError:
        return WaitTimeoutError(f"{self.engine} did not answer")

    def results(self) -> list[SampledGroup]:
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
        self.hung: set[str] = set()
        self.awake = True
        self.chance = random.Random(7)

    def allow(self, *positions: int) -> None:
        self.allowed |= set(positions)

    def submit(self, engine: str, requests: Sequence[GroupRequest], _: Any) -> None:
        assert self.awake
        self.begun += requests
        self.held[engine] += requests

    def collect(self, engine: str, *_: Any) -> Call:
        call = Call(engine, self._first)
        if engine in self.hung:
            call.ready, call.until = lambda _: None, time.monotonic()
        return call

    def _may(self, request: GroupRequest) -> bool:
        return self.all_allowed or request.group in self.allowed

    def _first(self, call: Call) -> list[SampledGroup] | None:
        if call.engine in self.dead:
            raise WorkerError(f"{call.engine} is gone")
        if not self.awake:
            call.ready = lambda _: []
            return []
        free = [request for request in self.held[call.engine] if self._may(request)]
        if not free:
            return None
        request = self.chance.choice(free)
        self.held[call.engine].remove(request)
        found = [answer(request)]
        call.ready = lambda _: found
        return found


class Sync:
    """Replaces a lost engine by another; lets engines sleep where they share devices with the policy."""

    def __init__(self, engines: Engines, *, takes_turns: bool) -> None:
        self.engines, self.takes_turns, self.recovered = engines, takes_turns, []
        self.before_refit: Callable[[], None] = lambda: None
        engines.awake = not takes_turns

    @contextlib.contextmanager
    def generating(self) -> Iterator[int]:
        self.engines.awake = True
        yield 7
        self.engines.awake = not self.takes_turns

    def recover(self, error: Exception, version: int) -> None:
        self.recovered.append(version)
        lost = (self.engines.dead or self.engines.hung).pop()
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

    def build(
        in_flight: str = "keep",
        *,
        steps: int = 100,
        turns: bool = False,
        trains_on: Callable[[RolloutGroup], bool] = lambda group: True,
        sections: dict[str, Any] | None = None,
        fails: Callable[[int], bool] = lambda position: False,
        compares: bool = False,
        **rollouts: Any,
    ) -> tuple[AsynchronousSource, Engines, Sync]:
        told: list[str] = []
        config = RlConfig.model_validate({
            "batch": {"prompts": 2, "generations": 2}, "run": {"seed": 5, "steps": steps},
            "refit": {"in_flight": in_flight}, "rollouts": {"mode": "async", **rollouts}, **(sections or {}),
        })  # fmt: skip
        engines, scorer = Engines(), Scorer(fails)
        workers = Scorers(scorer, compares=compares)  # type: ignore[arg-type]
        sync = Sync(engines, takes_turns=turns)
        source: Any = AsynchronousSource(
            config, Prompts(), engines, workers, sync, StepTimer(), trains_on, told.append  # type: ignore[arg-type]
        )  # fmt: skip
        source.told, source.calls = told, scorer.calls
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
    wait(lambda: len(source._finished) == 3)
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
    wait(lambda: len(source._finished) == 1)
    engines.allow(1)
    thread.join(30)
    assert positions(found[0]) == [3, 1]
    engines.allow(4, 5, 2)
    thread, found = later(source, 1)  # 0 and 2 were begun one version ago
    wait(lambda: len(source._finished) == 3)
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


def test_groups_pause_while_the_policy_has_the_devices_and_go_on_afterwards(make: Any) -> None:
    source, engines, _ = make("keep", order="arrival", turns=True)
    engines.all_allowed = False
    engines.allow(2, 3)
    first = source.next(0)
    assert sorted(positions(first)) == [2, 3]
    assert first.metrics["offloaded_bytes"] == 7
    engines.allow(0)
    time.sleep(0.05)
    assert len(source._finished) == 0  # the policy trains
    thread, found = later(source, 1)
    wait(lambda: len(source._finished) == 1)
    engines.allow(1)
    thread.join(30)
    assert sorted(positions(found[0])) == [0, 1]
    assert sorted(request.group for request in engines.begun) == list(range(6))  # 0 and 1 once


def test_devices_are_given_back_when_nothing_is_under_way_where_that_is_waited_for(make: Any) -> None:
    source, engines, _ = make("wait", turns=True)
    source.next(0)
    engines.all_allowed = False
    thread, found = later(source, 1)  # 2 and 3 are there
    wait(lambda: len(engines.begun) == 6)
    thread.join(0.1)
    assert not found
    engines.allow(4, 5)
    thread.join(30)
    assert positions(found[0]) == [2, 3]
    assert not engines.awake


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


SOON_LATE = {"cluster": {"step_timeout_s": 10.0}, "reward": {"timeout_s": 10.0}}
"""Limits that are beyond any test, and within patience where a test fails."""


@pytest.mark.parametrize("in_flight", ["wait", "keep"])
def test_an_engine_that_hangs_is_lost_at_the_limit_of_its_call(make: Any, in_flight: str) -> None:
    source, engines, sync = make(in_flight)
    engines.hung.add("a")
    batch = source.next(0)
    assert sync.recovered == [0]
    assert positions(batch) == [0, 1]


def test_a_lost_engine_is_replaced_when_the_others_can_answer(make: Any) -> None:
    """These sample under the old weights alone."""
    source, engines, sync = make("wait")
    engines.all_allowed = False
    engines.dead.add("a")
    thread, found = later(source, 0)
    wait(lambda: len(engines.begun) == 4)
    time.sleep(0.2)
    assert sync.recovered == []
    engines.all_allowed = True
    thread.join(30)
    assert sync.recovered == [0]
    assert positions(found[0]) == [0, 1]


def test_an_engine_and_the_policy_that_are_lost_together_cost_no_group(make: Any) -> None:
    """The refit of the new engine fails; the batch is asked for again when the policy is back."""
    source, engines, sync = make()
    recover = sync.recover

    def fail_after(error: Exception, version: int) -> None:
        recover(error, version)
        sync.recover = recover
        raise WorkerError("policy rank 0 died")

    engines.dead.add("a")
    sync.recover = fail_after
    with pytest.raises(WorkerError, match="policy rank 0 died"):
        source.next(0)
    assert positions(source.next(0)) == [0, 1]
    assert positions(source.next(1)) == [2, 3]
    assert sync.recovered == [0]


@pytest.mark.parametrize("in_flight", ["wait", "keep"])
def test_a_scorer_that_is_lost_with_the_policy_scores_again_when_it_is_back(
    make: Any, monkeypatch: pytest.MonkeyPatch, in_flight: str
) -> None:
    source, _, _ = make(in_flight)
    score, dead = source._groups.scored, [True]

    def scored(*given: Any) -> Any:
        if dead:
            raise WorkerError("reward rank 0 died")
        return score(*given)

    monkeypatch.setattr(source._groups, "scored", scored)
    for _ in range(2):  # it is not back the second time
        with pytest.raises(WorkerError, match="reward rank 0 died"):
            source.next(0)
    dead.clear()
    assert [positions(source.next(version)) for version in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_an_error_of_a_scorer_ends_the_wait(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "MARGIN_S", 0.0)

    def fail(*_: Any) -> Any:
        raise InputError("the reward function raised")

    source, _, _ = make(sections=SOON_LATE)
    monkeypatch.setattr(source._groups, "scored", fail)
    with pytest.raises(InputError, match="the reward function raised"):
        source.next(0)


def test_a_group_does_not_wait_until_all_that_were_sampled_are_scored(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _, _ = make("wait", max_staleness=3)
    scored, free = source._groups.scored, threading.Semaphore(0)

    def one_by_one(results: Sequence[SampledGroup], rows: Any) -> Any:
        free.acquire()
        return scored(results, rows)

    monkeypatch.setattr(source._groups, "scored", one_by_one)
    thread, found = later(source, 0)
    wait(lambda: len(source._sampled) == 8)
    free.release(2)
    thread.join(30)  # the oldest are scored first
    assert positions(found[0]) == [0, 1]
    assert len(source._sampled) == 6
    free.release(6)


@pytest.mark.parametrize("in_flight", ["keep", "wait"])
@pytest.mark.parametrize("order", ["position", "arrival"])
def test_a_function_of_completions_is_called_once_for_each_batch(make: Any, in_flight: str, order: str) -> None:
    """The synchronous source calls it with the prompts of each step in order."""
    source, engines, _ = make(in_flight, max_staleness=3, order=order, steps=6, compares=True)
    engines.all_allowed = False
    thread, found = later(source, 0)
    wait(lambda: len(engines.begun) == 8)
    engines.allow(3, 5, 0)
    time.sleep(0.05)
    assert source.calls == []  # of no batch are both groups sampled
    engines.all_allowed = True
    thread.join(30)
    assert len(positions(found[0])) == 2
    for version in range(1, 6):
        source.next(version)
    assert sorted(source.calls) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_a_function_of_completions_gets_the_replacements_of_a_round(make: Any) -> None:
    def trains_on(group: RolloutGroup) -> bool:
        return group.position not in (0, 1, 3)

    sections = {"filter": {"groups": "replace", "max_rounds": 4}}
    source, _, _ = make("wait", steps=1, max_staleness=0, trains_on=trains_on, sections=sections, compares=True)
    assert sorted(positions(source.next(0))) == [0, 1, 2, 3, 4]
    assert source.calls == [[0, 1], [2, 3], [4]]


def test_a_function_of_completions_waits_for_a_lost_engine(make: Any) -> None:
    source, engines, _ = make("wait", max_staleness=1, steps=3, compares=True)
    engines.dead.add("a")
    assert positions(source.next(0)) == [0, 1]
    source.state()
    assert [positions(source.next(version)) for version in (1, 2)] == [[2, 3], [4, 5]]
    assert sorted(source.calls) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("order", ["position", "arrival"])
@pytest.mark.parametrize("in_flight", ["wait", "keep"])
def test_however_often_a_run_is_cut_off_each_position_is_trained_once(
    make: Any, tmp_path: Path, order: str, in_flight: str
) -> None:
    """The run goes on from its newest checkpoint; what came after it is forgotten."""
    chance = random.Random(7)
    source, _, _ = make(in_flight, order=order, max_staleness=2, steps=40)
    trained: list[list[int]] = []
    kept: tuple[int, dict[str, Any]] | None = None
    while len(trained) < 40:
        trained.append(positions(source.next(len(trained))))
        if chance.random() < 0.4:
            kept = len(trained), json.loads(json.dumps(source.state()))
            source.write(tmp_path)
        if kept and chance.random() < 0.3:
            source.close()
            source, _, _ = make(in_flight, order=order, max_staleness=2, steps=40)
            trained = trained[: kept[0]]
            source.restore(kept[1], tmp_path)
    flat = [position for batch in trained for position in batch]
    assert (flat if order == "position" else sorted(flat)) == list(range(80))


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("in_flight", ["wait", "keep"])
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_no_group_is_trained_on_later_than_its_age_allows_whatever_finishes_first(
    make: Any, in_flight: str, limit: int, turns: bool
) -> None:
    source, engines, _ = make(in_flight, order="arrival", max_staleness=limit, steps=30, turns=turns)
    batches = [source.next(version) for version in range(30)]
    ages = [batch.metrics["versions_since_admission"] for batch in batches]
    assert max(ages) == limit
    assert sorted(position for batch in batches for position in positions(batch)) == list(range(60))
    assert len(engines.begun) == 60  # nothing is sampled that no step trains on


def replacing(max_rounds: int = 5) -> dict[str, Any]:
    return {"filter": {"groups": "replace", "max_rounds": max_rounds}}


def without_thirds(group: RolloutGroup) -> bool:
    return group.position % 3 != 0


@pytest.mark.parametrize("order", ["position", "arrival"])
@pytest.mark.parametrize("in_flight", ["wait", "keep"])
def test_groups_that_are_not_trained_on_are_replaced_and_handed_over_too(make: Any, in_flight: str, order: str) -> None:
    source, _, _ = make(
        in_flight, order=order, max_staleness=2, steps=20, trains_on=without_thirds, sections=replacing()
    )
    trained: list[int] = []
    for version in range(20):
        batch = source.next(version)
        assert sum(map(without_thirds, batch.groups)) == 2
        assert batch.metrics["missing_groups"] == 0
        assert batch.metrics["sampling_rounds"] == -(-len(batch.groups) // 2)
        ages = batch.metrics["versions_since_admission"]
        assert ages <= 2
        trained += positions(batch)
    assert len(set(trained)) == len(trained)
    if order == "position":
        assert trained == list(range(len(trained)))


def test_a_batch_that_does_not_fill_is_returned_after_its_rounds(make: Any) -> None:
    source, _, _ = make("wait", trains_on=lambda group: False, sections=replacing(2), steps=5)
    for version in range(5):
        batch = source.next(version)
        assert positions(batch) == list(range(4 * version, 4 * version + 4))
        assert (batch.metrics["sampling_rounds"], batch.metrics["missing_groups"]) == (2, 2)
        assert batch.metrics["versions_since_admission"] <= 1


@pytest.mark.parametrize("cut", [(), (3, 4, 8)])
def test_replaced_groups_and_prompts_that_follow_from_them_are_the_same_in_every_run(
    make: Any, tmp_path: Path, cut: tuple[int, ...]
) -> None:
    """Nothing depends on what finishes first, nor on where a run was killed. The numbers of prompts follow from how
    many groups were observed, as an order by pass rates does from their rewards."""

    def sources(seed: int) -> tuple[AsynchronousSource, Engines]:
        source, engines, _ = make("wait", max_staleness=2, trains_on=without_thirds, sections=replacing(), steps=12)
        engines.chance = random.Random(seed)
        return source, engines

    def told(batch: RolloutBatch, engines: Engines) -> Any:
        asked = {request.group: request.prompt_tokens for request in engines.begun}
        return positions(batch), batch.metrics["versions_since_admission"], [asked.get(p) for p in positions(batch)]

    def taken(source: AsynchronousSource, version: int) -> RolloutBatch:
        batch = source.next(version)
        source.wait_for_samples()  # the refit
        return batch

    whole, engines = sources(0)
    expected = [told(taken(whole, version), engines) for version in range(12)]
    assert expected[0][2] == [(0, 0), (1, 0), (2, 0)]
    source, engines = sources(1)
    for version in range(12):
        if version in cut:
            state = json.loads(json.dumps(source.state()))
            source.write(tmp_path)
            source.close()
            source, engines = sources(version)
            source.restore(state, tmp_path)
        found = told(taken(source, version), engines)
        assert found[:2] == expected[version][:2]
        assert all(one in (None, other) for one, other in zip(found[2], expected[version][2], strict=True))


def test_who_waits_for_whom_is_said_after_a_quiet_minute(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "QUIET_S", 0.02)
    monkeypatch.setattr(asynchronous, "LOOK_S", 0.005)
    source, engines, sync = make("wait")
    engines.all_allowed = False
    thread, _ = later(source, 0)
    wait(lambda: len(source.told) > 1)
    assert "the policy has waited" in source.told[0]
    assert source.told[0].endswith("engine 0 samples 2 group(s), engine 1 samples 2 group(s), the scorer has 0")
    engines.allow(0, 2)  # those of engine a
    settling = threading.Thread(target=sync.before_refit, daemon=True)
    settling.start()
    wait(lambda: source.told[-1].startswith("the refit has waited") and "engine 0 samples 0" in source.told[-1])
    engines.all_allowed = True
    settling.join(30)
    thread.join(30)


def test_a_wait_in_which_nothing_ever_finishes_ends(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "LOOK_S", 0.005)
    monkeypatch.setattr(asynchronous, "MARGIN_S", 0.0)
    sections = {"cluster": {"step_timeout_s": 0.05}, "reward": {"timeout_s": 0.05}}
    source, engines, _ = make(sections=sections)
    engines.all_allowed = False
    with pytest.raises(WaitTimeoutError, match=r"No group .* engine 0 samples 2 group\(s\)"):
        source.next(0)


@pytest.mark.parametrize("wanted", ["next", "wait_for_samples"])
def test_nobody_waits_for_rollouts_whose_producer_is_gone(
    make: Any, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    def gone(*_: Any) -> list[Call]:
        raise RuntimeError("the thread is gone")

    source, _, _ = make("wait", max_staleness=0, sections=SOON_LATE)
    source.next(0)
    trained = source.state()["trained"]
    monkeypatch.setattr(asynchronous, "MARGIN_S", 0.0)
    monkeypatch.setattr(asynchronous, "first_done", gone)
    asked = [lambda: source.next(1)] + [getattr(source, wanted)] * (wanted != "next")
    for ask in asked:
        with pytest.raises(RuntimeError, match="the thread is gone"):
            ask()
    # The last step can still be saved: two prompts a step, so a resume asks for positions 2 and 3 again.
    state = source.state()
    assert (state["trained"], state["under_way"], state["finished"]) == (trained, [[2, 3]], [])


def test_what_the_driver_holds_does_not_grow_with_the_run(make: Any) -> None:
    source, engines, _ = make(order="arrival", max_staleness=2, steps=200, compares=True)

    def held() -> int:
        ledger = source._ledger
        parts = [source._admitted, source._calls, source._held, source._sampled, source._finished, source._unfit]
        parts += [source._lost, source._together, ledger.finished, ledger.under_way, ledger._handed_over, ledger._again]
        return sum(map(len, [*parts, *source._asked.values()]))

    most, sizes = 0, []
    tracemalloc.start()
    for version in range(150):
        source.next(version)
        engines.begun.clear()
        source.calls.clear()
        with source._changed:
            most = max(most, held())
        if version in (49, 149):
            gc.collect()
            snapshot = tracemalloc.take_snapshot()  # threads of earlier tests allocate too, outside of rlctl
            traced = snapshot.filter_traces([tracemalloc.Filter(True, "*/rlctl/*")])
            sizes.append(sum(trace.size for trace in traced.traces))
    tracemalloc.stop()
    assert most < 40
    assert sizes[1] - sizes[0] < 100 * 100  # bytes; the scalars of a batch alone are more


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


def test_a_rollout_on_which_a_reward_function_failed_is_left_out_before_and_after_a_resume(
    make: Any, tmp_path: Path
) -> None:
    source, _, _ = make("wait", fails=lambda position: position == 3)
    assert source.next(0).metrics["dropped_rollouts"] == 0
    state = source.state()
    source.write(tmp_path)
    again, _, _ = make("wait")
    again.restore(json.loads(json.dumps(state)), tmp_path)
    for batch in (source.next(1), again.next(1)):
        assert [len(group.rollouts) for group in batch.groups] == [2, 1]
        assert (batch.metrics["dropped_rollouts"], batch.metrics["reward_error"]) == (1, "no number in 3")
    first, _, _ = make(fails=lambda position: position == 1)
    with pytest.raises(InputError, match="no number in 1"):
        first.next(0)


@pytest.mark.parametrize("order", ["position", "arrival"])
def test_a_checkpoint_after_a_failing_reward_asks_for_its_groups_again(make: Any, order: str, tmp_path: Path) -> None:
    failing, _, _ = make("wait", order=order, steps=12, fails=lambda position: position >= 2)
    trained = positions(failing.next(0))
    with contextlib.suppress(InputError):
        for version in range(1, 12):
            trained += positions(failing.next(version))
    assert len(trained) < 24
    state = failing.state()
    failing.write(tmp_path)
    better, _, _ = make("wait", order=order, steps=12)
    better.restore(json.loads(json.dumps(state)), tmp_path)
    version = len(trained) // 2
    batches = [better.next(at) for at in range(version, 12)]
    assert all(len(group.rollouts) == 2 for batch in batches for group in batch.groups)
    assert sorted([*trained, *(one for batch in batches for one in positions(batch))]) == list(range(24))


def test_a_run_of_synchronous_rollouts_goes_on_asynchronously(make: Any, tmp_path: Path) -> None:
    source, engines, _ = make(steps=3)
    source.restore({"trained": [[0, 3]], "finished": [], "under_way": []}, tmp_path)
    assert positions(source.next(2)) == [4, 5]
    assert len(engines.begun) == 2  # of the last step


def test_a_damaged_file_of_finished_groups_is_named(make: Any, tmp_path: Path) -> None:
    source, _, _ = make("wait")
    source.next(0)
    source.write(tmp_path)
    content = bytearray((tmp_path / GROUPS_FILE).read_bytes())
    content[content.index(b'"position"') + 1] ^= 1
    (tmp_path / GROUPS_FILE).write_bytes(content)
    again, _, _ = make("wait")
    with pytest.raises(InputError, match=GROUPS_FILE):
        again.restore(source.state(), tmp_path)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"refit": {"in_flight": "abort"}}, "in_flight = abort"),
        ({"loss": {"importance_correction": "off"}}, "need a correction"),
    ],
)
def test_what_cannot_be_made_while_the_policy_trains_is_refused(sections: Any, words: str) -> None:
    config = RlConfig.model_validate({"rollouts": {"mode": "async"}, **sections})
    with pytest.raises(ConfigError) as caught:
        refuse_async(config)
    assert words in f"{caught.value.message} {caught.value.hint}"
    refuse_async(RlConfig.model_validate(sections))


def test_rollouts_of_older_weights_are_trained_on_without_a_correction_where_that_is_asked_for() -> None:
    sections = {"rollouts": {"mode": "async", "uncorrected": True}, "loss": {"importance_correction": "off"}}
    refuse_async(RlConfig.model_validate(sections))
