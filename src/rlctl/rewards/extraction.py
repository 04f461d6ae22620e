"""Extraction of answers from completions, and the choice of its form for a dataset."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, InvalidOperation
from typing import Final, Literal

from rlctl.data.prompt_rows import PromptDataset

Extraction = Literal["last-number", "last-line", "boxed", "answer-tag", "choice", "full"]

DESCRIPTION: dict[Extraction, str] = {
    "last-number": "the last number of the completion",
    "last-line": "the last line of the completion",
    "boxed": r"the last \boxed{...} of the completion",
    "answer-tag": "the last <answer>...</answer> of the completion",
    "choice": "the letter of the option that the completion settles on",
    "full": "the whole completion without thoughts",
}
SAMPLED_ROWS, GENERATED_ROWS = 2000, 32
"""Rows for choosing the extraction, and for scoring reference answers before a run (dataset, generated task)."""
LONGEST_NUMBER = 100
"""Digits around the point beyond which numbers use an exponent, such as `1E+9999999`."""
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
"""Exact arithmetic for any number."""

# A minus is a sign only without an operand right before it: `5-3` ends in 3, `= -3` in -3.
# Groups of three digits, or as in India two (`1,00,000`). A point begins a number only where no word or number ends.
_WHOLE = r"\d{1,3}(?:,\d{3})+(?!\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)|\d+"
_EXPONENT = r"(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(rf"(?:(?<![\w)])[-+])?(?:(?:{_WHOLE})(?:\.\d+)?|(?<![\w.)\]}}])\.\d+){_EXPONENT}")
_NUMBER_ALONE = re.compile(rf"[-+]?(?:(?:{_WHOLE})(?:\.\d*)?|\.\d+){_EXPONENT}")
_SEPARATOR = r"(?:\{,\}|,\\!|\\[,;:! ]|['_\u2019\u2009\u202f\u00a0])"
_GROUPED = re.compile(rf"(?<!\d)\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)")
"""A number with thousands separators other than a plain comma, as in LaTeX."""
_SPACE = r"(?:[ \t~]|\\[,;: ])"
_MIXED = re.compile(rf"(?<![\w.,/^\\])(?P<whole>\d+){_SPACE}+(?P<above>\d+)\s*/\s*(?P<below>\d+)(?![\d./^])")
_SPACED, _IN_GROUPS = (
    re.compile(r"-?\d+(?:\.\d+)?(?:\s+\d+(?:\.\d+)?)+"),
    re.compile(r"-?\d{1,3}(?:\s\d{3})+(?:\.\d+)?"),
)
_VALUE = r"\s*[-+]?(?:\d+(?:\.\d+)?(?:\s*/\s*\d+)?|\\[dt]?frac\{\d+\}\{\d+\})\s*"
_ROUND = rf"(?:\\left\s*)?\({_VALUE}(?:\\right\s*)?\)"
_BRACKETED = rf"(?:{_ROUND}|(?:\\left\s*)?\[{_VALUE}(?:\\right\s*)?\])"
# A number right before a number in brackets, or one in brackets before another number. `\log_2(8)` is no product.
_FACTOR = re.compile(rf"(?<![\w.^\\])\d+(?:\.\d+)?(?= ?{_BRACKETED})|{_ROUND}(?=\s*(?:{_ROUND}|\d))")
_EMPHASIS = re.compile(
    r"(?<![\w*`\\])(?P<mark>\*{1,3}|_{1,2}|`+)(?=[^\s*_`])(?P<words>[^*_`\n]*)(?<!\s)(?P=mark)(?![\w*`])"
)
_BOX = r"\\(?:boxed|fbox)"
_BRACE = re.compile(rf"{_BOX}\s*\{{|[{{}}]")
# `\boxed 5`: TeX's box without braces, of a number, a command or one letter.
_BARE_BOX = re.compile(
    rf"{_BOX}(?:\s+|(?![A-Za-z]))(?=[-+.\d(\[\\]|[A-Za-z](?![A-Za-z]))(?!\\[)\]])"
    r"((?:\\[A-Za-z]+|\{[^{}]*\}|[^\s${}\\]|\\[^)\]])+)"
)
TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)

# `A` and `I` before a lowercase word are words, unless that word continues an answer.
_OPTION = r"([B-HJ-Z]|[AI](?!\s+(?!(?:because|since|as|and|but|not|which|is)\b)[a-z]))(?![A-Za-z0-9]|['\u2019][a-z])"
# One letter, perhaps in brackets, bold, quotes, or LaTeX's \text{...}.
_LETTER = rf"[\s*_`\"'(\[{{$]*(?:\\(?:text|textbf|mathrm|mathbf|boxed)\{{\s*\(?\s*)*{_OPTION}"
_NAMED = r"(?i:answer|choice|option)"
# From statements of the answer to mere mentions of a letter. Within a kind, the last match counts.
_CHOICES = (
    re.compile(rf"{_NAMED}(?i:\s+is)?[\s*_]*[:=]{_LETTER}"),
    re.compile(rf"{_NAMED}[\s*_]*(?i:is|would be|should be|must be)(?:\s+(?i:the|option|choice|letter|therefore))*"
               rf"[\s*_:]*{_LETTER}"),
    re.compile(rf"(?i:i (?:choose|pick|select|go with)|correct (?:option|choice)|option|choice)\s+{_LETTER}"),
    re.compile(rf"(?m)^{_LETTER}[\s*_`\"')\]}}$.:]*$"),
    re.compile(r"(?m)^[\s*_]*\(?([A-Z])[).:][*_]*\s+\S"),
    re.compile(r"\(([A-Z])\)|\*\*([A-Z])\*\*"),
    re.compile(r"(?<![A-Za-z0-9'])([B-HJ-Z])(?![A-Za-z0-9'])"),
)  # fmt: skip


THOUGHTS: Final = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
"""The marks around thoughts of most models, Magistral, Command A, and gpt-oss."""


def without_thoughts(completion: str, *, opened: bool = False, unfinished: bool = False) -> str:
    """Return a completion without thoughts. `opened`: the prompt opens one. An unfinished thought reaches the end;
    `unfinished` keeps it."""
    for begin, end in THOUGHTS:
        if opened and begin == THOUGHTS[0][0] and not completion.lstrip().startswith(begin):
            completion = begin + completion
        if begin not in completion and end not in completion:
            continue
        text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", "", completion, flags=re.DOTALL)
        text = text.rpartition(end)[2]  # the prompt had opened it
        answer, mark, thought = text.partition(begin)
        completion = answer + thought if mark and unfinished else answer
    return completion


def extract(completion: str, how: Extraction, *, opened: bool = False) -> str | None:
    """Return the stripped answer, or None. Thoughts are left out (`opened` as in `without_thoughts`); answer tags also
    end an unfinished thought."""
    completion = without_thoughts(completion, opened=opened, unfinished=how == "answer-tag")
    match how:
        case "last-number":
            numbers = _NUMBER.findall(readable_math(completion))
            return re.sub(r"^(-?)\.", r"\g<1>0.", numbers[-1].replace(",", "").lstrip("+")) if numbers else None
        case "last-line":
            last = re.split(r"[\r\n]", completion.strip())[-1].strip()  # an answer may hold U+2028 and others
            return last or None
        case "boxed":
            return _last_boxed(completion)
        case "answer-tag":
            answers = TAG.findall(completion)
            return answers[-1].strip() if answers else None
        case "choice":
            return _choice(completion)
        case "full":
            return completion.strip() or None
    raise ValueError(f"unknown extraction {how!r}")


def _last_boxed(text: str) -> str | None:
    r"""Return contents of the last `\boxed{...}` or `\fbox{...}`, or of a later `\boxed 5`; None if its braces do
    not close."""
    opened, last, contents = list[int](), -1, None
    for bare in _BARE_BOX.finditer(text):
        last, contents = bare.start(), bare[1].rstrip(".,;:")
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(-1 if brace[0] == "{" else brace.end())
        elif opened and (begin := opened.pop()) > last:
            last, contents = begin, text[begin : brace.start()].strip()
    return None if any(begin > last for begin in opened) else contents


def opens_box(text: str) -> bool:
    return any(brace[0] not in "{}" for brace in _BRACE.finditer(text))


def _choice(text: str) -> str | None:
    """Return the chosen option's letter: in the last box or tag, else after words such as `the answer is`, else alone
    on a line, else the last single letter."""
    for marked in (_last_boxed(text), *TAG.findall(text)[-1:]):
        if marked is not None and (match := re.fullmatch(rf"{_LETTER}[\s*_)\]}}.:$]*(?:\s.*)?", marked, re.DOTALL)):
            return match[1]
    for pattern in _CHOICES:
        if matches := list(pattern.finditer(text)):
            return next(group for group in matches[-1].groups() if group)
    return None


def vote(completion: str, how: Extraction, *, opened: bool = False) -> str | None:
    """Return the answer for counting votes: numbers by value, texts without spaces and dollars of LaTeX."""
    answer = extract(completion, how, opened=opened)
    if answer is None:
        return None
    return plain_number(answer) or unspaced(answer)


def plain_number(text: object) -> str | None:
    """Return a number in a form that is the same for equal numbers; None for other texts."""
    number = as_number(text)
    if number is None:
        return None
    exact = number.normalize(_EXACT) if number else Decimal(0)  # and not -0
    return format(exact, "f") if abs(exact.adjusted()) < LONGEST_NUMBER else str(exact)


def unspaced(text: str) -> str:
    """Return an expression without spaces and dollars of LaTeX, for comparisons as text."""
    apart = re.sub(r"\s+|\\[,;:! ]", " ", text)  # two numbers stay two: `1 1/2` is not `11/2`
    return re.sub(r"(?<!\d) | (?!\d)|\$|\.$", "", apart).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")


def readable_math(text: str) -> str:
    """Return the text with plain minus signs and plain thousands, and without dollar signs of money."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("\N{NON-BREAKING HYPHEN}", "-").replace(r"\$", "")
    return _GROUPED.sub(lambda number: re.sub(_SEPARATOR, "", number[0]), text)


