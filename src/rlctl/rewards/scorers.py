"""Scorers: functions from one completion and its dataset row to a number."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from rlctl.data.prompt_rows import GymTask, PromptRow, answer_text
from rlctl.errors import InputError, MachineError, RlctlError
from rlctl.rewards.extraction import (
    Extraction,
    answers_alike,
    as_number,
    explicit_math,
    extract,
    opens_box,
    plain_number,
    plain_text,
    readable_math,
    unspaced,
    without_thoughts,
)
from rlctl.rewards.tag_scorers import TAG_SCORERS, decimals, differ_in_size, tolerate_old_antlr, without_alarms

OF_FORM = ("tagged-integer", "tagged-format", "format")
"""Scorers that look at how a completion is written, and at no reference answer."""
BY_THEMSELVES = ("dapo-math", "tagged-answer", *(name for name in TAG_SCORERS if name not in OF_FORM))
"""Scorers with their own answer form, independent of `reward.extract`."""
RIGHT_ABOVE = {"bbox_giou": 0.5, "geo3k": 0.5}
"""Scores above which a completion counts as right, of scorers with scores between 0 and 1."""
BUILT_IN = ("task", "exact-match", "math-verify", "ifeval", *BY_THEMSELVES, *OF_FORM)
"""Scorers whose failures count as 0; users decide for others."""
CALL_SHARE = 0.75
"""Share of a step's remaining time that one call of a user function may take while others wait."""
TAGGED = re.compile(r"<think>.*</think>\n<answer>.*</answer>\n?", re.DOTALL)


class Scorer(Protocol):
    """Return 1 for a right answer and 0 for a wrong one. A user function may return any number."""

    def __call__(self, completion: str, row: PromptRow) -> float: ...


@runtime_checkable
class BatchScorer(Protocol):
    """Scores all completions of a step in one call. None: it does not apply; an error: it failed."""

    def score_all(
        self, completions: Sequence[str], rows: Sequence[PromptRow]
    ) -> Sequence[float | RlctlError | None]: ...


class TaskScorer:
    """The scorer of a reasoning-gym task, on the extracted answer."""

    def __init__(self, task: GymTask, extraction: Extraction, *, opened: bool = False) -> None:
        # Imports reasoning-gym with all its tasks: seconds.
        from rlctl.data.gym_tasks import build_task

        self._dataset = build_task(task)
        self._extraction: Extraction = extraction
        self._opened = opened

    def __call__(self, completion: str, row: PromptRow) -> float:
        answer = extract(completion, self._extraction, opened=self._opened)
        if answer is None:
            return 0.0
        entry = {"question": row.prompt, "answer": row.answer, **row.fields}
        score, reference = float(self._dataset.score_answer(answer=answer, entry=entry)), answer_text(row.answer)
        # Many tasks give len(reference) / len(answer) to any answer that contains the reference. For texts that is a
        # hint; between numbers it is chance, and makes 13 half right for 3.
        partly = self._extraction == "last-number" and score not in (0.0, 1.0) and reference in answer
        return 0.0 if partly and math.isclose(score, len(reference) / len(answer)) else score


class ExactMatch:
    """1 where the extracted answer is the reference: the same number, or the same text up to white space."""

    def __init__(self, extraction: Extraction, *, opened: bool = False) -> None:
        self._extraction: Extraction = extraction
        self._opened = opened

    def __call__(self, completion: str, row: PromptRow) -> float:
        answer = extract(completion, self._extraction, opened=self._opened)
        if answer is None:
            return 0.0
        reference, number = as_number(row.reference), as_number(answer)
        if reference is not None and number is not None:
            return float(reference == number)
        return float(answer.split() == row.reference.split())


