"""A run from start to end: its processes, the parts of the loop, its files, and how it stops."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlctl.apps.crew import Crew, start_crew
from rlctl.apps.prepare import Job
from rlctl.backends.clients import PolicyClient
from rlctl.checkpoints.conversion.prepared_model import prepared
from rlctl.cluster.objects import fetch
from rlctl.cluster.ray_session import dead_process, ray_session, require_processes
from rlctl.data.rollouts import Rollout, RolloutGroup
from rlctl.errors import RlctlError, WorkerError
from rlctl.refit.records import RefitReport
from rlctl.rl.agreement import Agreement, error_limit, precision_of
from rlctl.rl.algorithms.algorithm import declared
from rlctl.rl.health import Health
from rlctl.rl.loop import Loop, Parts
from rlctl.rl.saving import Saver, newest_intact
from rlctl.rollouts.source import RolloutBatch
from rlctl.rollouts.synchronous import SynchronousSource
from rlctl.runs.directory import Checkpoint, RunDirectory, write_json
from rlctl.runs.interrupt import StopRequest
from rlctl.telemetry.display import Display
from rlctl.telemetry.metrics import Logger, MetricsFile, TensorBoardLogger, WandbLogger, read_metrics
from rlctl.telemetry.phases import StepTimer
from rlctl.telemetry.report import write_report


@dataclass(frozen=True)
class RunSummary:
    """How a run ended."""

    directory: str
    steps: int
    """Finished steps, those before a resume included."""
    interrupted: bool
    reward_first: float | None
    reward_last: float | None
    seconds: float
    checkpoint: str | None

    def text(self) -> str:
        """Return the summary as a person reads it."""
        lines = [f"{'stopped after' if self.interrupted else 'finished'} step {self.steps} in {self.seconds:.0f} s"]
        if self.reward_first is not None and self.reward_last is not None:
            lines.append(f"mean reward {self.reward_first:.3f} -> {self.reward_last:.3f}")
        if self.steps:
            lines.append(f"report: {self.directory}/report.html")
        if self.checkpoint:
            lines.append(f"try it: rlctl generate --run-dir {self.directory} --prompt '...'")
        if self.interrupted:
            lines.append(f"go on with: rlctl train grpo --resume --run-dir {self.directory}")
        return "\n".join(lines)


def run_training(
    job: Job, run: RunDirectory, display: Display, stop: StopRequest, *, resume: bool, loop: type[Loop] = Loop
) -> RunSummary:
    """Train until the last step or a stop request. The run directory is locked and has its manifest.

    With `resume` it goes on from the newest checkpoint that is intact.

    Raises the error of whatever failed, with how to resume as its hint once a step is finished.
    """
    started = time.perf_counter()
    display.metrics = declared(job.algorithm)
    try:
        with run.writing():
            steps, interrupted = _train(job, run, display, stop, resume, loop)
    except RlctlError as error:
        _report(job, run, display)
        raise _with_resume_hint(error, run) from error
    except KeyboardInterrupt:
        _report(job, run, display)
        if run.has_steps():
            display.say(f"Stopped. {how_to_resume(run)}")
        raise
    lines = _report(job, run, display)
    checkpoints = run.checkpoints()
    return RunSummary(
        directory=str(run.path),
        steps=steps,
        interrupted=interrupted,
        reward_first=lines[0].get("reward_mean") if lines else None,
        reward_last=lines[-1].get("reward_mean") if lines else None,
        seconds=time.perf_counter() - started,
        checkpoint=str(checkpoints[-1].path) if checkpoints else None,
    )


def _train(
    job: Job, run: RunDirectory, display: Display, stop: StopRequest, resume: bool, loop: type[Loop]
) -> tuple[int, bool]:
    """Start the processes, run the steps, stop the processes; return the finished steps and whether a stop was
    requested."""
    with contextlib.ExitStack() as stack:
        if job.config.model.convert:
            display.close()  # a conversion has a bar of its own
            job = replace(job, source=prepared(job.source, job.dtype, job.plan.cluster.nodes, display.say))
        display.doing("starting Ray")
        gpus = 0 if job.device == "cpu" else None
        stack.enter_context(ray_session(job.config.cluster.ray_address, gpus=gpus, logs=run.logs))
        stop.install()  # Ray has brought its own handlers
        stop.trouble = dead_process
        display.doing("starting policy and engines")
        crew = stack.enter_context(start_crew(job.crew_spec(), run.logs))
        policy = _policy(job, crew, display)
        resume_from = _load_newest(run, policy, display) if resume else None
        loggers = _loggers(job, run, resume_from, stack)
        sync = crew.weight_sync(
            job.config.refit, None if resume_from else job.source, offload=job.offload, tell=display.say,
            restarts=job.config.cluster.engine_restarts, decode_limit=error_limit(job.config, job.dtype),
        )  # fmt: skip
        stack.enter_context(sync)
        saver = Saver(run, policy, job.config.run, job.config.cluster.step_timeout_s, display.say)
        stack.push(lambda kind, *_: saver.close(display.say, at_once=kind is KeyboardInterrupt))
        timer = StepTimer()
        assert crew.reward is not None  # a run is started with its rewards
        rollouts = SynchronousSource(job.config, job.prompts, crew.engines, crew.reward, sync, timer)
        begun = {"step": 0, "version": 0}
        if resume_from is not None:
            begun = resume_from.state()
            rollouts.restore(begun["source"])
        parts = Parts(
            source=rollouts,
            algorithm=job.algorithm,
            policy=policy,
            sync=sync,
            saver=saver,
            journal=RunJournal(job, run, display, loggers),
            agreement=Agreement.from_config(
                job.config.checks, job.config.generation, precision_of(job.config, job.dtype)
            ),
            health=Health(job.config.checks),
            timer=timer,
        )
        steps = loop(job.config, parts, step=begun["step"], version=begun["version"])
        interrupted = steps.run(stop)
        if steps.step < job.config.run.steps:
            require_processes()
        _keep_memory(run, crew, display)
        return steps.step, interrupted


def _keep_memory(run: RunDirectory, crew: Crew, display: Display) -> None:
    """Write what the processes held at most, for `rlctl plan --run`. Without them a run does not fail."""
    try:
        write_json(run.memory, {"policy": crew.policy.group.peak_memory(), "engine": crew.engines.group.peak_memory()})
    except (WorkerError, OSError) as error:
        display.say(f"The processes' memory was not recorded: {error}")


def _report(job: Job, run: RunDirectory, display: Display) -> list[dict[str, Any]]:
    """Write report.html from the metrics of the run, which are returned. A run does not fail for want of a report."""
    lines: list[dict[str, Any]] = []
    try:
        lines = read_metrics(run.metrics) if run.metrics.exists() else []
        if lines:
            write_report(run.report, run.name, lines, declared(job.algorithm))
    except Exception as error:  # noqa: BLE001 - whatever it is, all that the run was for is done
        display.say(f"The report could not be written: {type(error).__name__}: {error}")
    return lines


def _policy(job: Job, crew: Crew, display: Display) -> PolicyClient:
    """Return the policy on running processes, with the weights that the run begins with."""
    policy = crew.policy
    display.doing("loading weights")
    policy.load_model(job.source.weights)
    if "reference_logprobs" in job.algorithm.needs:
        # The reference is the model the run began with, also when it goes on from a checkpoint.
        policy.hold_reference()
    return policy


def _load_newest(run: RunDirectory, policy: PolicyClient, display: Display) -> Checkpoint | None:
    """Bring the policy to where the run goes on from; None: there is no checkpoint yet."""
    display.doing("checking the checkpoint")
    found = newest_intact(run, policy, display.say)
    if found is None:
        display.say("no checkpoint yet: starting again from step 1")
        return None
    display.say(f"resuming after step {found.step}")
    policy.load(found.policy)
    return found


class RunJournal:
    """Shows and keeps what happens in a run: lines in the terminal, metrics in every logger, some of its rollouts."""

    def __init__(self, job: Job, run: RunDirectory, display: Display, loggers: Sequence[Logger]) -> None:
        self._kept = job.config.run.log_rollouts
        self._run, self._display, self._loggers = run, display, loggers

    def doing(self, what: str) -> None:
        self._display.doing(what)

    def say(self, text: str) -> None:
        self._display.say(text)

    def refitted(self, report: RefitReport) -> None:
        unread = f"; {report.unread} cannot be read back from it" if report.unread else ""
        decoded = "" if report.decoding is None else f"; its log-probs are within {report.decoding:.1e} of the policy's"
        self.say(
            f"weights in the engine: {report.bytes / 1e6:.0f} MB in {sum(report.seconds.values()):.1f} s, "
            f"{report.verified} tensors compared, all equal{unread}{decoded}"
        )
        for share in report.shares:
            self.say(str(share))

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        for logger in self._loggers:
            logger.log(step, metrics)
        self._display.step(step, metrics)

    def keep_rollouts(self, step: int, batch: RolloutBatch) -> None:
        kept = [(group, rollout) for group in batch.groups for rollout in group.rollouts][: self._kept]
        self._run.write_rollouts(step, [_as_row(group, rollout) for group, rollout in kept])


def _as_row(group: RolloutGroup, rollout: Rollout) -> dict[str, Any]:
    return {
        "prompt": group.prompt.prompt,
        "answer": group.prompt.answer,
        "completion": fetch(group.texts)[rollout.sample],
        "reward": rollout.reward,
        "right": rollout.accuracy == 1,
        "tokens": rollout.response_tokens,
        "truncated": rollout.truncated,
        "position": rollout.position,
        "sample": rollout.sample,
        "seed": rollout.seed,
    }


def _loggers(
    job: Job, run: RunDirectory, resume_from: Checkpoint | None, stack: contextlib.ExitStack
) -> Sequence[Logger]:
    """Return the metrics file and what else is wanted; closed by `stack`."""
    first = 0 if resume_from is None else resume_from.step
    file = MetricsFile(run.metrics, keep_before=first)
    loggers: list[Logger] = [file]
    stack.callback(file.close)
    if resume_from is not None and first - 1 not in file.steps:
        # The run was killed between the checkpoint and its metrics line.
        file.log(first - 1, resume_from.state()["metrics"])
    if job.config.run.tensorboard:
        loggers.append(TensorBoardLogger(run.path / "tensorboard", keep_before=first))
        stack.callback(loggers[-1].close)
    wandb = job.config.run.wandb
    if wandb or (wandb is None and os.environ.get("WANDB_API_KEY")):
        loggers.append(WandbLogger(run.name, job.config.model_dump(mode="json"), run.path))
        stack.callback(loggers[-1].close)
    return loggers


def _with_resume_hint(error: RlctlError, run: RunDirectory) -> RlctlError:
    """Return an error of the same kind that also tells how to go on, once there is something to go on from."""
    if not run.has_steps():
        return error
    hints = [error.hint, how_to_resume(run)]
    return type(error)(error.message, " ".join(hint for hint in hints if hint))


def how_to_resume(run: RunDirectory) -> str:
    """Say which checkpoint the run can be gone on from, and how."""
    checkpoints = run.checkpoints()
    if not checkpoints and run.damaged:
        return "No checkpoint is left to resume from."
    if not checkpoints:
        return "There is no checkpoint yet to resume from (run.checkpoint_every)."
    return f"Resume from step {checkpoints[-1].step} with: rlctl train grpo --resume --run-dir {run.path}"