def plain_text(text: str) -> str:
    """Return the text without Markdown emphasis and code marks around words: `73` for `__73__`."""
    return _EMPHASIS.sub(r"\g<words>", text)


def explicit_math(text: str) -> str:
    r"""Return the text with mixed numbers as fractions, and products of numbers with their sign: `3/2` for `1 1/2`,
    `3*(4)` for `3(4)`. latex2sympy2_extended 1.11 adds neighboring numbers: `1 1/2` is (1 + 1) / 2, and `3(4)` is 7.
    Numbers alone are a list, or one in groups of three digits."""
    if _SPACED.fullmatch(text):
        return re.sub(r"\s", "", text) if _IN_GROUPS.fullmatch(text) else ", ".join(text.split())
    return _FACTOR.sub(r"\g<0>*", _MIXED.sub(_improper, text))


def _improper(mixed: re.Match[str]) -> str:
    whole, above, below = (int(mixed[name]) for name in ("whole", "above", "below"))
    return f"{whole * below + above}/{below}" if above < below else mixed[0]


def as_number(text: object) -> Decimal | None:
    """Return the value of a text that is one number (grouping commas allowed, as in `1,234`), else None."""
    digits = readable_math(str(text)).strip().strip("$").strip()
    if not _NUMBER_ALONE.fullmatch(digits):
        return None
    try:
        value = Decimal(digits.replace(",", ""))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def choose_extraction(dataset: PromptDataset) -> tuple[Extraction, str]:
    """Return the form of extraction that fits most rows of a dataset, and the reason."""
    rows = dataset.sample(GENERATED_ROWS if dataset.task else SAMPLED_ROWS)
    instructions = dataset.instructions + "\n" + rows[0].question
    answers = [row.answer for row in rows if row.answer is not None]
    if "<answer>" in instructions:
        return "answer-tag", "the prompts ask for <answer>"
    if r"\boxed" in instructions:
        return "boxed", r"the prompts ask for \boxed"
    if not answers:
        return "full", "there are no reference answers"
    numbers = sum(as_number(answer) is not None for answer in answers)
    long = sum("\n" in str(answer) for answer in answers)
    if 2 * numbers >= len(answers):
        return "last-number", f"{_share(numbers, answers)} reference answers are numbers"
    if 2 * long >= len(answers):
        return "full", f"{_share(long, answers)} reference answers have several lines"
    return "last-line", f"{_share(len(answers) - long, answers)} reference answers are single lines"


