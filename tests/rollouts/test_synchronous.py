"""The synchronous source: what it samples follows from positions alone, and its state is a ledger."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlctl.backends.messages import GroupRequest, GroupResult
from rlctl.config.schema import RlctlConfig
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import RolloutColumns, RolloutGroup
from rlctl.envs.reward_worker import GroupScores, ScoreRequest
from rlctl.errors import InputError, WorkerError
from rlctl.rollouts import synchronous
from rlctl.rollouts.source import RolloutBatch, sample_seed
from rlctl.rollouts.synchronous import SynchronousSource
from rlctl.telemetry.phases import StepTimer

CONFIG = RlctlConfig.model_validate({"batch": {"prompts": 3, "generations": 2}, "run": {"seed": 5}})
VERSION = 4


class Prompts:
    """A stream of numbered prompts, whose order follows from what was observed: each prompt's number is one more for
    every group so far."""

    encoder = SimpleNamespace(stop=(), stop_token_ids=())

    def __init__(self) -> None:
        self.observed = 0

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        self.observed += len(groups)

    def state(self) -> dict[str, int]:
        return {"": self.observed}

    def restore(self, state: Mapping[str, int]) -> None:
        self.observed = state.get("", 0)

    def prompt_at(self, position: int) -> PromptRow:
        return PromptRow(position % 7, f"row {position % 7}", f"question {position}", None)

    def tokens(self, row: PromptRow) -> list[int]:
        return [row.index, self.observed]


class Turns:
    """Counts the engines' turns; `recover` remembers what it was asked for."""

    def __init__(self) -> None:
        self.recovered: list[int] = []

    @contextlib.contextmanager
    def generating(self) -> Iterator[int]:
        yield 17

    def recover(self, error: Exception, version: int) -> None:
        self.recovered.append(version)


class Scorer:
    """Gives each completion of a group its number as its reward."""

    def within(self, timeout_s: float) -> Scorer:
        return self

    def call(self, method: object, requests: Sequence[ScoreRequest]) -> list[list[GroupScores]]:
        return [[GroupScores((0.0, 1.0), None, {"half": (0.0, 0.5)}, 1) for _ in requests]]


def answer(request: GroupRequest) -> GroupResult:
    """Samples of three tokens, of which the policy chose the first and the last."""
    prompt, samples = len(request.prompt_tokens), len(request.seeds)
    length = prompt + 3
    mask = np.tile(np.array([False] * prompt + [True, False, True]), samples)
    versions = np.where(mask, VERSION, -1).astype(np.int32)
    columns = RolloutColumns(
        np.zeros(samples * length, np.int32), np.arange(samples + 1, dtype=np.int32) * length, mask,
        np.zeros(samples * length, np.float32), versions,
    )  # fmt: skip
    return GroupResult.of(request, columns, ["a"] * samples, ["stop", "length"], 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[GroupRequest]:
    """Every request that the engines get; the first call loses an engine once."""
    seen: list[GroupRequest] = []

    def generate(engines: Any, requests: Sequence[GroupRequest], sampling: Any, timeout_s: float, recover: Any) -> list:
        if not seen:
            recover(WorkerError("engine 0 is gone"))
        seen.extend(requests)
        return [answer(request) for request in requests]

    monkeypatch.setattr(synchronous, "generate_groups", generate)
    return seen


def source(turns: Turns | None = None) -> SynchronousSource:
    prompts: Any = Prompts()
    workers: Any = Scorer()
    return SynchronousSource(CONFIG, prompts, SimpleNamespace(), workers, turns or Turns(), StepTimer())  # type: ignore


def test_a_batch_holds_the_scalars_of_its_rollouts(asked: list[GroupRequest]) -> None:
    turns = Turns()
    batch = source(turns).next(VERSION)
    assert turns.recovered == [VERSION]
    assert [group.position for group in batch.groups] == [0, 1, 2]
    first, second = batch.groups[1].rollouts
    assert (first.position, first.sample, first.seed) == (1, 0, sample_seed(5, 1, 0))
    assert (first.prompt_tokens, first.tokens, first.response_tokens) == (2, 5, 2)
    assert (first.first_version, first.last_version) == (VERSION, VERSION)
    assert (second.reward, second.terms, second.accuracy, second.truncated) == (1.0, {"half": 0.5}, None, True)
    assert batch.groups[2].prompt.prompt == "question 2"
    assert batch.metrics == {"scorer_failures": 3, "offloaded_bytes": 17}


def requests_of(batches: int, first: SynchronousSource, cut: int, asked: list[GroupRequest]) -> list[GroupRequest]:
    """What is asked of the engines in `batches` batches, with another source taking over after `cut` of them."""
    asked.clear()
    asked.append(GroupRequest(-1, (), ()))  # no engine is lost
    now = first
    for number in range(batches):
        if number == cut:
            state = json.loads(json.dumps(now.state()))
            now = source()
            now.restore(state)
        _: RolloutBatch = now.next(number)
    return asked[1:]


def test_a_source_that_takes_over_asks_for_what_the_first_would_have(asked: list[GroupRequest]) -> None:
    whole = list(requests_of(5, source(), -1, asked))
    assert [request.group for request in whole] == list(range(15))
    assert requests_of(5, source(), 2, asked) == whole


def test_a_state_that_is_no_ledger_is_refused(asked: list[GroupRequest]) -> None:
    with pytest.raises(InputError, match="ledger"):
        source().restore({"trained": [[2, 3]], "finished": [], "under_way": []})
    with pytest.raises(InputError, match="cannot take them over"):
        source().restore({"trained": [[0, 2]], "finished": [[3, 3]], "under_way": []})


def test_seeds_differ_in_every_coordinate_and_repeat() -> None:
    seeds = {sample_seed(*place) for place in np.ndindex(4, 5, 6)}
    assert len(seeds) == 4 * 5 * 6
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)
