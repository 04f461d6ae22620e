"""Taking the answer out of a completion, and choosing how for a source of prompts."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Literal

from rlctl.data.prompt_rows import PromptSource

Extraction = Literal["last-number", "last-line", "boxed", "answer-tag", "full"]

DESCRIPTION: dict[Extraction, str] = {
    "last-number": "the last number of the completion",
    "last-line": "the last line of the completion",
    "boxed": r"the last \boxed{...} of the completion",
    "answer-tag": "the last <answer>...</answer> of the completion",
    "full": "the whole completion",
}
SAMPLED_ROWS = 16

# A minus is a sign only where no operand stands right before it: `5-3` ends in 3, `= -3` in -3.
_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def extract(completion: str, how: Extraction) -> str | None:
    """Return the answer in the completion, stripped; None where there is none of the kind looked for."""
    match how:
        case "last-number":
            found = _NUMBER.findall(completion.replace("\N{MINUS SIGN}", "-"))
            return found[-1].replace(",", "").lstrip("+") if found else None  # plain digits
        case "last-line":
            lines = completion.strip().splitlines()
            return lines[-1].strip() if lines else None
        case "boxed":
            return _last_boxed(completion)
        case "answer-tag":
            found = _TAG.findall(completion)
            return found[-1].strip() if found else None
        case "full":
            return completion.strip() or None
    raise ValueError(f"unknown extraction {how!r}")


def _last_boxed(text: str) -> str | None:
    r"""Return contents of the last `\boxed{...}` whose braces close."""
    start = text.rfind(r"\boxed{")
    while start >= 0:
        begin = start + len(r"\boxed{")
        depth = 1
        for position in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[begin:position].strip()
        start = text.rfind(r"\boxed{", 0, start)
    return None


def as_number(text: object) -> Decimal | None:
    """Return the value of a text that is one number (grouping commas allowed), else None."""
    try:
        value = Decimal(str(text).strip().replace(",", ""))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def choose_extraction(source: PromptSource) -> tuple[Extraction, str]:
    """Choose how answers are taken out of completions for this source; return that and why."""
    rows = [source[index] for index in range(min(len(source), SAMPLED_ROWS))]
    told = source.instructions + "\n" + rows[0].question
    answers = [row.answer for row in rows if row.answer is not None]
    if "<answer>" in told:
        return "answer-tag", "the prompts ask for <answer>"
    if r"\boxed" in told:
        return "boxed", r"the prompts ask for \boxed"
    if not answers:
        return "full", "there are no reference answers to go by"
    if all(as_number(answer) is not None for answer in answers):
        return "last-number", "the reference answers are numbers"
    if any("\n" in str(answer) for answer in answers):
        return "full", "reference answers have several lines"
    return "last-line", "the reference answers are single lines"


def written_as(answer: str, how: Extraction) -> str:
    """Return a completion from which `extract` takes `answer`."""
    return {"boxed": rf"\boxed{{{answer}}}", "answer-tag": f"<answer>{answer}</answer>"}.get(how, answer)