def _share(count: int, answers: Sequence[object]) -> str:
    return "the" if count == len(answers) else f"{count:,} of the {len(answers):,}"


def written_as(answer: str, how: str, *, opened: bool = False) -> str:
    """Return a completion whose extracted answer is `answer`."""
    tagged = f"<answer>{answer}</answer>"
    boxed, thought = rf"\boxed{{{answer}}}", "<think></think>\n"
    forms = {"boxed": boxed, "answer-tag": tagged, "dapo-math": f"Answer: {answer}", "geo3k": f"{thought}{boxed}"}
    forms |= dict.fromkeys(("tagged-answer", "exact_alnum", "math_expr", "bbox_giou"), f"{thought}{tagged}")
    written = forms.get(how, answer)
    return f"{THOUGHTS[0][1]}\n{written}" if opened and not written.startswith(thought) else written


LOOKED_AT: Final = 300
"""Characters at the end of a completion that are searched for its answer."""
ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
"""Spellings and their replacements, applied in order."""
LEFT_OUT = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}",
    r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
"""Words and signs that are removed, in order."""
REWRITTEN = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),  # the first formula alone
    *((re.compile(rf"\\{name}\{{(.*?)\}}"), r"\1") for name in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def answers_alike(completion: str, reference: str) -> bool:
    answers = ANSWER.findall(completion[-LOOKED_AT:])
    return bool(answers) and spelled(answers[-1]) == spelled(reference)


def spelled(answer: str) -> str:
    text = answer.rpartition("=")[2]
    for old, new in (*REPLACED, *((word, "") for word in LEFT_OUT)):
        text = text.replace(old, new)
    for pattern, new in REWRITTEN:
        text = pattern.sub(new, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()
