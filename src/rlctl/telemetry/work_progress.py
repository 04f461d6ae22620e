"""How far a long piece of work is: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY_S = 30.0
"""Between two lines in a log."""


class WorkProgress:
    """Counts pieces of work of one kind, with their rate and the time that is left, on stderr. Use it in a `with`
    block."""

    def __init__(self, unit: str, total: int, done: int = 0) -> None:
        """`done`: pieces that were there before this process began, and say nothing about its rate."""
        self._unit, self._total, self._done, self._before = unit, total, done, done
        self._begun = self._said = time.monotonic()
        self._console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self._console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, completed=done, rate="")

    def advance(self, what: str, count: int) -> None:
        """Count `count` more pieces, of `what`."""
        self._done += count
        now = time.monotonic()
        rate = (self._done - self._before) / max(now - self._begun, 1e-6)
        if self._console.is_terminal:
            shown = f"{rate:.1f} {self._unit}/s"
            self._bar.update(self._task, description=what, completed=self._done, rate=shown)
        elif now - self._said >= LINE_EVERY_S or self._done == self._total:
            self._said = now
            left = (self._total - self._done) / rate
            self._console.print(self.line(what, rate, left), markup=False)

    def line(self, what: str, rate: float, left_s: float) -> str:
        """Return the line of a log."""
        left = f", {left_s:.0f} s left" if self._done < self._total else ""
        return f"{what}: {self._done} of {self._total} {self._unit}, {rate:.1f} a second{left}"

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()
