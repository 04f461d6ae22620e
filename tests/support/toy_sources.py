"""What stands for prompts, engines and scorers where sources of rollouts are tested by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import numpy as np

from rlctl.backends.messages import GroupRequest, SampledGroup
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import RolloutColumns, RolloutGroup
from rlctl.rewards.reward_worker import GroupScores, ScoreRequest

VERSION = 4


class Prompts:
    """A stream of numbered prompts, whose order follows from what was observed: each prompt's number is one more for
    every group so far."""

    encoder = SimpleNamespace(stop=(), stop_token_ids=(), never_sampled=())
    environment = None

    def __init__(self) -> None:
        self.observed = 0

    def group_request(self, position: int, row: PromptRow, seeds: Sequence[int], run_seed: int) -> GroupRequest:
        return GroupRequest(position, tuple(self.tokens(row)), tuple(seeds))

    def failing_shares(self) -> dict[str, float]:
        return {"": 0.05}

    def environment_digests(self) -> dict[str, str]:
        return {"": ""}

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        self.observed += len(groups)

    def state(self, since: int = 0) -> dict[str, int]:
        return {"": self.observed}

    def restore(self, state: Mapping[str, int]) -> None:
        self.observed = state.get("", 0)

    def prompt_at(self, position: int) -> PromptRow:
        return PromptRow(position % 7, f"row {position % 7}", f"question {position}", None)

    def tokens(self, row: PromptRow) -> list[int]:
        return [row.index, self.observed]


class Scorer:
    """Gives each completion of a group its number as its reward, and fails on the second one of some questions."""

    def __init__(self, fails: Callable[[int], bool] = lambda position: False) -> None:
        self._fails = fails
        self.calls: list[list[int]] = []
        """The numbers of the questions of each call."""

    def within(self, timeout_s: float) -> Scorer:
        return self

    def call(self, method: object, requests: Sequence[ScoreRequest], _: object) -> list[list[GroupScores]]:
        numbers = [int(str(request.row.prompt).split()[-1]) for request in requests]
        self.calls.append(numbers)
        return [[self._scores(number) for number in numbers]]

    def _scores(self, position: int) -> GroupScores:
        if self._fails(position):
            return GroupScores((0.0, None), None, {"half": (0.0, None)}, 1, (f"no number in {position}",))
        return GroupScores((0.0, 1.0), None, {"half": (0.0, 0.5)}, 1)


def answer(request: GroupRequest) -> SampledGroup:
    """Samples of three tokens. The policy chose the first and the last."""
    prompt, samples = len(request.prompt_tokens), len(request.seeds)
    length = prompt + 3
    mask = np.tile(np.array([False] * prompt + [True, False, True]), samples)
    versions = np.where(mask, VERSION, -1).astype(np.int32)
    columns = RolloutColumns(
        np.zeros(samples * length, np.int32), np.arange(samples + 1, dtype=np.int32) * length, mask,
        np.zeros(samples * length, np.float32), versions,
    )  # fmt: skip
    return SampledGroup(
        request.group, columns, ["a"] * samples, prompt, (length,) * samples, (2,) * samples, ("stop", "length"),
        (((VERSION, 2),),) * samples, (None,) * samples,
    )  # fmt: skip
