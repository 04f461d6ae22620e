"""Configuration and checks of a resumed run: its stored configuration, overridden by the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlctl.config.facts import FREE, LAYOUT, Unloadable
from rlctl.config.files import user_path
from rlctl.config.load import DEFAULT, PLANNER, Resolved, stored_values
from rlctl.config.parallel import SIZES
from rlctl.config.sources import ALGORITHM, Source, Value
from rlctl.errors import InputError
from rlctl.jobs.shown_run import DryRun
from rlctl.methods.configuration import from_sources
from rlctl.preparation.job import Job, Starts, prepare_job
from rlctl.preparation.manifest import content_changes, version_changes
from rlctl.runs.directory import MANIFEST, RunDirectory, is_edited, newest_run
from rlctl.settings.config import RlctlConfig
from rlctl.telemetry.metrics import read_metrics
from rlctl.training.schedule import learning_rate, weight_decay

RUNS = Path("runs")


def run_to_resume(resolved: Resolved) -> RunDirectory:
    """Return the run that `--run-dir` names, or the newest."""
    directory = resolved.config.run.dir
    return RunDirectory(Path(directory) if directory else newest_run(RUNS))


def values_of_run(place: Any) -> list[Value]:
    """Return the values that the user set for the run in `place` (None: the newest run); the command line overrides
    them. Empty without a run, which the resume reports."""
    run = RunDirectory(user_path(place) if isinstance(place, str) else newest_run(RUNS))
    if not (run.path / MANIFEST).exists():
        return []
    # Drop `run.dir`, since the run may have been moved, and the values that algorithm and planner decide again.
    values = (value for value in stored_values(run.manifest()["config"]) if value.key != "run.dir")
    return [value for value in values if not value.origin.startswith((ALGORITHM, PLANNER))]


def dry_resume(
    resolved: Resolved, tell: Callable[[str], None], *, allow_changes: bool, completion: str | None = None
) -> DryRun:
    """Return the dry run of `--resume`, with the checks of a real resume."""
    run = run_to_resume(resolved)
    job = resumed_job(run, resolved, tell, allow_changes=allow_changes, completion=completion)
    return DryRun.of(job)


def resumed_job(
    run: RunDirectory,
    resolved: Resolved,
    tell: Callable[[str], None],
    *,
    allow_changes: bool,
    starts: Starts | None = None,
    completion: str | None = None,
) -> Job:
    """Return the job that continues `run`, with its stored configuration and the new values of `resolved`. Raises
    InputError for a change that affects the run's numbers, unless `allow_changes` (then `tell` receives the change),
    and for a run that has taken all steps."""
    job = continued_job(run, resolved, tell, allow_changes=allow_changes, starts=starts, completion=completion)
    checkpoints = run.checkpoints()
    if checkpoints and (done := checkpoints[-1].step) >= job.config.run.steps:
        if starts is not None:  # a run that was killed during its last save lacks the last line of metrics
            run.open_metrics(checkpoints[-1])
        raise InputError(
            f"--resume: {run.path} has finished {done} steps, and run.steps is {job.config.run.steps}.",
            "Give more with --steps.",
        )
    return job


def continued_job(
    run: RunDirectory,
    resolved: Resolved,
    tell: Callable[[str], None],
    *,
    allow_changes: bool = False,
    starts: Starts | None = None,
    completion: str | None = None,
    held_adapters: int = 1,
) -> Job:
    """As `resumed_job`, also of a run that has taken all steps. `held_adapters`: see `prepare_job`."""
    stored = run.manifest()
    read_metrics(run.metrics)  # raises for a damaged file before anything starts
    edited = ["manifest.json was edited since rlctl wrote it"] if is_edited(stored) else []
    merged, of_keys = continued(stored, resolved)
    changes = [*edited, *version_changes(stored, tell), *of_keys.values()]
    if (lost := next(_unloadable(of_keys, merged), None)) and run.checkpoints():
        raise InputError(
            f"--resume: {lost}, and no checkpoint of the run can be loaded with that.",
            "Leave it out, or start a new run.",
        )
    if changes and not allow_changes:
        raise _refusal(changes[0])
    with run.opened_from_here():
        job = prepare_job(merged, tell, starts=starts, completion=completion, held_adapters=held_adapters)
    for change in [*changes, *content_changes(stored, job)]:
        if not allow_changes:
            raise _refusal(change)
        tell(f"continuing although {change}")
    if change := _layout_change(stored, job):
        tell(change)
    if (checkpoints := run.checkpoints()) and checkpoints[-1].step < job.config.run.steps:
        for change in _schedule_changes(stored, job.config, checkpoints[-1].step):
            tell(change)
    return job


def _unloadable(changes: Mapping[str, str], merged: Resolved) -> Iterator[str]:
    """Yield the changes that make all checkpoints unloadable."""
    values = dict(merged.leaves())
    for key, mark in merged.schema.with_mark(Unloadable).items():
        if key in changes and (mark.to is None or values.get(key) in mark.to):
            yield changes[key]


def _refusal(change: str) -> InputError:
    return InputError(
        f"--resume: {change}.", "Restore it, start a new run, or add --allow-changes to continue with the change."
    )


def _layout_change(stored: dict[str, Any], job: Job) -> str | None:
    """Return a note if the policy's layout differs from the last start of the run."""
    then, now = stored.get("plan", {}).get("training") or {}, job.plan.training
    if now is None:
        return None
    before = replace(now.parallel, **{size: then[size] for size in SIZES if size in then})
    backend = then.get("backend", job.plan.backend)
    if (backend, before) == (job.plan.backend, now.parallel):
        return _thread_change(stored, job)
    was, now_is = before.name(), now.parallel.name()
    if backend != job.plan.backend:
        return (
            f"training was laid out as {was} by {backend} and continues as {now_is} by {job.plan.backend}: the weights "
            "are the same, and the optimizer's moments start from zero"
        )
    return f"training was laid out as {was} and continues as {now_is}: equal within rounding, not bitwise"


