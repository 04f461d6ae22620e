"""A rehearsal: a complete small run on a machine without GPUs, before the user takes the cluster.

`rehearsal/shrink.py` reduces the user's configuration, and a tiny random model of the same family replaces the model.
The rest is a real run: one step, a kill of the process, a resume, a second step, and an export of the trained weights.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from rlctl.checkpoints.model_files import Tell
from rlctl.cluster.ray_session import environment
from rlctl.config.files import temporary_folder
from rlctl.config.load import Resolved
from rlctl.errors import InputError, RlctlError
from rlctl.jobs.backend_arguments import differences
from rlctl.jobs.shown_run import about
from rlctl.preparation.job import Job, prepare_job
from rlctl.preparation.located import ASSUMED_GPU, Located
from rlctl.preparation.named import CLOCK, TIME, name_run
from rlctl.preparation.open_model import published_facts, published_teachers
from rlctl.preparation.planned import Planned, plan_run
from rlctl.processes.child import call_in_child
from rlctl.rehearsal.findings import Rehearsal, not_rehearsed, short
from rlctl.rehearsal.played_parts import write_stand_ins
from rlctl.rehearsal.rehearsed_run import LIMIT_S, export, run_twice, variables_of
from rlctl.rehearsal.row_checks import look_at_rows, look_at_run
from rlctl.rehearsal.shrink import (
    MOST_LENGTH,
    REHEARSAL,
    changes,
    shrunk,
)
from rlctl.runs.directory import RunDirectory


def rehearse(resolved: Resolved, tell: Tell, *, quiet: bool, keep: Path | None = None) -> Rehearsal:
    """Rehearse a run. Raises the errors that `train` raises before it starts processes; a later error becomes the
    result's `error`. `keep`: directory for model, rows, run and export; None: they are removed."""
    started = time.perf_counter()
    named_run = name_run(resolved, tell)
    facts, teachers = published_facts(named_run.config.model, tell), published_teachers(named_run.config, tell)
    planned = plan_run(Located(named_run.resolved, named_run.method, facts, teachers, ASSUMED_GPU))
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise InputError(f"--keep {keep}: the directory is not empty.", "Name another.")
    with nullcontext(keep) if keep is not None else temporary_folder("rehearsal", tell) as folder:
        rehearsal = Rehearsal(str(folder))
        try:
            _rehearse(planned, folder, rehearsal, tell, quiet)
        except RlctlError as error:
            rehearsal.error = error
        rehearsal.left_out += not_rehearsed(planned.early)
        rehearsal.seconds = time.perf_counter() - started
        return rehearsal


def _rehearse(planned: Planned, folder: Path, rehearsal: Rehearsal, tell: Tell, quiet: bool) -> None:
    config, plan = planned.config, planned.early
    stand_ins = write_stand_ins(planned, folder, rehearsal)
    resolved = planned.resolved
    if resolved.origin[TIME] == CLOCK:  # the rehearsed run and its resume each decide whether to keep the time
        resolved = resolved.deciding((), [TIME])
    large = resolved.with_plan(plan)
    small = shrunk(large, plan, stand_ins)
    rehearsal.shrunk, left_out = changes(large, small)
    rehearsal.left_out += [(value.key, f"{short(value.was)}: only GPUs compute or need it") for value in left_out]
    with environment(**variables_of(folder)):
        job = _prepared(small, planned, tell)
        prefixes = ("model: ", "note: ", *differences(job.resolved))
        lines = [line.partition(": ") for line in about(job) if not line.startswith(prefixes)]
        rehearsal.done += [(subject, how) if colon else ("", subject) for subject, colon, how in lines]
        rehearsal.done.append(("plan", job.plan.name()))
        rehearsal.notices += look_at_rows(job, config, plan.facts, {str(path) for _, path in stand_ins.rows})
        run = RunDirectory(folder / "run")
        run_twice(small, run, rehearsal, quiet)
        rehearsal.notices += look_at_run(job, run, config, stand_ins.stop)
        tell("rehearsing the export")
        exported = partial(export, run.path, folder / "export")
        rehearsal.done.append(("export", call_in_child("the rehearsal of the export", exported, limit_s=LIMIT_S)))


def _prepared(small: Resolved, planned: Planned, tell: Tell) -> Job:
    """Return the job of a rehearsal. If a prompt does not fit into MOST_LENGTH tokens, use the run's own limit."""
    try:
        return prepare_job(small, tell)
    except InputError:
        length = planned.config.model.max_length or planned.facts.max_length
        if length <= MOST_LENGTH:
            raise
        return prepare_job(small.replacing({"model.max_length": length}, REHEARSAL), tell)
