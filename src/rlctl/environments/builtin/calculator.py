"""Sums of two numbers with a calculator: the smallest task that teaches tool use."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from rlctl.environments.interface import Message, Step

HOW = (
    "You have a calculator. To use it, write <calc>a + b</calc> and stop; then you are told the result. "
    "End with the number."
)
EXAMPLE = [
    ("user", "What is 21 + 46?"), ("assistant", "<calc>21 + 46</calc>"), ("user", "Result: 67"), ("assistant", "67")
]  # fmt: skip
CALL = re.compile(r"<calc>\s*(\d{1,12})\s*\+\s*(\d{1,12})")


class Calculator:
    """A sum of two numbers of `digits` digits, or of the row's `prompt` and `answer`. At most `calls` calls are
    answered. The reward is 1 if the last number in a message without a call is the sum."""

    stop = ("</calc>",)

    def __init__(self, digits: int = 2, calls: int = 2) -> None:
        self.digits, self.calls = digits, calls

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        self.made, self.answer = 0, str(row.get("answer"))
        if row["prompt"]:
            return []
        draw, least = random.Random(seed), 10 ** (self.digits - 1)
        a, b = (draw.randrange(least, 10 * least) for _ in range(2))
        self.answer = str(a + b)
        example = [{"role": role, "content": content} for role, content in EXAMPLE]
        return [{"role": "system", "content": HOW}, *example, {"role": "user", "content": f"What is {a} + {b}?"}]

    def step(self, message: Message) -> Step:
        call = CALL.search(message["content"])
        if call and self.made < self.calls:
            self.made += 1
            return Step(f"Result: {int(call[1]) + int(call[2])}", metrics={"calls": 1.0})
        right = re.findall(r"\d+", message["content"])[-1:] == [self.answer]
        return Step(reward=float(right), done=True, metrics={"right_after_a_call": float(right and self.made > 0)})
