"""A run's terminal output: phases, a clock, and a line per step. In a terminal the last line shows current work and
steps form a table. In a log every line has its time, and long phases repeat."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.spinner import Spinner
from rich.text import Text

from rlctl.telemetry.headline import marks
from rlctl.telemetry.metrics import Metric, Metrics, flatten
from rlctl.telemetry.phases import Phase
from rlctl.telemetry.terminal import Unbreakable

LOOK_S = 0.5
"""Time between two looks at how far a phase has come."""
REMIND_S = 60.0
"""Seconds between reminders in a log."""
RECENT = 10
"""Number of last steps in the time estimate."""
HEADING_EVERY = 20
LOG_WIDTH = 160
LEAST_SHOWN_S = 0.5
"""Seconds of a phase of the start that is worth a word."""
LINE_EVERY_S = 30.0
"""Between two lines in a log."""


class Column(NamedTuple):
    """A value in the line of a step."""

    heading: str
    name: str
    """Its name in metrics.jsonl, nested names joined by a slash."""
    form: str
    width: int
    importance: int = 1
    """The least important columns disappear first on a narrow terminal, the last one before the others."""


COLUMNS = (
    Column("step", "", "", 7, 9),
    Column("reward", "reward_mean", ".3f", 7, 8),
    Column("acc", "accuracy", ".2f", 6, 4),
    Column("length", "response_tokens_mean", ".1f", 7, 5),
)
LAST_COLUMNS = (
    Column("grad", "grad_norm", ".3f", 8, 2),
    Column("tok/s", "tokens_per_s", ".0f", 7, 3),
    Column("total", "seconds/total", ".1f", 7, 7),
)
DECLARED_WIDTH = 9
PHASES = {
    Phase.GENERATION: ("gen", "generating"),
    Phase.REWARD: ("rew", "scoring"),
    Phase.WAITING: ("wait", "waiting for rollouts"),
    Phase.LOGPROBS: ("logp", "computing log-probs"),
    Phase.CRITIC: ("critic", "training the critic"),
    Phase.TRAINING: ("train", "training"),
    Phase.REFIT: ("refit", "refitting the engines"),
    Phase.VALIDATION: ("valid", ""),
    Phase.CHECKPOINT: ("save", "saving"),
    Phase.OTHER: ("other", ""),
}
"""Labels of each phase in a step line, and in the last line while active."""
PHASES_WIDTH = 44
"""Columns that the seconds of the phases of a usual step take."""

Progress = Callable[[Phase], tuple[int, int] | None]
"""How far a phase has come, as (done, total); None: nobody knows."""


class Display:
    """Messages, phases and step lines on stderr, and messages and step lines in the run's log file."""

    def __init__(self, *, steps: int, stream: TextIO | None = None, quiet: bool = False, label: str = "") -> None:
        """`label`: begins each line, where several runs share a terminal; such a display has no line that changes."""
        # soft_wrap: a line of a log file is one line, however narrow the terminal it is read in.
        output = stream or sys.stderr
        self._stream = output if isinstance(output, Unbreakable) else Unbreakable(output)
        self.console = Console(file=cast(TextIO, self._stream), soft_wrap=True, highlight=False, quiet=quiet)
        self.steps, self._label = steps, label
        self.metrics: Sequence[Metric] = ()
        """Metrics with possible columns: the framework's and the algorithm's."""
        self.without: Sequence[str] = ()
        """Metrics that the run does not have, and that have no column."""
        self.progress: Progress = lambda phase: None
        """Asked every now and then while a phase of a step is under way."""
        self._what, self._since = "", 0.0
        """The phase or work under way, and its start."""
        self._phase: Phase | None = None
        self._step: int | None = None
        self._step_since = 0.0
        self._took: deque[float] = deque(maxlen=RECENT)
        """Seconds of the last steps."""
        self._seen: dict[Phase, tuple[int, int] | None] = {}
        """Progress of the phase, written by another thread."""
        self._start: dict[str, float] = {}
        """Seconds of the phases of the start."""
        self._lines = 0
        self._log: Path | None = None
        self._unlogged = ""
        self._loss_told = False
        self._live: Live | None = None
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def in_terminal(self) -> bool:
        return self.console.is_terminal and not self._label

    @property
    def width(self) -> int:
        """Line width: the terminal's, or a readable one for logs."""
        return self.console.width if self.in_terminal else LOG_WIDTH

    @property
    def work(self) -> str:
        """The phase under way."""
        return self._what

    @property
    def log(self) -> Path | None:
        return self._log

    def say(self, text: str) -> None:
        self.note(text)
        self._print(text)

    def note(self, text: str) -> None:
        """Write a message to the log file only, delayed until `log_to`."""
        self._unlogged += f"{_time()} {text}\n"
        if self._log is not None:
            with contextlib.suppress(OSError), self._log.open("a", errors="backslashreplace") as file:
                line, self._unlogged = self._unlogged, ""
                file.write(line)  # a full disk shows where something is written that matters

    def log_to(self, path: Path) -> None:
        """Append messages to `path` from now on, with the earlier ones."""
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            with path.open("a", errors="backslashreplace") as file:
                file.write(self._unlogged)
            self._log, self._unlogged = path, ""

    def doing(self, activity: str, *, own_bar: bool = False) -> None:
        """Begin a phase of the start or within a step. `own_bar`: the phase draws its own progress bar."""
        self._finish_phase()
        self._turn_to(activity)
        if own_bar:
            self._stop_live()
        else:
            self._show_live()

    def begin_step(self, step: int) -> None:
        """Begin a step, counted from 1, after a line on the start's duration."""
        self._finish_phase()
        if self._start and not self._label:  # of several runs, the sweep's own display tells it
            line = f"started in {clock(sum(self._start.values()))}"
            for number, activity in enumerate(sorted(self._start, key=lambda activity: -self._start[activity])):
                longer = f"{line}{', ' if number else ': '}{activity.partition(',')[0]} {self._start[activity]:.0f} s"
                if self._start[activity] < LEAST_SHOWN_S or len(longer) > self.width:
                    break
                line = longer
            self._print(line)
            self._start = {}
        self._turn_to("")
        self._step, self._step_since = step, self._since
        self._show_live()

    def phase(self, phase: Phase) -> None:
        """Begin a phase of the step; `StepTimer` calls this."""
        if self._step is not None:
            self._turn_to(PHASES[phase][1], phase)
            if self._live is not None:
                self._live.refresh()

    def step(self, step: int, metrics: Metrics) -> None:
        """Show the line of a finished step."""
        plain = step_line(step, self.steps, metrics, self.metrics, plain=True, without=self.without)
        self.note(plain)
        self._took.append(metrics["seconds"]["total"])
        self._what, self._phase = "", None
        if self._step == self.steps:
            self._step = None
        if not self.in_terminal:
            self._print(plain)
            return
        width, without = self.console.width, self.without
        if self._lines % HEADING_EVERY == 0:
            self.console.print(heading_line(self.metrics, width, without), style="bold")
        self._lines += 1
        self._print(step_line(step, self.steps, metrics, self.metrics, plain=False, width=width, without=without))

    def _print(self, text: str) -> None:
        line = f"{self._label}: {text}" if self._label else text
        self.console.print(line if self.console.is_terminal else f"{_time()} {line}", markup=False)
        if self._stream.lost and not self._loss_told:
            self._loss_told = True
            self.note(f"stderr cannot be written ({self._stream.lost}): the run continues, and its messages are here")

    def _turn_to(self, activity: str, phase: Phase | None = None) -> None:
        self._what, self._since, self._phase, self._seen = activity, time.monotonic(), phase, {}

    def _finish_phase(self) -> None:
        if self._step is None and self._what:
            seconds = time.monotonic() - self._since
            self.note(f"{self._what}: {seconds:.1f} s")
            self._start[self._what] = self._start.get(self._what, 0.0) + seconds
            self._what = ""

    def line(self) -> str:
        """Return the line at the foot of a terminal: `step 3/12 · generating 18/32 · 00:07 · 1:40 left`."""
        now = time.monotonic()
        if self._step is None:
            return f"{self._what} · {clock(now - self._since)}" if self._what else ""
        done = self._seen.get(self._phase) if self._phase is not None else None
        activity = self._what + (f" {done[0]:,}/{done[1]:,}" if done and done[1] > 1 else "")
        inside, left = now - self._step_since, ""
        if self._took:
            usual = sum(self._took) / len(self._took)
            left = f"{clock(max(0.0, usual - inside) + usual * (self.steps - self._step))} left"
        return " · ".join(filter(None, (f"step {self._step}/{self.steps}", activity, clock(inside), left)))

    def _show_live(self) -> None:
        """Keep a line with a spinner at the foot of a terminal; in a log, a reminder of what takes long."""
        if self.console.quiet:
            return
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="display", daemon=True)
            self._watcher.start()
        if self.in_terminal and self._live is None:
            spinner = Spinner("dots")

            def line() -> Spinner:
                spinner.update(text=Text(self.line(), no_wrap=True, overflow="ellipsis"))
                return spinner

            self._live = Live(get_renderable=line, console=self.console, transient=True, refresh_per_second=4)
            self._live.start()
        elif self._live is not None:
            self._live.refresh()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S if self.in_terminal else REMIND_S):
            phase, seen, since = self._phase, self._seen, self._since
            if phase is not None:
                seen[phase] = self.progress(phase)
            if not self.in_terminal and self._what and time.monotonic() - since >= REMIND_S:
                self._print(self.line())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # the phase under way was not finished
            self._what = ""
        self.close()

    def close(self) -> None:
        """End the phase under way, take the last line away and give the terminal its cursor back."""
        self._closed.set()
        self._finish_phase()
        self._what, self._step = "", None
        self._stop_live()

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _time() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _columns(declared: Sequence[Metric], width: int | None, without: Sequence[str]) -> tuple[list[Column], bool]:
    declared_columns = [
        Column(metric.column, metric.name, metric.form, DECLARED_WIDTH) for metric in declared if metric.column
    ]
    columns = [column for column in (*COLUMNS, *declared_columns, *LAST_COLUMNS) if column.name not in without]
    room = math.inf if width is None else width
    while len(columns) > 1 and sum(column.width + 2 for column in columns) - 2 > room:
        least = min(column.importance for column in columns)
        columns.remove([column for column in columns if column.importance == least][-1])
    return columns, sum(column.width + 2 for column in columns) + PHASES_WIDTH <= room


