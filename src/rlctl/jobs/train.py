"""Start or resume a run from a resolved configuration."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rlctl.cluster.ray_session import BesideSession
from rlctl.config.load import Resolved
from rlctl.garbage import many_objects
from rlctl.jobs.resume import RUNS, resumed_job, run_to_resume
from rlctl.jobs.run_summary import RunSummary
from rlctl.jobs.shown_run import about
from rlctl.jobs.training_run import run_training
from rlctl.planner.result import Plan
from rlctl.preparation.disk_space import require_disk
from rlctl.preparation.job import Job, prepare_job
from rlctl.preparation.manifest import manifest_of
from rlctl.preparation.run_workers import early_hosts
from rlctl.preparation.worker_specs import RunWorkersSpec, device_of
from rlctl.runs.directory import RunDirectory
from rlctl.runs.interrupt import StopRequest
from rlctl.settings.config import RlctlConfig
from rlctl.telemetry.display import Display
from rlctl.telemetry.start_watch import StartWatch
from rlctl.training.loop import Loop


def train_grpo(
    resolved: Resolved,
    *,
    resume: bool,
    quiet: bool,
    allow_changes: bool = False,
    loop: type[Loop] | None = None,
    own_process: bool = False,
) -> RunSummary:
    """Begin or resume a run; return when it has finished or was asked to stop. `loop`: class that replaces rlctl's
    loop. `own_process`: this process does nothing else, so it may be ended if the start hangs."""
    with (
        Display(steps=resolved.config.run.steps, quiet=quiet) as display,
        StopRequest(display.say) as stop,
        BesideSession(display.say) as ray,
        StartWatch(lambda: display.work, lambda: display.log, ends_process=own_process) as watch,
    ):
        ray.when_there = watch.stop  # later waits have limits
        display.doing("reading model and data, planning")
        try:
            if resume:
                return _resume(resolved, display, stop, ray, allow_changes, loop or Loop)
            return _begin(resolved, display, stop, ray, loop or Loop)
        except Exception as error:
            display.note(f"{type(error).__name__}: {error}")
            raise


def _begin(resolved: Resolved, display: Display, stop: StopRequest, ray: BesideSession, loop: type[Loop]) -> RunSummary:
    if resolved.config.run.dir:
        RunDirectory(Path(resolved.config.run.dir)).require_place()
    with many_objects():
        job = prepare_job(resolved, display.say, starts=partial(begin_ray, ray, display.say))
    display.steps = job.config.run.steps
    run = RunDirectory(Path(resolved.config.run.dir) if resolved.config.run.dir else unused_place(RUNS / name_of(job)))
    with locked(run, run.create):
        try:
            display.log_to(run.log)
            run.write_manifest(manifest_of(job))
            _introduce(display, job, run)
            return run_training(job, run, display, stop, ray, resume=False, loop=loop)
        except BaseException as error:
            if not run.has_steps():
                run.abandon(keep_logs=isinstance(error, Exception))
            raise


def begin_ray(
    ray: BesideSession, tell: Callable[[str], None], config: RlctlConfig, plan: Plan, workers: RunWorkersSpec
) -> None:
    """Check the disk space, then start or join Ray in the background, and start the processes with slow imports."""
    require_disk(config, plan, Path(config.run.dir or RUNS), tell)
    hosts = early_hosts(workers) if config.cluster.ray_address is None else []
    ray.begin(config.cluster.ray_address, gpus=0 if device_of(plan) == "cpu" else None, hosts=hosts)


def _resume(
    resolved: Resolved,
    display: Display,
    stop: StopRequest,
    ray: BesideSession,
    allow_changes: bool,
    loop: type[Loop],
) -> RunSummary:
    run = run_to_resume(resolved)
    with locked(run, run.reopen):
        display.log_to(run.log)
        run.recover_partial(display.say)
        starts = partial(begin_ray, ray, display.say)
        with many_objects():
            job = resumed_job(run, resolved, display.say, allow_changes=allow_changes, starts=starts)
        display.steps = job.config.run.steps
        _introduce(display, job, run)
        return run_training(job, run, display, stop, ray, resume=True, loop=loop)


@contextlib.contextmanager
def locked(run: RunDirectory, lock: Callable[[], None]) -> Iterator[None]:
    """Lock a run's directory by `lock` for the block."""
    lock()
    try:
        with run.writing():
            yield
    finally:
        run.release()


def unused_place(place: Path) -> Path:
    """Create and return the directory `place`. If it exists, because another run began in the same second, append a
    number."""
    for number in itertools.count(1):
        numbered = place if number == 1 else place.with_name(f"{place.name}-{number}")
        try:
            numbered.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            break  # `RunDirectory.create` raises the error with a hint
        return numbered
    return place


def name_of(job: Job) -> str:
    """Return the name of a run's directory: model, data and time."""
    parts = [Path(job.config.model.name or "model").name, (job.config.data.name or "mix").split(":")[-1]]
    words = [re.sub(r"[^\w.-]+", "-", Path(part).stem if "/" in part else part) for part in parts]
    return "-".join([*words, time.strftime("%Y%m%d-%H%M%S")]).lower()


def _introduce(display: Display, job: Job, run: RunDirectory) -> None:
    display.say(f"run: {run.path}")
    for line in about(job):
        display.say(line)
    display.say(f"plan: {job.plan.name()}")
