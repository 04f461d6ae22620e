r"""Rewards of tasks with images, which look for `<think>`, `<answer>` and `\boxed{}`. Completions are text; the images
are only in the prompt."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from rlctl.data.prompt_rows import PromptRow
from rlctl.rewards.extraction import explicit_math

LEAST_AREA = 1e-3
"""Least area of a union and of an enclosing box."""
SMALL, TOLERANCE = 1e-3, 1e-4
NO_NUMBER = (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
"""Errors of sympy's numbers that do not evaluate."""
_REASONED = re.compile(r"</think>.*\\boxed\{.*\}", re.DOTALL)
_BOX = "\\boxed{"


class Tags:
    """0.25 for a pair of tags around thoughts, and 0.75 for a pair around the answer (`format`)."""

    def __init__(self, think_tag: str = "think", answer_tag: str = "answer") -> None:
        self._shares = ((0.25, think_tag), (0.75, answer_tag))

    def __call__(self, completion: str, row: PromptRow) -> float:
        return sum(share for share, tag in self._shares if tagged(completion, tag) is not None)


class ExactAlnum:
    """1 where the answer in the tags has the letters and digits of the reference, in either case (`exact_alnum`)."""

    def __init__(self, answer_tag: str = "answer") -> None:
        self._tag = answer_tag

    def __call__(self, completion: str, row: PromptRow) -> float:
        answer = tagged(completion, self._tag)
        return float(answer is not None and _alnum(answer) == _alnum(row.reference))


class MathExpr:
    """1 where math-verify finds the answer in the tags equal to the reference (`math_expr`)."""

    def __init__(self, tag: str = "answer") -> None:
        self._tag, self._same = tag, same_expression()

    def __call__(self, completion: str, row: PromptRow) -> float:
        answer = tagged(completion, self._tag)
        return 0.0 if answer is None else self._same(row.reference, answer)


class BoxGiou:
    """The overlap of the box [x1, y1, x2, y2] in the tags with the reference: intersection over union, and below
    `giou_penalty_thres` the generalized one (arXiv 1902.09630), which is negative for boxes that lie apart
    (`bbox_giou`). 0 without four numbers."""

    def __init__(self, giou_penalty_thres: float = 10.0, answer_tag: str = "answer") -> None:
        self._threshold, self._tag = giou_penalty_thres, answer_tag

    def __call__(self, completion: str, row: PromptRow) -> float:
        ours, theirs = _box(tagged(completion, self._tag) or ""), _box(row.reference)
        if ours is None or theirs is None:
            return 0.0
        inner = [pick(pair) for pick, pair in zip((max, max, min, min), zip(ours, theirs, strict=True), strict=True)]
        outer = [pick(pair) for pick, pair in zip((min, min, max, max), zip(ours, theirs, strict=True), strict=True)]
        shared = max(0.0, inner[2] - inner[0]) * max(0.0, inner[3] - inner[1])
        union = max(LEAST_AREA, _area(ours) + _area(theirs) - shared)
        enclosing = max(LEAST_AREA, _area(outer))
        iou = shared / union
        return iou if iou >= self._threshold else iou - (enclosing - union) / enclosing


class Geo3k:
    r"""The last `\boxed{}` by math-verify, and with the share `format_score` whether one follows `</think>`
    (`geo3k`)."""

    def __init__(self, format_score: float = 0.1) -> None:
        self._share, self._same = format_score, same_expression()

    def __call__(self, completion: str, row: PromptRow) -> float:
        answer = _last_box(completion)
        right = 0.0 if answer is None else self._same(row.reference, answer)
        return (1 - self._share) * right + self._share * (_REASONED.search(completion) is not None)


TAG_SCORERS: dict[str, Callable[..., Any]] = {
    "format": Tags, "exact_alnum": ExactAlnum, "math_expr": MathExpr, "bbox_giou": BoxGiou, "geo3k": Geo3k,
}  # fmt: skip
"""By name of a term."""


def tagged(completion: str, tag: str) -> str | None:
    """Return the text between the first opening and the last closing tag; None without such a pair."""
    match = re.search(rf"<{re.escape(tag)}>(.*)</{re.escape(tag)}>", completion, re.DOTALL)
    return match[1] if match else None