def heading_line(declared: Sequence[Metric], width: int | None = None, without: Sequence[str] = ()) -> str:
    columns, phases = _columns(declared, width, without)
    return "  ".join([*(f"{column.heading:>{column.width}}" for column in columns), *["phases (s)"] * phases])


def step_line(
    step: int,
    steps: int,
    metrics: Metrics,
    declared: Sequence[Metric] = (),
    *,
    plain: bool,
    width: int | None = None,
    without: Sequence[str] = (),
) -> str:
    """Return a step in a line of `width` columns (None: unlimited); `plain` names values, for logs. Conditions follow,
    or go to a second line. `without`: metrics without column."""
    flat = dict(flatten(metrics))
    seconds = {Phase(name): value for name, value in metrics["seconds"].items() if name != "total"}
    phases = " ".join(f"{PHASES[phase][0]} {value:.1f}" for phase, value in seconds.items() if value >= 0.05)
    columns, has_phases = _columns(declared, width, without)
    cells, marked = list[str](), marks(metrics)
    for column in columns:
        value = flat.get(column.name)
        text = "-" if value is None else f"{value:{column.form}}" + "s" * (column.heading == "total")
        cells.append(f"{step}/{steps}" if column.heading == "step" else text)
    if plain:
        values = " ".join(f"{column.heading} {value}" for column, value in zip(columns, cells, strict=True))
        return " | ".join(part for part in (values, marked, phases) if part)
    line = "  ".join(f"{value:>{column.width}}" for column, value in zip(columns, cells, strict=True))
    below = marked and width is not None and len(line) + 2 + len(marked) > width
    line += f"  {marked}" if marked and not below else ""
    if has_phases:
        line += f"  {phases[: width and max(0, width - len(line) - 2)]}"
    return f"{line}\n{marked:>{width}}" if below else line


class WorkProgress:
    """Counts pieces of work, with their rate and the time that is left, on stderr; for a `with` block."""

    def __init__(self, unit: str, total: int, done: int = 0) -> None:
        """`done`: pieces from before this process, which do not count in its rate."""
        self._unit, self._total, self._done, self._before = unit, total, done, done
        self._begun = self._said = time.monotonic()
        self._console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
        self._bar = ProgressBar(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self._console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, completed=done, rate="")

    def advance(self, activity: str, count: int) -> None:
        self._done += count
        now = time.monotonic()
        rate = (self._done - self._before) / max(now - self._begun, 1e-6)
        if self._console.is_terminal:
            speed = f"{rate:.1f} {self._unit}/s"
            self._bar.update(self._task, description=activity, completed=self._done, rate=speed)
        elif now - self._said >= LINE_EVERY_S or self._done == self._total:
            self._said = now
            left = f", {(self._total - self._done) / rate:.0f} s left" if self._done < self._total else ""
            line = f"{activity}: {self._done} of {self._total} {self._unit}, {rate:.1f} a second{left}"
            self._console.print(line, markup=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()