def _thread_change(stored: dict[str, Any], job: Job) -> str | None:
    then, now = stored["config"]["training.threads"]["value"], job.config.training.threads
    if None in (then, now) or then == now:
        return None
    return (
        f"training computed with training.threads = {then} and continues with {now}: equal within rounding, not bitwise"
    )


ENDS_OF_SCHEDULES = frozenset(
    f"{of}{key}" for of in ("scheduler.", "critic.scheduler.") for key in ("decay_steps", "weight_decay_steps")
)
"""Keys of the schedules whose unset value is `run.steps`."""


def _schedule_changes(stored: dict[str, Any], config: RlctlConfig, done: int) -> Iterator[str]:
    """Yield a note per schedule that a new number of steps stretches or shortens in the middle of the run."""
    before, now = stored["config"]["run.steps"]["value"], config.run.steps
    for model in config.schedules:
        schedule = model.scheduler
        for label, key, value_of, most, follows in (
            ("learning rate", "decay_steps", learning_rate, model.lr, schedule.decay != "constant"),
            ("weight decay", "weight_decay_steps", weight_decay, model.weight_decay,
             schedule.start_weight_decay != schedule.end_weight_decay),
        ):  # fmt: skip
            if before == now or not follows or getattr(schedule, key) is not None:
                continue
            last, following = (value_of(step, of, most, schedule) for step, of in ((done - 1, before), (done, now)))
            yield (
                f"the {model.what}{label} was {last:.3g} in step {done} and is {following:.3g} in step {done + 1}: its "
                f"schedule ends with the run, which has {now} steps instead of {before}. --set "
                f"{model.prefix}scheduler.{key}={before} keeps the schedule that the run began with"
            )


def continued(stored: dict[str, Any], resolved: Resolved) -> tuple[Resolved, dict[str, str]]:
    """Return the stored configuration with the new values of `resolved`, and a sentence per key that a resume should
    not change. If the layout changes, the planner decides its values again, and the user's values stay."""
    then, values = stored["config"], stored_values(stored["config"])
    values_given = [value for value in resolved.given() if not _yields_to_user(value, then)]
    changed = [value for value in values_given if value.key not in then or then[value.key]["value"] != value.value]
    if any(value.key == "run.algorithm" for value in changed):
        values = [value for value in values if not value.origin.startswith(ALGORITHM)]
    schema = resolved.schema
    if any(LAYOUT in schema.facts(value.key) for value in changed):
        # The planner's backend stays unless the user sets another, because a checkpoint has its optimizer state.
        values = [value for value in values if value.origin != PLANNER or value.key == "training.backend"]
    changes: dict[str, str] = {}
    for value in changed:
        before = then.get(value.key)
        unset = value.key in ENDS_OF_SCHEDULES and before is not None and before["value"] is None
        if unset and value.value == then["run.steps"]["value"]:
            continue  # the value that the unset key stands for
        if before and _is_same_file(Path(stored.get("working_directory", "")), before["value"], value.value):
            continue
        if not schema.facts(value.key) & (FREE | LAYOUT):
            begun = f"the run was begun with {before['value']!r}" if before else "it was not set at first"
            changes[value.key] = f"`{value.key}` = {value.value!r} ({value.origin}), but {begun}"
    undecided = [
        value for value in values_given if value.key in then and then[value.key]["origin"] in (DEFAULT, PLANNER)
    ]
    return from_sources([Source(values, shared=True), Source([*undecided, *changed], shared=True)]), changes


def _is_same_file(begun_in: Path, before: Any, now: Any) -> bool:
    """Return whether two paths or two `file.py:name` name the same file. `begun_in`: working directory of `before`."""
    if not (isinstance(before, str) and isinstance(now, str)):
        return False
    then, here = begun_in / user_path(before), user_path(now)
    if os.path.exists(then) and os.path.exists(here):  # Path.exists raises for a long template
        return os.path.samefile(then, here)
    (file, colon, name), (file_now, _, name_now) = before.rpartition(":"), now.rpartition(":")
    return bool(colon) and name == name_now and _is_same_file(begun_in, file, file_now)


def _yields_to_user(value: Value, stored: dict[str, Any]) -> bool:
    """Return whether `value` is an algorithm's default for a key that the user set at the start of the run."""
    before = stored.get(value.key, {"origin": DEFAULT})["origin"]
    return value.origin.startswith(ALGORITHM) and not before.startswith((ALGORITHM, DEFAULT))
