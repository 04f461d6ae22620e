"""The runs of a sweep on disk: a directory each, and `sweep.json` with what has ended, so that a sweep continues."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.cluster.ray_session import BesideSession
from rlctl.config.files import write_json
from rlctl.config.load import PLANNER, Resolved, stored_values
from rlctl.config.sources import Value
from rlctl.errors import InputError
from rlctl.garbage import many_objects
from rlctl.jobs.kept_tokenizer import keep_tokenizer
from rlctl.jobs.resume import RUNS, continued_job
from rlctl.jobs.shared_base import require_adapters, require_shareable
from rlctl.jobs.train import begin_ray, locked, name_of, unused_place
from rlctl.jobs.training_run import show_columns
from rlctl.preparation.job import Job, prepare_job
from rlctl.preparation.manifest import manifest_of
from rlctl.runs.directory import MANIFEST, RunDirectory
from rlctl.telemetry.display import Display
from rlctl.telemetry.metrics import read_metrics

RECORD = "sweep.json"
LOG = "sweep.log"
Values = Mapping[str, Mapping[str, Any]]
"""By label, the values of each run that are not defaults."""


@dataclass(frozen=True)
class Swept:
    """One run of a sweep."""

    label: str
    job: Job
    run: RunDirectory
    display: Display
    resumes: bool
    """Whether its directory is from before this process."""

    @property
    def steps(self) -> int:
        """The steps that it is to take."""
        return self.job.config.run.steps


@dataclass(frozen=True)
class End:
    """The end of a run, which no later process trains."""

    step: int
    of: int
    """`run.steps` at the end. With more steps a finished run continues."""
    diverged: str = ""
    """The error of a run whose parameters or loss were no longer finite."""


class Record:
    """The ends of a sweep's runs, by label, in `sweep.json` of its directory."""

    def __init__(self, directory: Path, values: Values) -> None:
        self._path, self._values = directory / RECORD, values
        self._ends = {label: End(**end) for label, end in _stored(self._path).get("ends", {}).items()}

    def end_of(self, swept: Swept) -> End | None:
        """Return the end of a run; None: it has steps left."""
        end = self._ends.get(swept.label)
        return end if end is not None and (end.diverged or end.of >= swept.steps) else None

    def add(self, swept: Swept, step: int, diverged: str = "") -> None:
        self._ends[swept.label] = End(step, swept.steps, diverged)
        self.write()

    def write(self) -> None:
        write_json(self._path, {"values": self._values, "ends": {key: asdict(end) for key, end in self._ends.items()}})


