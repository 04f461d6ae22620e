"""The synchronous source: what it samples follows from positions alone, and its state is a ledger."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from rlctl.backends.messages import GroupRequest
from rlctl.errors import InputError, WorkerError
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.rollouts import synchronous
from rlctl.rollouts.scored_groups import Scorers
from rlctl.rollouts.source import RolloutBatch, sample_seed
from rlctl.rollouts.synchronous import SynchronousSource
from rlctl.settings.generation import FilterConfig
from rlctl.telemetry.phases import StepTimer
from support.toy_sources import VERSION, Prompts, Scorer, answer

CONFIG = RlConfig.model_validate({"batch": {"prompts": 3, "generations": 2}, "run": {"seed": 5}})


class Turns:
    """Counts the engines' turns; `recover` remembers what it was asked for."""

    def __init__(self) -> None:
        self.recovered: list[int] = []

    refits_next: ClassVar[list[bool]] = []

    @contextlib.contextmanager
    def generating(self, *, refit_next: bool = False) -> Iterator[int]:
        self.refits_next.append(refit_next)
        yield 17

    def recover(self, error: Exception, version: int) -> None:
        self.recovered.append(version)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[GroupRequest]:
    """Every request that the engines get; the first call loses an engine once."""
    seen: list[GroupRequest] = []

    def generate(engines: Any, requests: Sequence[GroupRequest], sampling: Any, timeout_s: float, recover: Any) -> list:
        assert sampling.timeout_s == CONFIG.rollout_timeout_s == CONFIG.cluster.step_limit_s / 2 == timeout_s / 2
        if not seen:
            recover(WorkerError("engine 0 is gone"))
        seen.extend(requests)
        return [answer(request) for request in requests]

    monkeypatch.setattr(synchronous, "generate_groups", generate)
    return seen


def source(turns: Turns | None = None, fails: Callable[[int], bool] = lambda position: False) -> SynchronousSource:
    prompts: Any = Prompts()
    workers: Any = Scorers(Scorer(fails))  # type: ignore[arg-type]
    return SynchronousSource(CONFIG, prompts, SimpleNamespace(), workers, turns or Turns(), StepTimer())  # type: ignore


def test_a_batch_holds_the_scalars_of_its_rollouts(asked: list[GroupRequest]) -> None:
    turns = Turns()
    batch = source(turns).next(VERSION)
    assert turns.recovered == [VERSION]
    assert [group.position for group in batch.groups] == [0, 1, 2]
    first, second = batch.groups[1].rollouts
    assert (first.position, first.sample, first.seed) == (1, 0, sample_seed(5, 1, 0))
    assert (first.prompt_tokens, first.tokens, first.response_tokens) == (2, 5, 2)
    assert (first.first_version, first.versions) == (VERSION, ((VERSION, 2),))
    assert (second.reward, second.terms, second.accuracy, second.truncated) == (1.0, {"half": 0.5}, None, True)
    assert batch.groups[2].prompt.prompt == "question 2"
    assert batch.metrics == {"scorer_failures": 3, "offloaded_bytes": 17, "dropped_rollouts": 0}


def requests_of(batches: int, first: SynchronousSource, cut: int, asked: list[GroupRequest]) -> list[GroupRequest]:
    """What is asked of the engines in `batches` batches, with another source taking over after `cut` of them."""
    asked.clear()
    asked.append(GroupRequest(-1, (), ()))  # no engine is lost
    now = first
    for number in range(batches):
        if number == cut:
            state = json.loads(json.dumps(now.state()))
            now = source()
            now.restore(state, Path())
        _: RolloutBatch = now.next(number)
    return asked[1:]


def test_a_source_that_takes_over_asks_for_what_the_first_would_have(asked: list[GroupRequest]) -> None:
    whole = list(requests_of(5, source(), -1, asked))
    assert [request.group for request in whole] == list(range(15))
    assert requests_of(5, source(), 2, asked) == whole


REPLACES = CONFIG.model_copy(update={"filter": FilterConfig(groups="replace", max_rounds=3)})


def fussy(config: RlConfig = REPLACES, turns: Turns | None = None) -> SynchronousSource:
    """A source whose algorithm trains on the groups at every third position."""
    prompts: Any = Prompts()
    workers: Any = Scorers(Scorer())  # type: ignore[arg-type]
    engines: Any = SimpleNamespace()
    sync: Any = turns or Turns()
    return SynchronousSource(config, prompts, engines, workers, sync, StepTimer(), lambda one: one.position % 3 == 0)


