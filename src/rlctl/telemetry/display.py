"""What a run says while it trains: a table that grows in a terminal, one plain line a step in a log file."""

from __future__ import annotations

import sys
from typing import Any, Self, TextIO

from rich.console import Console
from rich.status import Status

from rlctl.telemetry.metrics import Metrics
from rlctl.telemetry.phases import Phase

HEADINGS = ("step", "reward", "acc", "length", "kl", "diff", "entropy", "clip", "grad", "tok/s", "total")
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
    """Messages and step lines on stderr; `what is going on now` as a spinner where stderr is a terminal."""

    def __init__(self, *, steps: int, stream: TextIO | None = None, quiet: bool = False) -> None:
        # soft_wrap: a line of a log file is one line, however narrow the terminal it is read in.
        self.console = Console(file=stream or sys.stderr, soft_wrap=True, highlight=False, quiet=quiet)
        self.steps = steps
        self._status: Status | None = None
        self._lines = 0

    def say(self, text: str) -> None:
        """A message that stays."""
        self.console.print(text, markup=False)

    def doing(self, what: str) -> None:
        """What the run is busy with: a spinner in a terminal, nothing in a log."""
        if not self.console.is_terminal:
            return
        if self._status is None:
            self._status = self.console.status(what)
            self._status.start()
        self._status.update(what)

    def step(self, step: int, metrics: Metrics) -> None:
        """The line of a finished step."""
        if self._lines % 20 == 0 and self.console.is_terminal:
            self.console.print("  ".join(f"{name:>{width}}" for name, width in _columns()), style="bold")
        self._lines += 1
        self.console.print(step_line(step, self.steps, metrics, plain=not self.console.is_terminal), markup=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the spinner away and give the terminal its cursor back."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def _columns() -> list[tuple[str, int]]:
    return [*zip(HEADINGS, (7, 7, 6, 7, 9, 8, 8, 6, 8, 7, 7), strict=True), ("phases (s)", 10)]


def step_line(step: int, steps: int, metrics: Metrics, *, plain: bool) -> str:
    """One step in one line; `plain` names each value, for logs where no heading is near."""
    values = _values(step, steps, metrics)
    phases = " ".join(
        f"{PHASE_LABELS[Phase(name)]} {value:.1f}"
        for name, value in metrics["seconds"].items()
        if name != "total" and value >= 0.05
    )
    if plain:
        return " ".join(f"{name} {value}" for name, value in zip(HEADINGS, values, strict=True)) + f" | {phases}"
    return "  ".join(f"{value:>{width}}" for value, (_, width) in zip(values, _columns(), strict=False)) + "  " + phases


def _values(step: int, steps: int, metrics: Metrics) -> list[str]:
    accuracy: Any = metrics.get("accuracy")
    return [
        f"{step + 1}/{steps}",
        f"{metrics['reward_mean']:.3f}",
        "-" if accuracy is None else f"{accuracy:.2f}",
        f"{metrics['response_tokens_mean']:.1f}",
        f"{metrics['kl']:.2e}",
        f"{metrics['logprob_diff']['mean']:.1e}",
        f"{metrics['entropy']:.3f}",
        f"{metrics['clip_fraction']:.3f}",
        f"{metrics['grad_norm']:.3f}",
        f"{metrics['tokens_per_s']:.0f}",
        f"{metrics['seconds']['total']:.1f}s",
    ]
