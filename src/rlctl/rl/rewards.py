"""Rewards as the loop sees them: texts and answers meet in a process of their own; scalars come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlctl.cluster.workers import WorkerGroup
from rlctl.data.rollouts import Rollout
from rlctl.data.rows import PromptRow
from rlctl.envs.worker import GroupScores, ScoreRequest
from rlctl.rl.grpo import Scores

# The scorer has a limit of its own, and its error names the scorer: let it come first.
MARGIN_S = 30.0


class WorkerRewards:
    """Scores the rollouts of a step in the reward worker."""

    def __init__(self, group: WorkerGroup, rows: Callable[[int], Sequence[PromptRow]], *, timeout_s: float) -> None:
        """`rows(step)` gives the prompt row of each group of a step."""
        self._group, self._rows, self._timeout_s = group, rows, timeout_s

    def score(self, step: int, rollouts: Sequence[Rollout]) -> Scores:
        """Reward and accuracy of each rollout, in the order of `rollouts`.

        Accuracy is NaN throughout where no scorer says what is right.
        """
        rows = self._rows(step)
        texts = {rollout.group: rollout.texts for rollout in rollouts}
        requests = [ScoreRequest(group, rows[group], handle) for group, handle in texts.items()]
        (answers,) = self._group.call("score", requests, timeout_s=self._timeout_s + MARGIN_S)
        scored: dict[int, GroupScores] = {answer.group: answer for answer in answers}
        places = [(scored[rollout.group], rollout.index) for rollout in rollouts]
        return Scores(
            np.array([one.rewards[index] for one, index in places], dtype=np.float64),
            np.array([_accuracy(one, index) for one, index in places], dtype=np.float64),
            {name: np.array([one.terms[name][index] for one, index in places]) for name in answers[0].terms},
            sum(answer.failures for answer in answers),
        )


def _accuracy(scores: GroupScores, index: int) -> float:
    return np.nan if scores.accuracies is None else float(scores.accuracies[index])
