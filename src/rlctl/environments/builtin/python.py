"""Programs written by the model, with tests as the reward, run in `processes/sandbox.py`."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from rlctl.environments.interface import Message, Step
from rlctl.errors import InputError
from rlctl.processes import sandbox

BLOCK = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
LANGUAGES = ("python", "python3", "py", "py3")
TOLERANCE = 1e-6
"""Largest difference of an output with a decimal point, absolute or relative, as contests and NeMo Gym allow it."""
ASK = "Write a Python program in one block that begins with ```python and ends with ```."
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
SHOWN = 1000
"""Characters of a failure shown to the model."""
HARNESS = """
def _(program, tests, mark):
    import os, sys, types
    if os.path.exists("program.py"):
        os.remove("program.py")
    sys.modules["program"] = module = types.ModuleType("program")
    module.__file__, scope, ended = os.path.abspath("program.py"), vars(module), None
    try:
        exec(compile(program, "program.py", "exec"), scope)
    except (SystemExit, EOFError) as error:
        ended = error
    for number, test in enumerate(tests):
        try:
            exec(compile(test, "test", "exec"), scope)
        except BaseException as error:
            said = " ".join(f"{{type(error).__name__}}: {{error}}".rstrip(": ").split())
            if ended is None:
                print(f"\\n{{mark}} {{number}} {{said}}", flush=True)
        else:
            print(f"\\n{{mark}} {{number}}", flush=True)
    if ended is not None:
        raise ended
_({program!r}, {tests!r}, {mark!r})
"""
"""Imports the program, so `if __name__ == "__main__"` is false, as in HumanEval's harness. What it defined before it
exited or asked for input, which calls do not give, is tested too."""


class Python:
    """The row has `tests`, a list of statements such as asserts, or `inputs` and the `outputs` that the program prints
    for them. The reward is the share of them that the last program passes, with `all_or_nothing` 1 for all and else 0.
    Until `attempts` programs are written, the model is told the first failure. `seconds` and `memory_mib` limit one
    run: of all `tests`, or of one input."""

    def __init__(
        self, attempts: int = 1, all_or_nothing: bool = False, seconds: float = 5.0, memory_mib: int = 512
    ) -> None:
        self.attempts, self.all_or_nothing = attempts, all_or_nothing
        self.limits = sandbox.Limits(seconds=seconds, memory_mib=memory_mib)

    @classmethod
    def prepare(cls, **params: Any) -> str:
        return f"programs run behind: {', '.join(sandbox.layers())}"  # tested once; forked episodes reuse the result

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message] | str:
        self.made, self.rewarded = 0, 0.0
        columns = [row.get(name) or [] for name in ("tests", "inputs", "outputs")]
        self.tests, self.inputs, self.outputs = (
            [_text(item) for item in ([column] if isinstance(column, str) else column)] for column in columns
        )
        if bool(self.tests) == bool(self.inputs) or len(self.inputs) != len(self.outputs):
            raise InputError("A row for `python` needs either `tests`, or as many `outputs` as `inputs`.")
        return [] if row["prompt"] else ASK

    def step(self, message: Message) -> Step:
        self.made += 1
        program = last_program(message["content"])
        failures: list[str | None] = [f"The message has no program. {ASK}"]
        if program is not None:
            failures = self.failures(program)
        share = failures.count(None) / len(failures)
        right = share == 1.0
        worth = float(right) if self.all_or_nothing else share
        done = right or self.made == self.attempts
        first = next(filter(None, failures), "")
        # The rewards of an episode sum to the worth of its last program, whatever ends the episode.
        reward, self.rewarded = worth - self.rewarded, worth
        metrics = {"programs": float(program is not None), "right": float(right)}
        return Step("" if done else f"{first[:SHOWN]}\n\nCorrect the program.", reward, done, metrics=metrics)

    def failures(self, program: str) -> list[str | None]:
        """Return the failure of each test, or None if it passed."""
        if self.tests:
            return self.failed_tests(program)
        return [self.failed_output(program, *pair) for pair in zip(self.inputs, self.outputs, strict=True)]

    def failed_tests(self, program: str) -> list[str | None]:
        """Run all tests in one process. Only lines with a secret mark count, so early exits and prints pass nothing."""
        mark = secrets.token_hex(16)
        outcome = sandbox.run(HARNESS.format(program=program, tests=self.tests, mark=mark), limits=self.limits)
        results = dict[int, str]()
        for line in outcome.output.splitlines():
            if line.startswith(mark + " "):
                number, _, failure = line[len(mark) + 1 :].partition(" ")
                results.setdefault(int(number), failure)
        ended = self.ended(outcome) or "The program ended before this test."
        failures = [results.get(number, ended) for number in range(len(self.tests))]
        return [f"{test}\n{failure}" if failure else None for test, failure in zip(self.tests, failures, strict=True)]

    def failed_output(self, program: str, given: str, expected: str) -> str | None:
        """Run the program on one input. Blanks at line ends do not count, and numbers count by value."""
        outcome = sandbox.run(program, given, self.limits)
        if failure := self.ended(outcome):
            return f"Input:\n{given}\n{failure}"
        if alike(outcome.output, expected):
            return None
        return f"Input:\n{given}\nOutput:\n{outcome.output}\nExpected:\n{expected}"

    def ended(self, outcome: sandbox.Outcome) -> str | None:
        if outcome.code is None:
            return f"The program took longer than {self.limits.seconds:g} s."
        if outcome.code < 0:
            return f"The program was ended by signal {-outcome.code}."
        last = next(reversed(outcome.errors.strip().splitlines()), "")
        return f"The program failed: {last or f'exit code {outcome.code}'}" if outcome.code else None


def last_program(text: str) -> str | None:
    """Return the last Python block, else the last block without a language, else None."""
    blocks = [(language.strip().lower(), program) for language, program in BLOCK.findall(text)]
    for languages in (LANGUAGES, ("",)):
        if programs := [program for language, program in blocks if language in languages]:
            return programs[-1]
    return None


def alike(output: str, expected: str) -> bool:
    """Return whether an output has the expected lines, up to white space and the writing of numbers."""
    ours, theirs = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected))
    return len(ours) == len(theirs) and all(map(_alike, ours, theirs))


def _alike(line: str, expected: str) -> bool:
    ours, theirs = line.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(word: str, expected: str) -> bool:
    if word == expected or not (NUMBER.fullmatch(word) and NUMBER.fullmatch(expected)):
        return word == expected
    if expected.lstrip("+-").isdigit():
        return Decimal(word) == Decimal(expected)
    return math.isclose(float(word), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _text(value: Any) -> str:
    """Return a test, an input or an output as text; lines may be a list."""
    if isinstance(value, list | tuple):
        return "\n".join(map(_text, value))
    if not isinstance(value, str | int | float):
        raise InputError(f"A row for `python` has {value!r:.80} among its tests, inputs or outputs, which is no text.")
    return str(value)
