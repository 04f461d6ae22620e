"""Summary at the end of a run, and the command that resumes it."""

from __future__ import annotations

import contextlib
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.errors import InputError, RlctlError
from rlctl.jobs.before_after import answered_twice, command_to_try
from rlctl.methods.available import command_of
from rlctl.preparation.job import Job
from rlctl.report.run_report import write_report
from rlctl.runs.directory import RunDirectory
from rlctl.runs.samples import read_samples
from rlctl.telemetry.conversation import conversation
from rlctl.telemetry.display import Display
from rlctl.telemetry.headline import MetricChange, calls_nothing, findings, headline, removed
from rlctl.telemetry.metrics import Metrics
from rlctl.telemetry.terminal import colored

SHOWN_CHARACTERS = 300
"""Maximum number of characters of a shown completion without a tool call."""


@dataclass(frozen=True)
class RunSummary:
    """The end of a run: finished or interrupted, its results, and the commands to continue with."""

    directory: str
    steps: int
    """Finished steps, including steps before a resume."""
    interrupted: bool
    headline: MetricChange | None
    """Change of the reward, or of the loss in runs without rewards; None: no step was finished."""
    findings: tuple[str, ...]
    """Sentences about causes of slow learning, with remedies."""
    seconds: float
    checkpoint: str | None
    dropped_rollouts: int = 0
    """Number of rollouts that were left out because a reward function failed on them."""
    stopped_by: str | None = None
    """The signal that stopped the run; None: no signal."""
    command: str = "train grpo"
    """The rlctl command that resumes the run."""
    removed: tuple[str, ...] = ()
    """Sentences about causes of slow learning in the first steps that the last steps no longer have."""
    answers: tuple[str, ...] = ()
    """Lines with a held-out prompt and its answers before and after training."""
    trial: str = ""
    """The command that tries the trained model."""

    def text(self) -> str:
        """Return the summary for the terminal."""
        by = f"stopped by {self.stopped_by} after" if self.stopped_by else "stopped after"
        ended = colored(by if self.interrupted else "finished", "warn" if self.interrupted else "ok", sys.stdout)
        is_saved = (self.checkpoint or "").endswith(f"step_{self.steps}")
        saved = f", {'saved' if is_saved else 'not saved'}" if self.interrupted else ""
        lines = [f"{ended} step {self.steps} in {self.seconds:.0f} s{saved}"]
        if self.headline is not None:
            lines.append(self.headline.text())
        lines += [*self.answers, *self.removed, *self.findings]
        if self.dropped_rollouts:
            lines.append(
                f"{self.dropped_rollouts} rollouts were left out: a reward function or an environment failed on them"
            )
        if self.steps:
            lines.append(f"report: {self.directory}/report.html")
        if self.checkpoint and self.trial:
            lines.append(f"{'export' if ' convert ' in self.trial else 'try'} it: {self.trial}")
        if self.interrupted:
            lines.append(f"resume with: rlctl {self.command} --resume --run-dir {shlex.quote(self.directory)}")
        return "\n".join(lines)


def uncalled(job: Job, run: RunDirectory, lines: Sequence[Metrics]) -> Iterator[str]:
    """If the run's environment was never called, yield its first completion and an example of a tool call."""
    if job.prompts.environment is None or not calls_nothing(lines):
        return
    with contextlib.suppress(InputError):  # a run may keep no samples
        messages = conversation(read_samples(run.path)[0])
        first = next((message.text for message in messages if message.role == "assistant"), messages[-1].text)
        yield f"The first completion: {textwrap.shorten(repr(first), SHOWN_CHARACTERS, placeholder=' ...')}"
    if example := job.prompts.environment.example:
        yield f"A call of a tool: {example!r}"


def with_resume_hint(error: RlctlError, run: RunDirectory, command: str) -> RlctlError:
    """Return an error of the same class with a hint about resuming, if the run has finished steps."""
    if not run.has_steps():
        return error
    hints = [error.hint, how_to_resume(run, command)]
    return type(error)(error.message, " ".join(hint for hint in hints if hint))


def how_to_resume(run: RunDirectory, command: str = "train grpo") -> str:
    """Return a sentence with the command that resumes the run from its newest checkpoint."""
    checkpoints = run.checkpoints()
    if not checkpoints and run.damaged:
        return "No checkpoint is left to resume from."
    if not checkpoints:
        return "There is no checkpoint yet to resume from (run.checkpoint_minutes says when they are saved)."
    place = shlex.quote(str(run.path))
    return f"Resume from step {checkpoints[-1].step} with: rlctl {command} --resume --run-dir {place}"


def written_report(run: RunDirectory, display: Display, state: str) -> list[dict[str, Any]]:
    """Write report.html, and return the metrics of the run. Report a failure without failing the run."""
    try:
        return write_report(run, state)
    except Exception as error:  # noqa: BLE001 - the run's results are saved, so no error of the report may fail it
        display.say(f"The report could not be written: {type(error).__name__}: {error}")
    return []


def summary_of(
    job: Job,
    run: RunDirectory,
    lines: Sequence[Metrics],
    *,
    steps: int,
    seconds: float,
    interrupted: bool,
    stopped_by: str | None,
) -> RunSummary:
    """Return the summary of a run with `steps` finished steps. `lines`: its metrics."""
    checkpoints = run.checkpoints()
    return RunSummary(
        directory=str(run.path),
        steps=steps,
        interrupted=interrupted,
        headline=headline(lines),
        findings=(*findings(lines), *uncalled(job, run, lines)),
        removed=tuple(removed(lines)),
        stopped_by=stopped_by,
        seconds=seconds,
        checkpoint=str(checkpoints[-1].path) if checkpoints else None,
        command=command_of(job.config.run.algorithm),
        dropped_rollouts=sum(line.get("dropped_rollouts", 0) for line in lines),
        answers=tuple(answered_twice(run, lines)),
        trial=command_to_try(job, run) if checkpoints else "",
    )