@cache
def same_expression() -> Callable[[str, str], float]:
    """Return the function that gives 1 where math-verify finds an answer equal to a reference. Imports sympy."""
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    tolerate_old_antlr()
    parse, verify = without_alarms()
    latex, both = (LatexExtractionConfig(),), (ExprExtractionConfig(), LatexExtractionConfig())

    def same(reference: str, answer: str) -> float:
        try:
            ours, theirs = parse(_boxed(reference), latex), parse(_boxed(answer), both)
            equal = verify(ours, theirs, float_rounding=decimals(*ours, *theirs))
            return float(equal and not differ_in_size(ours, theirs))
        except Exception:  # noqa: BLE001 - an unreadable answer is wrong
            return 0.0

    return same


@cache
def without_alarms() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return math-verify's `parse` and `verify` without alarms, which silently score a right answer 0 after 5 s of
    wall-clock time on a busy machine. The scoring process limits CPU time instead. Imports sympy."""
    from math_verify import grader, parse, parser, verify

    parser.TIMEOUT_WARNING_SHOWN = grader.TIMEOUT_WARNING_SHOWN = True  # it warns of a missing limit
    return partial(parse, parsing_timeout=0), partial(verify, timeout_seconds=0)


def tolerate_old_antlr() -> None:
    """Add the grammar atom that math-verify's converter needs for percentages. Its grammar for antlr 4.9
    (needed by OmegaConf) lacks it. Imports sympy."""
    from latex2sympy2_extended.antlr_parser import PSParser

    if not hasattr(PSParser.AtomContext, "FUNC_GAMMA"):
        PSParser.AtomContext.FUNC_GAMMA = lambda self: None  # type: ignore[attr-defined]


def decimals(*expressions: Any) -> int:
    """Return the decimals to compare numbers by: math-verify's 6, or more for at least 4 digits of the smallest."""
    places = [-math.floor(math.log10(value)) for expression in expressions for value in _sizes(expression)]
    return max(6, 3 + max(places, default=0))


def differ_in_size(ours: list[Any], theirs: list[Any]) -> bool:
    """Return whether numbers that math-verify 0.9 equates differ by more than 0.01%, one of them below 0.001: it
    compares the difference of two expressions with 0, so 1/2004! equals 1/2006!."""
    from sympy import N, UnevaluatedExpr

    pairs = [(left, right) for left in ours for right in theirs if _is_number(left) and _is_number(right)]
    for left, right in pairs:
        if left.has(UnevaluatedExpr) or right.has(UnevaluatedExpr):  # a percentage equals both of its readings
            return False
        with contextlib.suppress(*NO_NUMBER):
            least, most = sorted((abs(N(left)), abs(N(right))))
            if not 0 < least < SMALL or abs(N(left) - N(right)) <= TOLERANCE * most:
                return False
    return bool(pairs)


def _is_number(expression: Any) -> bool:
    return bool(getattr(expression, "is_number", False))


def _sizes(expression: Any) -> Iterator[float]:
    """Yield the absolute values of the numbers in an expression that are not 0 and fit a float."""
    if _is_number(expression):
        with contextlib.suppress(*NO_NUMBER):
            size = abs(complex(expression))
            if 0 < size < math.inf:
                yield size
        return
    for part in getattr(expression, "args", ()):
        yield from _sizes(part)


def _boxed(answer: str) -> str:
    return explicit_math(answer) if answer.startswith(_BOX) else f"{_BOX}{explicit_math(answer)}}}"


def _alnum(text: str) -> str:
    return "".join(letter for letter in text if letter.isalnum()).lower()


def _box(text: str) -> list[float] | None:
    try:
        numbers = [float(number) for number in re.sub(r"[\[\]]", "", text).split(",")]
    except ValueError:
        return None
    return numbers if len(numbers) == 4 and all(map(math.isfinite, numbers)) else None


def _area(box: list[float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _last_box(text: str) -> str | None:
    r"""Return the contents of the last `\boxed{`, if its braces close."""
    _, mark, rest = text.rpartition(_BOX)
    depth = 1
    for place, letter in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return rest[:place].strip()
    return None
