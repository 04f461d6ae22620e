"""The lines of a run while it trains: a table that grows in a terminal, one plain line a step in a log file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self, TextIO, cast

from rich.console import Console
from rich.status import Status

from rlctl.telemetry.metrics import Metric, Metrics, flatten
from rlctl.telemetry.phases import Phase
from rlctl.telemetry.streams import Unbreakable


class Column(NamedTuple):
    """A value in the line of a step."""

    heading: str
    name: str
    """Its name in metrics.jsonl, nested names joined by a slash."""
    form: str
    width: int


COLUMNS = (
    Column("step", "", "", 7),
    Column("reward", "reward_mean", ".3f", 7),
    Column("acc", "accuracy", ".2f", 6),
    Column("length", "response_tokens_mean", ".1f", 7),
)
LAST_COLUMNS = (
    Column("grad", "grad_norm", ".3f", 8),
    Column("tok/s", "tokens_per_s", ".0f", 7),
    Column("total", "seconds/total", ".1f", 7),
)
DECLARED_WIDTH = 9
PHASE_LABELS = {
    Phase.GENERATION: "gen",
    Phase.REWARD: "rew",
    Phase.LOGPROBS: "logp",
    Phase.TRAINING: "train",
    Phase.REFIT: "refit",
    Phase.CHECKPOINT: "save",
    Phase.OTHER: "other",
}


class Display:
    """Messages and step lines on stderr; `what is going on now` as a spinner where stderr is a terminal.

    Messages go to a log file too. A stderr that cannot be written is told there, and nothing else comes of it.
    """

    def __init__(self, *, steps: int, stream: TextIO | None = None, quiet: bool = False) -> None:
        # soft_wrap: a line of a log file is one line, however narrow the terminal it is read in.
        wanted = stream or sys.stderr
        self._stream = wanted if isinstance(wanted, Unbreakable) else Unbreakable(wanted)
        self.console = Console(file=cast(TextIO, self._stream), soft_wrap=True, highlight=False, quiet=quiet)
        self.steps = steps
        self.metrics: Sequence[Metric] = ()
        """Further metrics that may have a column: those of the framework and of the run's algorithm."""
        self._status: Status | None = None
        self._lines = 0
        self._log: int | None = None
        self._unlogged: list[str] = []
        self._loss_told = False

    def say(self, text: str) -> None:
        """Show a message that stays."""
        self.note(text)
        self.console.print(text, markup=False)
        self._tell_loss()

    def note(self, text: str) -> None:
        """Write a message to the log file alone; one that comes before `log_to` is kept until then."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"
        if self._log is None:
            self._unlogged.append(line)
            return
        with contextlib.suppress(OSError):  # a full disk shows where something is written that matters
            os.write(self._log, line.encode(errors="backslashreplace"))  # at once: a signal may come in the midst of it

    def log_to(self, path: Path) -> None:
        """Append messages to `path` from here on, those so far included."""
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            self._log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(self._log, "".join(self._unlogged).encode(errors="backslashreplace"))
            self._unlogged = []

    def _tell_loss(self) -> None:
        if self._stream.lost and not self._loss_told:
            self._loss_told = True
            self.note(f"stderr cannot be written ({self._stream.lost}): the run goes on, and its messages are here")

    def doing(self, what: str) -> None:
        """Show what the run is busy with: a spinner in a terminal, nothing in a log."""
        if not self.console.is_terminal:
            return
        if self._status is None:
            self._status = self.console.status(what)
            self._status.start()
        self._status.update(what)

    def step(self, step: int, metrics: Metrics) -> None:
        """Show the line of a finished step."""
        columns = _columns(self.metrics)
        if self._lines % 20 == 0 and self.console.is_terminal:
            headings = [*((column.heading, column.width) for column in columns), ("phases (s)", 10)]
            self.console.print("  ".join(f"{name:>{width}}" for name, width in headings), style="bold")
        self._lines += 1
        plain = not self.console.is_terminal
        self.console.print(step_line(step, self.steps, metrics, self.metrics, plain=plain), markup=False)
        self._tell_loss()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def close(self) -> None:
        """Take the spinner away and give the terminal its cursor back."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def _columns(declared: Sequence[Metric]) -> list[Column]:
    shown = [Column(metric.column, metric.name, metric.form, DECLARED_WIDTH) for metric in declared if metric.column]
    return [*COLUMNS, *shown, *LAST_COLUMNS]


def step_line(step: int, steps: int, metrics: Metrics, declared: Sequence[Metric] = (), *, plain: bool) -> str:
    """Return one step in one line; `plain` names each value, for logs where no heading is near."""
    found = dict(flatten(metrics))
    phases = " ".join(
        f"{PHASE_LABELS[Phase(name)]} {value:.1f}"
        for name, value in metrics["seconds"].items()
        if name != "total" and value >= 0.05
    )
    shown = [(column, _shown(column, found, step, steps)) for column in _columns(declared)]
    if plain:
        return " ".join(f"{column.heading} {value}" for column, value in shown) + f" | {phases}"
    return "  ".join(f"{value:>{column.width}}" for column, value in shown) + "  " + phases


def _shown(column: Column, found: Metrics, step: int, steps: int) -> str:
    if column.heading == "step":
        return f"{step}/{steps}"
    value = found.get(column.name)
    return "-" if value is None else f"{value:{column.form}}" + "s" * (column.heading == "total")
