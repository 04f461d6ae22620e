"""Runs that differ in a few keys and share one base model (`rlctl sweep`): each trains its own adapter, in turns.

Policy and engines start once. A turn is one step of one run: its adapter and optimizer states take their place in the
policy, and the others wait in host memory. Engines get the adapter of each turn, or, where the plan has engines for
each run (`GenerationChoice.runs`), keep their run's adapter and sample its next batch while the other runs train. Each
run has its own directory, as if it had been started alone, and computes the same numbers. A sweep that was stopped or
killed continues from the checkpoints of its runs.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlctl.cluster.ray_session import BesideSession
from rlctl.config.load import Resolved
from rlctl.errors import DivergenceError, RlctlError
from rlctl.garbage import rare_garbage_collection
from rlctl.jobs.run_summary import RunSummary, summary_of, written_report
from rlctl.jobs.swept_loop import SweptLoop
from rlctl.jobs.swept_runs import Sweep, Swept, open_sweep
from rlctl.jobs.training_run import first_or_newest, open_parts, open_sync, start_processes
from rlctl.preparation.manifest import manifest_of
from rlctl.preparation.run_workers import RunWorkers
from rlctl.preparation.worker_specs import RunWorkersSpec
from rlctl.report.run_report import compare_runs
from rlctl.runs.directory import Checkpoint
from rlctl.runs.interrupt import StopRequest
from rlctl.telemetry.display import Display
from rlctl.telemetry.start_watch import StartWatch


@dataclass(frozen=True)
class SweepSummary:
    """The end of a sweep."""

    directory: str
    page: str
    """The page that compares the runs."""
    runs: dict[str, RunSummary]
    """By the values that the run differs in, in the order of the command line."""
    diverged: tuple[str, ...]
    """The runs that ended because their parameters or loss were no longer finite."""
    interrupted: bool
    seconds: float

    def text(self) -> str:
        """Return the summary for the terminal: a line per run, and the page."""
        width = max(map(len, self.runs))
        lines = [f"{len(self.runs)} runs in {self.seconds:.0f} s"]
        for label, run in self.runs.items():
            result = run.headline.text() if run.headline is not None else "no step was finished"
            ended = "diverged" if label in self.diverged else "stopped" if run.interrupted else "finished"
            lines.append(f"{label:<{width}}  {ended} step {run.steps}; {result}")
        more = [how_to_continue(self.directory)] if self.interrupted else []
        return "\n".join([*lines, f"comparison: {self.page}", *more])


def run_sweep(variants: Sequence[tuple[str, Resolved]], *, quiet: bool, own_process: bool = False) -> SweepSummary:
    """Train all runs to their last step or a stop request, and continue runs that were begun before. `variants`: (the
    values that differ, configuration) of each. `own_process`: see `train_grpo`.

    Raises ConfigError if the runs cannot share policy and engines, and the errors of a run. A run that diverges ends
    alone.
    """
    started = time.perf_counter()
    with (
        Display(steps=variants[0][1].config.run.steps, quiet=quiet) as display,
        StopRequest(display.say) as stop,
        BesideSession(display.say) as ray,
        StartWatch(lambda: display.work, lambda: display.log, ends_process=own_process) as watch,
        contextlib.ExitStack() as stack,
    ):
        ray.when_there = watch.stop  # later waits have limits
        display.doing("reading model and data, planning")
        sweep = open_sweep(variants, display, ray, stack, quiet=quiet)
        stop.limit_s = sweep.runs[0].job.config.run.stop_within_s
        display.say(f"sweep: {len(sweep.runs)} runs in {sweep.directory}, plan: {sweep.runs[0].job.plan.name()}")
        with _reporting(sweep, display):
            steps = _train(sweep, display, stop, ray) if sweep.left else {}
        summaries = {swept.label: _summary(sweep, swept, steps, stop, started) for swept in sweep.runs}
    with_steps = [swept.run.path for swept in sweep.runs if swept.run.has_steps()]
    page = compare_runs(with_steps, sweep.directory / "comparison.html")
    seconds = time.perf_counter() - started
    diverged = tuple(sweep.diverged)
    return SweepSummary(str(sweep.directory), str(page), summaries, diverged, stop.requested, seconds)


@contextlib.contextmanager
def _reporting(sweep: Sweep, display: Display) -> Iterator[None]:
    """If the block fails, write the reports of all runs with steps, and say how the sweep continues."""
    try:
        yield
    except (RlctlError, KeyboardInterrupt) as error:
        begun = [swept for swept in sweep.runs if swept.run.has_steps()]
        for swept in begun:
            written_report(swept.run, swept.display, "stopped" if sweep.record.end_of(swept) is None else "finished")
        if not begun or len(sweep.diverged) == len(sweep.runs):
            raise
        if isinstance(error, KeyboardInterrupt):
            display.say(how_to_continue(sweep.directory))
            raise
        display.note(f"{type(error).__name__}: {error}")
        hint = " ".join(filter(None, (error.hint, how_to_continue(sweep.directory))))
        raise type(error)(error.message, hint) from error


def how_to_continue(directory: Path | str) -> str:
    return f"The same command continues the sweep (with --run-dir {shlex.quote(str(directory))})."


def _summary(sweep: Sweep, swept: Swept, steps: dict[str, int], stop: StopRequest, started: float) -> RunSummary:
    end = sweep.record.end_of(swept)
    lines = written_report(swept.run, swept.display, "stopped" if end is None else "finished")
    return summary_of(
        swept.job, swept.run, lines, steps=steps[swept.label] if end is None else end.step,
        seconds=time.perf_counter() - started if swept.label in steps else 0.0,
        interrupted=end is None, stopped_by=stop.by if swept.label in steps else None,
    )  # fmt: skip


def _train(sweep: Sweep, display: Display, stop: StopRequest, ray: BesideSession) -> dict[str, int]:
    """Start the processes and train the runs that are left in turns; return their finished steps by label."""
    left = sweep.left
    with contextlib.ExitStack() as stack:
        job, workers = start_processes(left[0].job, left[0].run, display, stop, ray, stack)
        workers.policy.hold_adapters(len(left))
        saved = list[Checkpoint | None]()
        for number, swept in enumerate(left):
            workers.policy.use_adapter(number)
            manifest = manifest_of(swept.job)
            saved.append(first_or_newest(swept.job, swept.run, workers, swept.display, manifest, swept.resumes))
        each_has_engines = job.plan.generation is not None and job.plan.generation.runs > 1
        shares = workers.shares(len(sweep.runs)) if each_has_engines else [workers]
        sync = None if each_has_engines else open_sync(job, workers, display, stack, first=saved[0] is None)
        turns = list[tuple[Swept, SweptLoop]]()
        for number, (swept, resume_from) in enumerate(zip(left, saved, strict=True)):
            share = shares[sweep.runs.index(swept) if each_has_engines else 0]
            if each_has_engines:
                sync = open_sync(job, share, display, stack, first=resume_from is None)
            own_workers = with_scorers(share, swept.job.workers_spec()) if number else share
            parts, step, version = open_parts(
                swept.job, swept.run, own_workers, swept.display, stack, sync=sync, resume_from=resume_from,
                recovers=False, ahead=each_has_engines,
            )  # fmt: skip
            turns.append((swept, SweptLoop(swept.job, parts, number, step, version)))
        display.close()
        _take_turns(sweep, turns, stop)
        return {swept.label: loop.step for swept, loop in turns}


def with_scorers(workers: RunWorkers, spec: RunWorkersSpec) -> RunWorkers:
    """Return the processes with the scorers of another run, started if they differ."""
    if (spec.reward, spec.validation) == (workers.spec.reward, workers.spec.validation):
        return workers
    assert workers.restarts is not None  # set by `start_run_workers`
    reward, validation = workers.restarts.further_scorers(spec)
    return replace(workers, reward=reward, validation=validation)


def _take_turns(sweep: Sweep, turns: Sequence[tuple[Swept, SweptLoop]], stop: StopRequest) -> None:
    """Take one step of each run in turn until all have ended, and record the ends."""
    for _, loop in turns:
        loop.begin()
    under_way = list(turns)
    with stop.between_steps(), rare_garbage_collection():
        while under_way and not stop.requested:
            for swept, loop in list(under_way):
                diverged = ""
                try:
                    if not loop.ended:
                        loop.advance(stop)
                except DivergenceError as error:
                    diverged = error.message
                    swept.display.say(f"{diverged} {error.hint or ''}")
                if loop.ended or diverged:
                    loop.end()
                    sweep.record.add(swept, loop.step, diverged)
                    under_way.remove((swept, loop))
                if stop.requested:
                    break
        for _, loop in under_way if stop.requested else ():
            loop.keep()
    if len(sweep.diverged) == len(sweep.runs):
        raise DivergenceError(
            f"All runs diverged; the first: {next(iter(sweep.diverged.values()))}", "Lower optimizer.lr."
        )
