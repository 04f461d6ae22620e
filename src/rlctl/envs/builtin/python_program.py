"""A program to write: it is run against the tests of its row, behind the layers of `envs/sandbox.py`.

A row has `tests`, a list of texts such as `assert add(2, 3) == 5`, or `inputs` and `outputs`, lists of what the program
reads and of what it has to print.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from rlctl.envs import sandbox
from rlctl.envs.environment import Message, Step
from rlctl.errors import InputError

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
SHOWN = 500
"""Characters of a failure that the model reads."""


class PythonProgram:
    """The reward is the share of the tests that the last program passes; without `partial`, it is 1 for all of them and
    0 otherwise. Where one fails, the model reads why and may try again, `attempts` times in all."""

    def __init__(
        self, attempts: int = 2, partial: bool = True, seconds: float = 5.0, memory_mib: int = 512, processes: int = 64
    ) -> None:
        self.attempts, self.partial = attempts, partial
        self.limits = sandbox.Limits(seconds, memory_mib, processes=processes)

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self.made = 0
        tests, inputs, outputs = (row.get(name) for name in ("tests", "inputs", "outputs"))
        paired = isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)
        if not row["prompt"] or not ((isinstance(tests, list) and tests) or (paired and inputs)):
            raise InputError(
                "Environment 'python': a row needs a prompt, and the lists `tests`, or `inputs` and `outputs` of the "
                "same length.",
                "Name rows that have them with --data.",
            )
        pairs = zip(inputs or (), outputs or (), strict=True)
        self.tests = [str(test) for test in tests] if tests else [(str(a), str(b)) for a, b in pairs]

    def step(self, message: Message) -> Step:
        self.made += 1
        blocks = FENCED.findall(message["content"])
        if blocks:
            failures = [found for test in self.tests if (found := self.failure(blocks[-1], test))]
        else:
            failures = ["There is no program: write it in one block that begins with ```python."] * len(self.tests)
        passed = 1 - len(failures) / len(self.tests)
        metrics = {"attempts": 1.0, "no_program": float(not blocks)}
        if failures and self.made < self.attempts:
            return Step(f"{failures[0]}\nCorrect the program, and write all of it.", metrics=metrics)
        return Step(reward=passed if self.partial or not failures else 0.0, done=True, metrics=metrics)

    def failure(self, program: str, test: str | tuple[str, str]) -> str | None:
        """Run a test. Return why it failed; None: it passed."""
        if isinstance(test, str):
            # Only a run that comes to its end prints the mark: one that calls `exit(0)` has passed nothing.
            mark = secrets.token_hex(8)
            found = sandbox.run(f"{program}\n\n{test}\nprint({mark!r})\n", "", self.limits)
            passed, what = found.output.rstrip().endswith(mark), test
        else:
            given, wanted = test
            found = sandbox.run(program, given, self.limits)
            passed, what = found.code == 0 and _lines(found.output) == _lines(wanted), f"With the input {given!r:.200}"
        if passed:
            return None
        if found.code is None:
            return f"{what}: the program took longer than {self.limits.seconds:g} s."
        if found.code:
            last = found.errors.strip()[-SHOWN:] or f"it ended with code {found.code}"
            return f"{what}: the program failed:\n{last}"
        if isinstance(test, str):
            return f"{what}: the program ended before the test."
        return f"{what}: the program printed {found.output!r:.{SHOWN}}, not what was expected."


def _lines(text: str) -> list[str]:
    """Return the lines of an output, without white space at their ends and at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
