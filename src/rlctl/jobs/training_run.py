"""A run from start to end: starts its processes, builds the loop's parts, trains, and handles errors and stops."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

from rlctl.cluster.ray_health import dead_process, require_processes
from rlctl.cluster.ray_session import BesideSession
from rlctl.cluster.workers import telling_waits
from rlctl.errors import RlctlError, faulty_node
from rlctl.jobs.kept_tokenizer import keep_tokenizer
from rlctl.jobs.policy_recovery import load_policy, recovery_of
from rlctl.jobs.run_journal import SHOWN_METRICS, RunJournal, open_loggers
from rlctl.jobs.run_machine import Machine, keep_memory, progress_of
from rlctl.jobs.run_parts import restored, rollouts_of, sampled_ahead, validation_of
from rlctl.jobs.run_summary import RunSummary, how_to_resume, summary_of, with_resume_hint, written_report
from rlctl.jobs.run_weights import converted, keep_reference_logprobs, load_newest, open_weight_sync
from rlctl.methods.available import command_of
from rlctl.preparation.job import Job
from rlctl.preparation.manifest import manifest_of
from rlctl.preparation.run_workers import RunWorkers, start_run_workers
from rlctl.refit.sync import WeightSync
from rlctl.runs.directory import Checkpoint, RunDirectory
from rlctl.runs.interrupt import StopRequest
from rlctl.telemetry.display import Display
from rlctl.telemetry.phases import StepTimer
from rlctl.training.capabilities import HasCritic, PrecomputesReference, SampledByEngines
from rlctl.training.health import Health
from rlctl.training.loop import Loop, Parts
from rlctl.training.recovery import NoRecovery
from rlctl.training.saving import Saver


def run_training(
    job: Job,
    run: RunDirectory,
    display: Display,
    stop: StopRequest,
    ray: BesideSession,
    *,
    resume: bool,
    loop: type[Loop] = Loop,
) -> RunSummary:
    """Train until the last step or a stop request. The run directory is locked and has a manifest, and `ray` is
    starting. `resume`: continue from the newest intact checkpoint.

    Raises any error of the run; once a step is finished, its hint says how to resume.
    """
    started, command = time.perf_counter(), command_of(job.config.run.algorithm)
    stop.limit_s = job.config.run.stop_within_s
    show_columns(job, display)
    try:
        with run.writing():
            steps, interrupted = _train(job, run, display, stop, ray, resume, loop)
    except RlctlError as error:
        written_report(run, display, "stopped")
        run.blame(faulty_node(error))
        raise with_resume_hint(error, run, command) from error
    except KeyboardInterrupt:
        written_report(run, display, "stopped")
        if run.has_steps():
            display.say(f"Stopped by {stop.by}. {how_to_resume(run, command)}")
        raise
    lines = written_report(run, display, "stopped" if interrupted else "finished")
    return summary_of(
        job, run, lines, steps=steps, seconds=time.perf_counter() - started, interrupted=interrupted,
        stopped_by=stop.by if interrupted else None,
    )  # fmt: skip


def show_columns(job: Job, display: Display) -> None:
    """Give a display the columns of a run's metrics."""
    display.steps, display.metrics = job.config.run.steps, (*job.method.columns, *job.metrics)
    if job.rewards is None:
        display.without = SHOWN_METRICS[1:] if job.prompts.environment else SHOWN_METRICS


def _train(
    job: Job,
    run: RunDirectory,
    display: Display,
    stop: StopRequest,
    ray: BesideSession,
    resume: bool,
    loop: type[Loop],
) -> tuple[int, bool]:
    """Start the processes and train; return the number of finished steps and whether a stop was requested."""
    manifest = manifest_of(job)
    keep_tokenizer(job, run.path)
    with contextlib.ExitStack() as stack:
        job, workers = start_processes(job, run, display, stop, ray, stack)
        resume_from = first_or_newest(job, run, workers, display, manifest, resume)
        sync = open_sync(job, workers, display, stack, first=resume_from is None)
        parts, step, version = open_parts(job, run, workers, display, stack, sync=sync, resume_from=resume_from)
        steps = loop(job.config, parts, step=step, version=version)
        interrupted = steps.run(stop)
        if steps.step < job.config.run.steps:
            require_processes()
        keep_memory(run, workers, display)
        return steps.step, interrupted


