"""The worker that scores a step's completions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from rlctl.config.user_code import MODEL
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import RolloutColumns
from rlctl.errors import InputError
from rlctl.rewards.prepare_rewards import tried_again
from rlctl.rewards.reward_model_scorer import ModelTexts
from rlctl.rewards.reward_plan import MixedRewards, RewardPlan, Rewards
from rlctl.rewards.scoring_process import Score, ScoringProcess, Work, at_once
from rlctl.rewards.user_function import LARGEST_REWARD, TURNS
from rlctl.settings.rewards import RewardTerm

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoreRequest:
    """The completions of one group."""

    row: PromptRow
    texts: object
    """Handle of the completions, `list[str]` of length G."""
    turns: object | None = None
    """Handle of the episodes' turns, `list[list[Turn]]` of length G; None: one turn each."""


@dataclass(frozen=True)
class GroupScores:
    """Scores of one group, rollout by rollout."""

    rewards: tuple[float | None, ...]
    """None: a user function failed, and the rollout is dropped."""
    accuracies: tuple[float, ...] | None
    """1 if the reference scorer accepts the completion, else 0; None without such a scorer."""
    terms: dict[str, tuple[float | None, ...]]
    """Unweighted score of each reward term, by label; None: it does not apply."""
    failures: int = 0
    """Completions with a scorer failure. They count as wrong or are dropped."""
    dropped: tuple[str, ...] = ()
    """The error of a user function on each dropped rollout."""
    answered: tuple[bool, ...] | None = None
    """Whether the reference scorer can read an answer; None without such a scorer."""


@dataclass(frozen=True)
class WrittenGroup:
    """The texts of one group for a reward model. One more token at the end of each holds its score."""

    prompt_tokens: int
    """Length of the prefix that all texts share."""
    tokens: tuple[int | str, ...]
    """The number of tokens of each text, or why it cannot be written."""