def _stored(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}.", "Name another --run-dir.") from error


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, in locked directories."""

    directory: Path
    record: Record
    runs: Sequence[Swept]

    @property
    def left(self) -> list[Swept]:
        """The runs that have not ended."""
        return [run for run in self.runs if self.record.end_of(run) is None]

    @property
    def diverged(self) -> dict[str, str]:
        """The errors of diverged runs, by label."""
        ends = {run.label: self.record.end_of(run) for run in self.runs}
        return {label: end.diverged for label, end in ends.items() if end is not None and end.diverged}


def values_of(variants: Sequence[tuple[str, Resolved]]) -> Values:
    return {label: {value.key: value.value for value in resolved.given()} for label, resolved in variants}


def unfinished(values: Values) -> Path | None:
    """Return the newest sweep below `runs/` that began with these values and has runs left; None: there is none, or
    another process trains it."""
    for path in sorted(RUNS.glob(f"*/{RECORD}"), key=lambda path: path.stat().st_mtime, reverse=True):
        with contextlib.suppress(InputError):
            stored = _stored(path)
            runs = [RunDirectory(manifest.parent) for manifest in path.parent.glob(f"*/{MANIFEST}")]
            left = values.keys() - stored.get("ends", {}).keys()
            if stored.get("values") == values and left and runs and not any(run.is_locked() for run in runs):
                return path.parent
    return None


def open_sweep(
    variants: Sequence[tuple[str, Resolved]],
    display: Display,
    ray: BesideSession,
    stack: contextlib.ExitStack,
    *,
    quiet: bool,
) -> Sweep:
    """Prepare all runs and open their directories, which `stack` closes; begin Ray unless all have ended. Runs of
    `run.dir`, or else of an unfinished sweep below `runs/` with the same values, continue.

    Raises ConfigError if the runs cannot share processes, and InputError for a run that began with other values."""
    for _, resolved in variants:
        require_adapters(resolved.config)
    values, place = values_of(variants), variants[0][1].config.run.dir
    earlier = Path(place) if place else unfinished(values)
    begun = {label: run for label, run in _places(earlier, variants).items() if (run.path / MANIFEST).exists()}
    ends = {} if earlier is None else _stored(earlier / RECORD).get("ends", {})
    # Runs that join a sweep share the processes that the planner chose for it.
    planned = [value for run in [*begun.values()][:1] for value in planned_values(run)]
    jobs, is_begun = dict[str, Job](), False
    for label, resolved in variants:
        resolved = resolved if label in begun else resolved.deciding(planned)
        begins = partial(begin_ray, ray, display.say)
        starts = (lambda *_: None) if is_begun or label in ends else begins
        is_begun = is_begun or label not in ends
        jobs[label] = _prepared(resolved, begun.get(label), display, starts, len(variants), stack)
        require_shareable(label, next(iter(jobs.values())), jobs[label])
    directory = earlier or unused_place(RUNS / f"sweep-{name_of(jobs[variants[0][0]])}")
    opened = [
        stack.enter_context(_opened(label, job, directory, begun.get(label), quiet)) for label, job in jobs.items()
    ]
    display.log_to(directory / LOG)
    sweep = Sweep(directory, Record(directory, values), opened)
    sweep.record.write()
    for run in sweep.left:
        if run.resumes and (done := _steps_of(run)) >= run.steps:
            sweep.record.add(run, done)
    if begun:
        display.say(f"continuing the sweep in {directory}; with another --run-dir it begins anew")
    if sweep.left and not is_begun:  # of runs that had ended, with more steps now
        job = sweep.left[0].job
        begin_ray(ray, display.say, job.config, job.plan, job.workers_spec())
    return sweep


def planned_values(run: RunDirectory) -> list[Value]:
    return [value for value in stored_values(run.manifest()["config"]) if value.origin == PLANNER]


def _places(directory: Path | None, variants: Sequence[tuple[str, Resolved]]) -> dict[str, RunDirectory]:
    return {} if directory is None else {label: RunDirectory(directory / folder_of(label)) for label, _ in variants}


def folder_of(label: str) -> str:
    return re.sub(r"[^\w.=+-]+", "-", label)


def _prepared(
    resolved: Resolved, run: RunDirectory | None, display: Display, starts: Any, held: int, stack: contextlib.ExitStack
) -> Job:
    """Prepare a run, which continues in the directory `run` if it has one, locked from here on."""
    with many_objects():
        if run is None:
            return prepare_job(resolved, display.say, starts=starts, held_adapters=held)
        stack.enter_context(locked(run, run.reopen))
        run.recover_partial(display.say)
        try:
            return continued_job(run, resolved, display.say, starts=starts, held_adapters=held)
        except InputError as error:
            message = error.message.removeprefix("--resume: ")
            hint = "Use the arguments that the sweep began with, or name another --run-dir."
            raise type(error)(f"The sweep has begun the run {run.path}: {message}", hint) from error


@contextlib.contextmanager
def _opened(label: str, job: Job, directory: Path, begun: RunDirectory | None, quiet: bool) -> Iterator[Swept]:
    """Create the directory of a run, or open the one that it has begun, and a display whose lines begin with its
    label."""
    run = begun or RunDirectory(directory / folder_of(label))
    with (
        contextlib.nullcontext() if begun else locked(run, run.create),
        Display(steps=0, quiet=quiet, label=label) as display,
    ):
        try:
            display.log_to(run.log)
            show_columns(job, display)
            if not begun:
                run.write_manifest(manifest_of(job))
                keep_tokenizer(job, run.path)
            yield Swept(label, job, run, display, resumes=begun is not None)
        except BaseException as error:
            if not begun and not run.has_steps():
                run.abandon(keep_logs=isinstance(error, Exception))
            raise


def _steps_of(swept: Swept) -> int:
    """Return the steps that a run has finished. One that was killed during its last save gets its last line of metrics
    back."""
    checkpoints = swept.run.checkpoints()
    if checkpoints and checkpoints[-1].step >= swept.steps:
        swept.run.open_metrics(checkpoints[-1])
    lines = read_metrics(swept.run.metrics)
    return lines[-1]["step"] if lines else 0
