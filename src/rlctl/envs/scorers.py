"""Scorers: from one completion and its row to a number."""

from __future__ import annotations

import functools
import math
from typing import Any, Protocol

from rlctl.config.schema import RewardTerm
from rlctl.data.rows import GymTask, PromptRow
from rlctl.envs.extraction import Extraction, as_number, extract
from rlctl.envs.user_function import UserScorer

BUILT_IN = ("task", "exact-match", "math-verify")


class Scorer(Protocol):
    """1 is a right answer, 0 a wrong one; a user's function may return any number."""

    def __call__(self, completion: str, row: PromptRow) -> float: ...


class TaskScorer:
    """The scorer of a reasoning-gym task, on the extracted answer."""

    def __init__(self, task: GymTask, extraction: Extraction) -> None:
        # Imports reasoning-gym with all its tasks: seconds.
        from rlctl.data.gym import build_task

        self._dataset = build_task(task)
        self._extraction = extraction

    def __call__(self, completion: str, row: PromptRow) -> float:
        answer = extract(completion, self._extraction)
        if answer is None:
            return 0.0
        entry = {"question": row.prompt, "answer": row.answer, **row.fields}
        score = float(self._dataset.score_answer(answer=answer, entry=entry))
        return 0.0 if self._is_credit_for_digits(score, answer, row.answer) else score

    def _is_credit_for_digits(self, score: float, answer: str, reference: Any) -> bool:
        """Whether the score is the package's part credit for a text that contains the reference, given to a number.

        Many of its tasks give len(reference) / len(answer) to any answer with the reference in it. For texts that is a
        hint; between numbers it is chance, and makes 13 half right where 3 is asked.
        """
        if self._extraction != "last-number" or score in (0.0, 1.0) or reference is None:
            return False
        return str(reference) in answer and math.isclose(score, len(str(reference)) / len(answer))


class ExactMatch:
    """1 where the extracted answer is the reference: the same number, or the same text up to white space."""

    def __init__(self, extraction: Extraction) -> None:
        self._extraction = extraction

    def __call__(self, completion: str, row: PromptRow) -> float:
        answer = extract(completion, self._extraction)
        if answer is None:
            return 0.0
        reference, number = as_number(row.answer), as_number(answer)
        if reference is not None and number is not None:
            return float(reference == number)
        return float(answer.split() == str(row.answer).split())


class MathVerify:
    """1 where math-verify finds the completion's mathematical expression equal to the reference.

    math-verify extracts by itself: `extraction` None gives it the whole completion. It limits its own time by signals,
    so it must be called from the main thread.
    """

    def __init__(self, extraction: Extraction | None) -> None:
        # Imports sympy.
        import math_verify

        self._math_verify = math_verify
        self._extraction = extraction
        self._reference = functools.lru_cache(maxsize=4096)(self._parsed_reference)

    def __call__(self, completion: str, row: PromptRow) -> float:
        text = extract(completion, self._extraction) if self._extraction else completion
        if text is None:
            return 0.0
        predicted = self._math_verify.parse(f"${text}$" if self._extraction in ("boxed", "answer-tag") else text)
        return float(self._math_verify.verify(self._reference(str(row.answer)), predicted))

    def _parsed_reference(self, answer: str) -> list[Any]:
        r"""The reference as an expression. Bare LaTeX such as `\frac{1}{2}` needs its dollars to be read."""
        return self._math_verify.parse(answer if "$" in answer or r"\boxed" in answer else f"${answer}$")


def build_scorer(term: str, task: GymTask | None, extraction: Extraction, *, extraction_given: bool) -> Scorer:
    """The scorer that a reward term names. `extraction_given`: the user chose it, so math-verify keeps to it too."""
    match term:
        case "task":
            if task is None:
                raise ValueError("only a reasoning-gym task has a scorer of its own")
            return TaskScorer(task, extraction)
        case "exact-match":
            return ExactMatch(extraction)
        case "math-verify":
            return MathVerify(extraction if extraction_given else None)
    return UserScorer(term)


def is_built_in(term: str) -> bool:
    """Whether rlctl knows what the scorer's failure means (0), rather than the user."""
    return term in BUILT_IN


def weighted_sum(terms: tuple[RewardTerm, ...], scores: dict[str, float]) -> float:
    """The reward of one rollout."""
    return sum(term.weight * scores[term.name] for term in terms)
