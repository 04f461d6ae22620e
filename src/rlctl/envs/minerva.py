r"""Whether the last `Answer: ...` of a completion is the reference once both are written alike: the comparison of DAPO
(arXiv 2503.14476) and of NeMo-RL's `dapo_math_verify`.

The spelling is that of Minerva (arXiv 2206.14858, appendix D.1): units and words around a number go, `\text{...}` and
its kin become what they hold, `\frac12` becomes `\frac{1}{2}`, and digits have no commas.
"""

from __future__ import annotations

import re
from typing import Final

LOOKED_AT: Final = 300
"""Characters at the end of a completion in which its answer is looked for."""
ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
"""Spellings and their replacements, applied one after the other."""
LEFT_OUT = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}",
    r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
"""Words and signs that are left out, one after the other."""
REWRITTEN = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),  # the first formula alone
    *((re.compile(rf"\\{name}\{{(.*?)\}}"), r"\1") for name in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def answers_alike(completion: str, reference: str) -> bool:
    """Return whether a completion's last answer is the reference."""
    found = ANSWER.findall(completion[-LOOKED_AT:])
    return bool(found) and spelled(found[-1]) == spelled(reference)


def spelled(answer: str) -> str:
    """Return an answer in the spelling that is compared."""
    text = answer.rpartition("=")[2]
    for old, new in (*REPLACED, *((word, "") for word in LEFT_OUT)):
        text = text.replace(old, new)
    for pattern, new in REWRITTEN:
        text = pattern.sub(new, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()