class RewardWorker:
    """Scores completions where they are fetched, so that texts do not pass through the driver."""

    def __init__(self, plan: Rewards, fetch: Callable[[object], list[Any]], *, apart: bool = False) -> None:
        """`fetch` returns the texts of a handle. `apart`: a reward model's scores come from its own worker."""
        self._fetch = fetch
        self._plans = plan.plans if isinstance(plan, MixedRewards) else {"": plan}
        self._processes: dict[str, ScoringProcess] = {}
        self._models: dict[str, str] = {}
        """By dataset, the reward model whose scores come from its own worker."""
        self._texts: ModelTexts | None = None
        for dataset, dataset_plan in self._plans.items():
            terms = tuple(term for term in dataset_plan.terms if not (apart and term.name.startswith(MODEL)))
            if terms:
                self._processes[dataset] = ScoringProcess(replace(dataset_plan, terms=terms))
            if model := next((term.name for term in dataset_plan.terms if term not in terms), None):
                self._models[dataset] = model
        self._logged: set[str] = set()

    def setup(self) -> None:
        """Start the scorers, so that the first step does not wait for their imports."""
        for process in self._processes.values():
            process.start()
        if self._models:
            dataset, model = next(iter(self._models.items()))  # a run has one reward model
            self._texts = ModelTexts(model, self._plans[dataset].time)

    def try_again(self) -> list[str]:
        """Repeat the trial of the rewards on this machine, which may lack files, packages and programs of the driver's;
        see `tried_again`."""
        plans = [process.plan for process in self._processes.values()]
        return [note for plan in plans for note in tried_again(plan)]

    def write(self, requests: Sequence[ScoreRequest]) -> tuple[list[WrittenGroup], list[RolloutColumns]]:
        written, columns = [], []
        for request in requests:
            encoded: list[np.ndarray | str] = []
            for text in self._fetch(request.texts) if request.row.source in self._models else ():
                assert self._texts is not None  # `setup` made it
                try:
                    encoded.append(self._texts.tokens(text, request.row))
                except InputError as error:
                    encoded.append(str(error))
            texts = [text if isinstance(text, np.ndarray) else np.zeros(0, np.int32) for text in encoded]
            columns.append(text_columns(texts))
            shared = common_prefix([text for text in texts if len(text)])
            counts = (len(text) + 1 if isinstance(text, np.ndarray) else text for text in encoded)
            written.append(WrittenGroup(shared, tuple(counts)))
        return written, columns

    def score(
        self, requests: Sequence[ScoreRequest], references: Sequence[Sequence[float | str]] | None = None
    ) -> list[GroupScores | None]:
        """Return scores by group in the order of `requests`; None: only its environment gives rewards. Errors as in
        `ScoringProcess.score`. `references`: the reward model's values, or why a text is unreadable."""
        results: dict[int, GroupScores] = {}

        def score_dataset(dataset: str, plan: RewardPlan) -> None:
            process, model = self._processes.get(dataset), self._models.get(dataset)
            scorers = process.plan.scorers if process is not None else ()
            of_dataset = {i: request for i, request in enumerate(requests) if request.row.source == dataset}
            texts = {i: self._fetch(request.texts) for i, request in of_dataset.items()}
            rows = {i: self._rows(requests[i], len(group)) for i, group in texts.items()}
            work = [
                Work(scorer, text, row)
                for i, group in texts.items()
                for scorer in range(len(scorers))
                for text, row in zip(group, rows[i], strict=True)
            ]
            scores = iter(process.score(work) if process is not None and work else ())
            for i, group in texts.items():
                by_scorer = {name: list(islice(scores, len(group))) for name in scorers}
                if model is not None and references is not None:
                    by_scorer[model] = [_given(plan, value) for value in references[i]]
                in_order = [by_scorer[name] for name in plan.scorers]
                results[i] = self._group_scores(plan, requests[i], group, in_order)

        at_once([partial(score_dataset, dataset, plan) for dataset, plan in self._plans.items()])
        return [results.get(i) for i in range(len(requests))]

    def _rows(self, request: ScoreRequest, rollouts: int) -> list[PromptRow]:
        if request.turns is None:
            return [request.row] * rollouts
        fetched = self._fetch(request.turns)
        episodes = [[turn.record() for turn in turns if not turn.auxiliary] for turns in fetched]
        return [replace(request.row, fields={**request.row.fields, TURNS: turns}) for turns in episodes]

    def _group_scores(
        self, plan: RewardPlan, request: ScoreRequest, texts: Sequence[str], scores_by_scorer: list[list[Score]]
    ) -> GroupScores:
        """Return the scores of a group; the first failure of each scorer is logged."""
        scorer_scores = list(zip(plan.scorers, scores_by_scorer, strict=True))
        values = {name: tuple(score.value for score in scores) for name, scores in scorer_scores}
        failed = {
            name: [score.failure for score in scores if score.failure is not None] for name, scores in scorer_scores
        }
        for name, failures in failed.items():
            if failures and name not in self._logged:
                self._logged.add(name)
                log.warning("scorer %s failed on a completion of %s: %s", name, request.row.where, failures[0])
        lost = [
            next((score.failure for score in scores if score.failure is not None and score.value is None), None)
            for scores in zip(*scores_by_scorer, strict=True)
        ]
        rollouts = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        scored = None if plan.accuracy_by is None else values[plan.accuracy_by]
        accuracies = None if scored is None else tuple(float(plan.right(value)) for value in scored)
        return GroupScores(
            rewards=tuple(
                None if failure else weighted_sum(plan.terms, scores, request.row)
                for scores, failure in zip(rollouts, lost, strict=True)
            ),
            accuracies=accuracies,
            terms=dict(zip(plan.labels, values.values(), strict=True)),
            answered=plan.answers(texts, accuracies),
            failures=sum(map(len, failed.values())),
            dropped=tuple(filter(None, lost)),
        )

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


def _given(plan: RewardPlan, value: float | str) -> Score:
    """Return a reward model's score of a text, or its failure's value. Raises InputError if failures end the run."""
    if not isinstance(value, str):
        return Score(value)
    if plan.on_error == "stop":
        raise InputError(value)
    return Score(0.0 if plan.on_error == "zero" else None, value)


def common_prefix(texts: Sequence[np.ndarray]) -> int:
    if not texts:
        return 0
    shortest = min(map(len, texts))
    alike_T = np.all([text[:shortest] == texts[0][:shortest] for text in texts], axis=0)
    return shortest if alike_T.all() else int(alike_T.argmin())


def text_columns(texts: Sequence[np.ndarray]) -> RolloutColumns:
    """Return the columns of texts. The last token of each is repeated, to hold its score."""
    longer = [np.append(text, text[-1:]).astype(np.int32) for text in texts]
    tokens_T = np.concatenate([*longer, np.zeros(0, np.int32)])
    offsets_G = np.cumsum([0, *map(len, longer)]).astype(np.int32)
    mask_T = np.zeros(len(tokens_T), bool)
    mask_T[[end - 1 for text, end in zip(texts, offsets_G[1:], strict=True) if len(text)]] = True
    zeros_T = np.zeros(len(tokens_T), np.float32)
    return RolloutColumns(tokens_T, offsets_G, mask_T, zeros_T, np.full(len(tokens_T), -1, np.int32))


def weighted_sum(terms: Sequence[RewardTerm], scores: Mapping[str, float | None], row: PromptRow) -> float:
    """Return the weighted sum of the terms that apply. Raises InputError if none applies or the sum is too large."""
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
