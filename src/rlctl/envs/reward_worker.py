"""The worker that scores a step's completions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from rlctl.config.schema import RewardTerm
from rlctl.data.prompt_rows import PromptRow
from rlctl.envs.scorers import MixedRewards, RewardPlan, Rewards
from rlctl.envs.scoring_process import Score, ScoringProcess, Work
from rlctl.envs.user_function import LARGEST_REWARD, TURNS
from rlctl.errors import InputError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoreRequest:
    """The completions of one group."""

    row: PromptRow
    texts: object
    """Handle of the completions, `list[str]` of length G."""
    turns: object | None = None
    """Handle of the episodes turn by turn, `list[list[Turn]]` of length G; None: they have one turn."""


@dataclass(frozen=True)
class GroupScores:
    """Scores of one group, rollout by rollout."""

    rewards: tuple[float | None, ...]
    """None where a function of the user's failed and the rollout is to be dropped."""
    accuracies: tuple[float, ...] | None
    """1 where the reference scorer says the completion is right, else 0; None where there is no such scorer."""
    terms: dict[str, tuple[float | None, ...]]
    """Score of each reward term before its weight, by its label; None where it does not apply."""
    failures: int = 0
    """Completions on which a scorer failed, and which count as wrong for it or are dropped."""
    dropped: tuple[str, ...] = ()
    """Why the user's function failed on each rollout that is to be dropped."""
    answered: tuple[bool, ...] | None = None
    """Whether there is an answer that the reference scorer can read; None where there is no such scorer."""


class RewardWorker:
    """Scores completions where they are fetched, so that texts do not pass through the driver."""

    def __init__(self, plan: Rewards, fetch: Callable[[object], list[Any]]) -> None:
        """`fetch` turns a handle of texts into the texts."""
        self._fetch = fetch
        plans = plan.plans if isinstance(plan, MixedRewards) else {"": plan}
        self._processes = {source: ScoringProcess(one) for source, one in plans.items()}
        self._logged: set[str] = set()

    def setup(self) -> None:
        """Starts the scorers, so that the first step does not wait for their imports."""
        for process in self._processes.values():
            process.start()

    def score(self, requests: Sequence[ScoreRequest]) -> list[GroupScores]:
        """Return scores of each group, in the order of `requests`; errors are those of `ScoringProcess.score`."""
        found: dict[int, GroupScores] = {}
        for source, process in self._processes.items():
            plan = process.plan
            texts = {i: self._fetch(one.texts) for i, one in enumerate(requests) if one.row.source == source}
            rows = {i: self._rows(requests[i], len(group)) for i, group in texts.items()}
            work = [
                Work(scorer, text, row)
                for i, group in texts.items()
                for scorer in range(len(plan.scorers))
                for text, row in zip(group, rows[i], strict=True)
            ]
            scores = iter(process.score(work) if work else ())
            for i, group in texts.items():
                by_scorer = [list(islice(scores, len(group))) for _ in plan.scorers]
                found[i] = self._group_scores(plan, requests[i], group, by_scorer)
        return [found[i] for i in range(len(requests))]

    def _rows(self, request: ScoreRequest, rollouts: int) -> list[PromptRow]:
        """Return the row of each rollout: the group's, with the turns of its own episode where there are several."""
        if request.turns is None:
            return [request.row] * rollouts
        episodes = [[asdict(turn) for turn in turns] for turns in self._fetch(request.turns)]
        return [replace(request.row, fields={**request.row.fields, TURNS: turns}) for turns in episodes]

    def _group_scores(
        self, plan: RewardPlan, request: ScoreRequest, texts: Sequence[str], scores_by_scorer: list[list[Score]]
    ) -> GroupScores:
        """Return the scores of a group; the first failure of each scorer is logged."""
        named = list(zip(plan.scorers, scores_by_scorer, strict=True))
        values = {name: tuple(score.value for score in scores) for name, scores in named}
        failed = {name: [score.failure for score in scores if score.failure is not None] for name, scores in named}
        for name, failures in failed.items():
            if failures and name not in self._logged:
                self._logged.add(name)
                log.warning("scorer %s failed on a completion of %s: %s", name, request.row.where, failures[0])
        lost = [
            next((one.failure for one in scores if one.failure is not None and one.value is None), None)
            for scores in zip(*scores_by_scorer, strict=True)
        ]
        rollouts = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        right = None if plan.accuracy_by is None else values[plan.accuracy_by]
        return GroupScores(
            rewards=tuple(
                None if why else weighted_sum(plan.terms, scores, request.row)
                for scores, why in zip(rollouts, lost, strict=True)
            ),
            accuracies=None if right is None else tuple(float(value is not None and value >= 1.0) for value in right),
            terms=dict(zip(plan.labels, values.values(), strict=True)),
            answered=plan.answers(texts),
            failures=sum(map(len, failed.values())),
            dropped=tuple(filter(None, lost)),
        )

    def close(self) -> None:
        """Ends the scoring processes."""
        for process in self._processes.values():
            process.close()


def weighted_sum(terms: Sequence[RewardTerm], scores: Mapping[str, float | None], row: PromptRow) -> float:
    """Return the weighted sum of the terms that apply. Raises InputError where none does, or it is too large."""
    applying = [(term, value) for term in terms if (value := scores[term.name]) is not None]
    if not applying:
        raise InputError(
            f"No reward applies to {row.where}: {', '.join(term.name for term in terms)} returned None.",
            "Return a number for every row, add another --reward, or leave the row out.",
        )
    reward = sum(term.weight * value for term, value in applying)
    if not abs(reward) <= LARGEST_REWARD:
        parts = " + ".join(f"{term.weight:g} x {value:g} ({term.name})" for term, value in applying)
        raise InputError(
            f"The reward for {row.where} is {reward:g}: {parts}.",
            f"Lower the weights in --reward: a reward is between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}.",
        )
    return reward