def start_processes(
    job: Job,
    run: RunDirectory,
    display: Display,
    stop: StopRequest,
    ray: BesideSession,
    stack: contextlib.ExitStack,
) -> tuple[Job, RunWorkers]:
    """Convert the model if necessary and start the run's processes, which `stack` stops; return them and the job with
    the converted model."""
    job = converted(job, display)
    display.doing("starting Ray")
    stack.enter_context(ray.wait(run.logs))
    stack.enter_context(telling_waits(display.say))
    stop.install()  # again, because an import of Ray may have swallowed a signal
    stop.trouble = dead_process
    load = partial(load_policy, job, display)
    starting = start_run_workers(job.workers_spec(), run.logs, display.doing, load, ray.early, display.say)
    return job, stack.enter_context(starting)


def first_or_newest(
    job: Job, run: RunDirectory, workers: RunWorkers, display: Display, manifest: dict[str, Any], resume: bool
) -> Checkpoint | None:
    """Compute what the run needs from the base model, and load the newest checkpoint; None: it begins."""
    if isinstance(job.method, PrecomputesReference) and job.method.reference_before_training:
        display.doing("log-probs of the reference model")
        keep_reference_logprobs(job, run, workers.policy)
    return load_newest(run, workers.policy, display, manifest) if resume else None


def open_sync(
    job: Job, workers: RunWorkers, display: Display, stack: contextlib.ExitStack, *, first: bool
) -> WeightSync | None:
    """Return the weight sync of the run's engines, closed by `stack`; None without engines. `first`: the policy has the
    weights of the base model."""
    if workers.engines is None:
        return None
    source = job.base_model if first and job.config.turn_tokens else None
    return open_weight_sync(job, workers, source, display, stack)


def open_parts(
    job: Job,
    run: RunDirectory,
    workers: RunWorkers,
    display: Display,
    stack: contextlib.ExitStack,
    *,
    sync: WeightSync | None,
    resume_from: Checkpoint | None = None,
    recovers: bool = True,
    ahead: bool = False,
) -> tuple[Parts, int, int]:
    """Return the loop's parts, which `stack` closes, and the step and version that the run continues from. `recovers`:
    lost policy ranks start again; `ahead`: its engines sample while the policy trains other runs."""
    policy = workers.policy
    loggers = open_loggers(job, run, resume_from, display, stack)
    agreement = job.method.agreement(job.dtype) if isinstance(job.method, SampledByEngines) else None
    if agreement is not None and agreement.note:
        display.say(agreement.note)
    saver = Saver(run, policy, job.config, display.say)
    stack.push(lambda kind, *_: saver.close(display.say, at_once=kind is KeyboardInterrupt))
    timer = StepTimer()
    timer.watch, display.progress = display.phase, progress_of(workers, job.config.batch)
    opened = (sampled_ahead if ahead else rollouts_of)(job, workers, sync, timer, display)
    rollouts = stack.enter_context(opened)
    journal = RunJournal(job, run, display, loggers, Machine(workers, sync))
    validation = validation_of(job, workers, policy, sync, journal)
    step, version = restored(resume_from, rollouts, validation)
    parts = Parts(
        source=rollouts,
        method=job.method,
        policy=policy,
        sync=sync if job.config.turn_tokens else None,
        saver=saver,
        journal=journal,
        agreement=agreement,
        health=Health(job.config.checks),
        timer=timer,
        validation=validation,
        critic=job.method.open_critic(policy) if isinstance(job.method, HasCritic) else None,
        recovery=recovery_of(job, run, workers, sync, saver, display) if recovers else NoRecovery(),
    )
    return parts, step, version