class MathVerify:
    """1 if math-verify equates the completion's expression and the reference. `extraction` None: the last box, then the
    last `<answer>`, else math-verify searches after the thoughts. It has no time limit; the scoring process has."""

    def __init__(self, extraction: Extraction | None, *, opened: bool = False) -> None:
        # Imports sympy.
        from math_verify.parser import LatexExtractionConfig

        tolerate_old_antlr()
        self._parse, self._verify = without_alarms()
        self._latex = [LatexExtractionConfig()]
        self._extraction: Extraction | None = extraction
        self._opened = opened
        self._reference = functools.lru_cache(maxsize=4096)(self._parsed_reference)

    def __call__(self, completion: str, row: PromptRow) -> float:
        reference = row.reference
        marked, text = self._answer(completion)
        if not text:
            return 0.0
        if marked and unspaced(readable_math(text)) == unspaced(readable_math(reference)):
            return 1.0
        ours, theirs = self._reference(reference), self._parsed(text, marked)
        equal = self._verify(ours, theirs, float_rounding=decimals(*ours, *theirs))
        return float(equal and not differ_in_size(ours, theirs))

    def _answer(self, completion: str) -> tuple[bool, str | None]:
        """Return whether the answer is marked as such, and its text; where it is not marked, where to look for it."""
        if self._extraction is not None:
            marked = self._extraction in ("boxed", "answer-tag")
            return marked, extract(completion, self._extraction, opened=self._opened)
        text = without_thoughts(completion, opened=self._opened)
        boxed = extract(text, "boxed")
        if boxed or (boxed is None and opens_box(text)):
            return True, boxed
        tagged = extract(completion, "answer-tag", opened=self._opened)
        return (True, tagged) if tagged else (False, text)

    def _parsed(self, text: str, marked: bool) -> list[Any]:
        if not marked:
            return _expressions(self._parse(explicit_math(plain_text(readable_math(text)))))
        text = extract(text, "boxed") or text  # a box inside of a tag
        if len(re.findall(r"\d+", readable_math(text))) > 1:  # if LaTeX cannot read it, none of them is the answer
            return self._by_latex(text)
        return _expressions(self._parse(_boxed(text)))

    def _parsed_reference(self, answer: str) -> list[Any]:
        r"""Return the reference as a LaTeX expression; a number inside unreadable LaTeX (`11` of `11.\overline{36}`)
        would differ. A worked solution's answer is in a box."""
        return self._by_latex(extract(answer, "boxed") or answer)

    def _by_latex(self, answer: str) -> list[Any]:
        return _expressions(self._parse(_boxed(answer), extraction_config=self._latex))


def _boxed(answer: str) -> str:
    """Return an answer in a box that math-verify reads whole; numbers as plain digits."""
    answer = answer.strip(" \t\n*`").rstrip(".,;:")
    return rf"\boxed{{{plain_number(answer) or explicit_math(readable_math(answer))}}}"


def _expressions(parsed: list[Any]) -> list[Any]:
    r"""Return math-verify's parses without its appended text, which may be cut: `2^{` of `2^{\mathrm{10}}`."""
    return [expression for expression in parsed if not isinstance(expression, str)]


class DapoMath:
    """1 if the last `Answer: ...` equals the reference in the same normalized spelling."""

    def __call__(self, completion: str, row: PromptRow) -> float:
        return float(answers_alike(completion, row.reference))


class Tagged:
    """1 if the last `<answer>` equals the reference (`answer`), is digits only (`integer`), or the completion is
    thoughts and one answer in tags (`format`), for GDPO. Without a tag the whole completion is the answer."""

    def __init__(self, what: Literal["answer", "integer", "format"]) -> None:
        self._what = what

    def __call__(self, completion: str, row: PromptRow) -> float:
        answer = completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()
        if self._what == "answer":
            return float(answer == row.reference)
        if self._what == "integer":
            return float(answer.isdigit())
        once = completion.count("<answer>") == completion.count("</answer>") == 1
        return float(once and TAGGED.fullmatch(completion) is not None)


class IfEval:
    """The share of the instructions in a row that the completion follows to the letter (IFEval, arXiv 2311.07911)."""

    def __init__(self) -> None:
        try:
            from if_verifiable.common import evaluate_instructions  # pyright: ignore[reportMissingImports]
            from if_verifiable.ifeval.instructions_registry import (  # pyright: ignore[reportMissingImports]
                INSTRUCTION_DICT,
            )
            from nltk.data import find  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise MachineError(
                f"The scorer ifeval needs a package that is not installed: {error.name}.",
                "Install rlctl with its ifeval extra.",
            ) from error
        try:
            find("tokenizers/punkt_tab/english/")
        except LookupError as error:  # without it, instructions that count sentences could not be judged
            raise MachineError(
                "The scorer ifeval needs NLTK's data punkt_tab, which is not on this machine.",
                "Fetch it with: python -m nltk.downloader punkt_tab",
            ) from error
        self._evaluate, self._instructions = evaluate_instructions, INSTRUCTION_DICT

    def __call__(self, completion: str, row: PromptRow) -> float:
        names = list(row.fields["instruction_id_list"])
        if unknown := [name for name in names if name not in self._instructions]:
            raise InputError(f"{row.where}: the scorer ifeval knows no instruction {unknown[0]!r}.", "Leave it out.")
        followed, _ = self._evaluate(completion, names, list(row.fields["kwargs"]), row.question, self._instructions)
        return sum(result.strict_pass for result in followed) / len(names)