def test_groups_are_replaced_until_the_batch_is_full_or_the_rounds_are_used_up(asked: list[GroupRequest]) -> None:
    made = fussy()
    first = made.next(VERSION)
    assert [one.position for one in first.groups] == [0, 1, 2, 3, 4, 5]  # 0 of three, 3 of two, none of one
    rounds = {"sampling_rounds": 3, "missing_groups": 1}
    assert first.metrics == {"scorer_failures": 6, "offloaded_bytes": 17, "dropped_rollouts": 0, **rounds}
    patient = fussy(REPLACES.model_copy(update={"filter": FilterConfig(groups="replace", max_rounds=9)}))
    full = patient.next(VERSION)
    assert [one.position for one in full.groups] == [0, 1, 2, 3, 4, 5, 6]
    assert (full.metrics["sampling_rounds"], full.metrics["missing_groups"]) == (4, 0)
    assert patient.next(VERSION).groups[0].position == 7
    short = fussy(REPLACES.model_copy(update={"filter": FilterConfig(groups="replace", max_rounds=1)})).next(VERSION)
    assert [one.position for one in short.groups] == [0, 1, 2]
    assert (short.metrics["sampling_rounds"], short.metrics["missing_groups"]) == (1, 2)


@pytest.mark.parametrize("groups", ["keep", "drop"])
def test_groups_that_are_not_replaced_are_sampled_in_one_round(asked: list[GroupRequest], groups: Any) -> None:
    batch = fussy(CONFIG.model_copy(update={"filter": FilterConfig(groups=groups)})).next(VERSION)
    assert [one.position for one in batch.groups] == [0, 1, 2]
    assert batch.metrics == {"scorer_failures": 3, "offloaded_bytes": 17, "dropped_rollouts": 0}


def test_a_resumed_source_replaces_groups_as_the_first_would_have(asked: list[GroupRequest]) -> None:
    whole, cut = fussy(), fussy()
    positions = [[one.position for one in whole.next(VERSION).groups] for _ in range(4)]
    found = [[one.position for one in cut.next(VERSION).groups] for _ in range(2)]
    state = json.loads(json.dumps(cut.state()))
    assert state["trained"] == [[0, found[1][-1]]]
    cut.next(VERSION)  # of a step that is killed before it is saved
    again = fussy()
    again.restore(state, Path())
    found += [[one.position for one in again.next(VERSION).groups] for _ in range(2)]
    assert found == positions


def test_a_state_that_is_no_ledger_is_refused(asked: list[GroupRequest]) -> None:
    with pytest.raises(InputError, match="ledger"):
        source().restore({"trained": [[2, 3]], "finished": [], "under_way": []}, Path())
    with pytest.raises(InputError, match="cannot take them over"):
        source().restore({"trained": [[0, 2]], "finished": [[3, 3]], "under_way": []}, Path())


def test_a_call_that_fails_is_repeated_for_the_same_positions(asked: list[GroupRequest]) -> None:
    """The policy is lost when it is to take the devices, with all groups sampled."""
    turns = Turns()
    generating, fails = turns.generating, [True]

    @contextlib.contextmanager
    def lost(*, refit_next: bool = False) -> Iterator[int]:
        with generating() as freed:
            yield freed
        if fails:
            fails.clear()
            raise WorkerError("policy rank 0 died")

    turns.generating = lost  # type: ignore[method-assign]
    sampled = source(turns)
    with pytest.raises(WorkerError, match="policy rank 0 died"):
        sampled.next(VERSION)
    assert [group.position for group in sampled.next(VERSION).groups] == [0, 1, 2]
    assert [group.position for group in sampled.next(VERSION).groups] == [3, 4, 5]
    assert asked[:3] == asked[3:6]


def test_seeds_differ_in_every_coordinate_and_repeat() -> None:
    seeds = {sample_seed(*place) for place in np.ndindex(4, 5, 6)}
    assert len(seeds) == 4 * 5 * 6
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_reward_function_that_fails_in_the_first_batch_ends_the_run(asked: list[GroupRequest]) -> None:
    with pytest.raises(InputError, match=r"no number in 2.*reward\.on_error=zero"):
        source(fails=lambda position: position == 2).next(VERSION)


def test_later_rollouts_are_left_out_until_too_many_of_ten_batches_fail(asked: list[GroupRequest]) -> None:
    """Three of 60 may fail. Whether the run is resumed in between changes nothing."""

    def fails(position: int) -> bool:
        return position in (4, 13, 14, 20)

    made = source(fails=fails)
    made.next(VERSION)
    second = made.next(VERSION)
    assert [len(group.rollouts) for group in second.groups] == [2, 1, 2]
    assert (second.metrics["dropped_rollouts"], second.metrics["reward_error"]) == (1, "no number in 4")
    for _ in range(3):
        made.next(VERSION)
    state = json.loads(json.dumps(made.state()))
    made = source(fails=fails)
    made.restore(state, Path())
    made.next(VERSION)
    with pytest.raises(InputError, match=r"failed on 4 rollouts of the last 7 batches.*no number in 20"):
        made.next(VERSION)


def test_a_checkpoint_after_a_failing_reward_asks_for_its_groups_again(asked: list[GroupRequest]) -> None:
    failing = source(fails=lambda position: position >= 3)
    assert [one.position for one in failing.next(0).groups] == [0, 1, 2]
    for version in range(1, 20):
        try:
            last = [one.position for one in failing.next(version).groups]
        except InputError:
            break
    better = source()
    better.restore(json.loads(json.dumps(failing.state())), Path())
    positions = [[one.position for one in better.next(version).groups] for version in range(12)]
    assert positions[0] == [one + 3 for one in last]
    assert positions[-1] == [one + 36 for one in last]
