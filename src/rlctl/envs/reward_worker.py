"""The worker that scores a step's completions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from rlctl.data.prompt_rows import PromptRow
from rlctl.envs.scorers import RewardPlan
from rlctl.envs.scoring_process import Score, ScoringProcess, Work
from rlctl.envs.user_function import LARGEST_REWARD
from rlctl.errors import InputError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoreRequest:
    """The completions of one group."""

    row: PromptRow
    texts: object
    """Handle of the completions, `list[str]` of length G."""


@dataclass(frozen=True)
class GroupScores:
    """Scores of one group, rollout by rollout."""

    rewards: tuple[float, ...]
    accuracies: tuple[float, ...] | None
    """1 where the reference scorer says the completion is right, else 0; None where there is no such scorer."""
    terms: dict[str, tuple[float, ...]]
    """Score of each reward term before its weight."""
    failures: int = 0
    """Completions on which a built-in scorer failed, and which count as wrong for it."""


class RewardWorker:
    """Scores completions where they are fetched, so that texts do not pass through the driver."""

    def __init__(self, plan: RewardPlan, fetch: Callable[[object], list[str]]) -> None:
        """`fetch` turns a handle of texts into the texts."""
        self._plan, self._fetch = plan, fetch
        self._process = ScoringProcess(plan)
        self._logged: set[str] = set()

    def setup(self) -> None:
        """Starts the scorers, so that the first step does not wait for their imports."""
        self._process.start()

    def score(self, requests: Sequence[ScoreRequest]) -> list[GroupScores]:
        """Return scores of each group, in the order of `requests`; errors are those of `ScoringProcess.score`."""
        texts = [self._fetch(request.texts) for request in requests]
        work = [
            Work(scorer, text, request.row)
            for request, group in zip(requests, texts, strict=True)
            for scorer in range(len(self._plan.scorers))
            for text in group
        ]
        scores = iter(self._process.score(work))
        return [
            self._group_scores(request, [list(islice(scores, len(group))) for _ in self._plan.scorers])
            for request, group in zip(requests, texts, strict=True)
        ]

    def _group_scores(self, request: ScoreRequest, scores_by_scorer: list[list[Score]]) -> GroupScores:
        values = {
            name: tuple(score.value for score in scores)
            for name, scores in zip(self._plan.scorers, scores_by_scorer, strict=True)
        }
        rollouts = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        right = None if self._plan.accuracy_by is None else values[self._plan.accuracy_by]
        rewards = tuple(sum(term.weight * scores[term.name] for term in self._plan.terms) for scores in rollouts)
        for reward, scores in zip(rewards, rollouts, strict=True):
            if not abs(reward) <= LARGEST_REWARD:
                parts = " + ".join(
                    f"{term.weight:g} x {scores[term.name]:g} ({term.name})" for term in self._plan.terms
                )
                raise InputError(
                    f"The reward for {request.row.where} is {reward:g}: {parts}.",
                    f"Lower the weights in --reward: a reward is between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}.",
                )
        return GroupScores(
            rewards=rewards,
            accuracies=None if right is None else tuple(float(value >= 1.0) for value in right),
            terms={term.name: values[term.name] for term in self._plan.terms},
            failures=self._count_failures(request, scores_by_scorer),
        )

    def _count_failures(self, request: ScoreRequest, scores_by_scorer: list[list[Score]]) -> int:
        """Return number of failed scores; the first of each scorer is logged."""
        failures = 0
        for name, scores in zip(self._plan.scorers, scores_by_scorer, strict=True):
            failed = [score.failure for score in scores if score.failure is not None]
            failures += len(failed)
            if failed and name not in self._logged:
                self._logged.add(name)
                log.warning("scorer %s failed on a completion of %s: %s", name, request.row.where, failed[0])
        return failures

    def close(self) -> None:
        """Ends the scoring process."""
        self._process.close()
