"""A GRPO run from start to end: processes, the loop, checkpoints, metrics, and how it stops."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlctl.backends.vllm.messages import Sampling
from rlctl.checkpoints.converted import fingerprints_of, prepared
from rlctl.cluster.objects import fetch
from rlctl.cluster.session import ray_session
from rlctl.errors import DivergenceError, RlctlError, WorkerError
from rlctl.refit.session import RefitSession
from rlctl.rl.agreement import Agreement, precision_of
from rlctl.rl.crew import Crew, start_crew
from rlctl.rl.devices import DeviceTurns
from rlctl.rl.engines import EngineKeeper
from rlctl.rl.generator import EngineGenerator
from rlctl.rl.grpo import GrpoParts, StepResult, train_step
from rlctl.rl.job import Job
from rlctl.rl.policy import Policy
from rlctl.rl.rewards import WorkerRewards
from rlctl.rl.run_loss import RunLoss
from rlctl.rl.saving import Saver, newest_intact
from rlctl.runs.checkpoints import Checkpoint, write_json
from rlctl.runs.directory import RunDirectory
from rlctl.runs.interrupt import StopRequest
from rlctl.telemetry.display import Display
from rlctl.telemetry.metrics import Logger, MetricsFile, TensorBoardLogger, WandbLogger, read_metrics
from rlctl.telemetry.phases import Phase
from rlctl.telemetry.report import write_report
from rlctl.telemetry.timers import StepTimer


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
        """What to tell a person."""
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


def run_grpo(job: Job, run: RunDirectory, display: Display, stop: StopRequest, *, resume: bool) -> RunSummary:
    """Train until the last step or a stop request. The run directory is locked and has its manifest.

    With `resume` it goes on from the newest checkpoint that is intact.

    Raises the error of whatever failed, with how to resume as its hint once a step is finished.
    """
    started = time.perf_counter()
    try:
        with run.writing():
            interrupted = _train(job, run, display, stop, resume)
    except RlctlError as error:
        _report(run, display)
        raise _with_resume_hint(error, run) from error
    except KeyboardInterrupt:
        _report(run, display)
        if run.has_steps():
            display.say(f"Stopped. {_how_to_resume(run)}")
        raise
    lines = _report(run, display)
    checkpoints = run.checkpoints()
    return RunSummary(
        directory=str(run.path),
        steps=lines[-1]["step"] + 1 if lines else 0,
        interrupted=interrupted,
        reward_first=lines[0]["reward_mean"] if lines else None,
        reward_last=lines[-1]["reward_mean"] if lines else None,
        seconds=time.perf_counter() - started,
        checkpoint=str(checkpoints[-1].path) if checkpoints else None,
    )


def _train(job: Job, run: RunDirectory, display: Display, stop: StopRequest, resume: bool) -> bool:
    """Start the processes, run the steps, stop the processes; whether a stop was requested."""
    with contextlib.ExitStack() as stack:
        if job.config.model.convert:
            display.close()  # a conversion has a bar of its own
            job = replace(job, source=prepared(job.source, job.dtype, job.plan.cluster.nodes, display.say))
        display.doing("starting Ray")
        stack.enter_context(ray_session(job.config.cluster.ray_address, gpus=0 if job.device == "cpu" else None))
        stop.install()  # Ray has brought its own handlers
        display.doing("starting policy and engines")
        crew = stack.enter_context(start_crew(job.crew_spec(), run.logs))
        policy = _policy(job, crew, display)
        resume_from = _load_newest(run, policy, display) if resume else None
        loggers = _loggers(job, run, resume_from, stack)
        converted = {} if resume_from else fingerprints_of(job.source, job.dtype)
        parts = stack.enter_context(_parts(job, crew, policy, display, converted))
        saver = Saver(run, policy, job.config.run)
        stack.callback(saver.abandon)
        first = 0 if resume_from is None else resume_from.step
        interrupted = _Loop(job, run, display, parts, loggers, saver, first).run(stop)
        _keep_memory(run, crew, display)
        return interrupted


def _keep_memory(run: RunDirectory, crew: Crew, display: Display) -> None:
    """Write what the processes held at most, for `rlctl plan --run`. A run does not fail for want of it."""
    try:
        write_json(run.memory, {"policy": crew.policy.peak_memory(), "engine": crew.engines.peak_memory()})
    except (WorkerError, OSError) as error:
        display.say(f"The processes' memory was not recorded: {error}")


def _report(run: RunDirectory, display: Display) -> list[dict[str, Any]]:
    """Write report.html from the metrics of the run, which are returned. A run does not fail for want of a report."""
    lines = read_metrics(run.metrics) if run.metrics.exists() else []
    if lines:
        try:
            write_report(run.report, run.name, lines)
        except OSError as error:
            display.say(f"The report could not be written: {error}")
    return lines


def _policy(job: Job, crew: Crew, display: Display) -> Policy:
    """The policy on running processes, with the weights that the run begins with."""
    config = job.config
    spec = job.crew_spec().policy
    policy = Policy(crew.policy, spec, config.training, micro_batch_tokens=job.micro_batch_tokens)
    display.doing("loading weights")
    policy.load_hf(job.source.weights)
    if config.grpo.holds_reference:
        # The reference is the model the run began with, also when it goes on from a checkpoint.
        policy.hold_reference()
    return policy


def _load_newest(run: RunDirectory, policy: Policy, display: Display) -> Checkpoint | None:
    """Bring the policy to where the run goes on from; None: there is no checkpoint yet."""
    display.doing("checking the checkpoint")
    found = newest_intact(run.checkpoints(), policy, display.say)
    if found is None:
        display.say("no checkpoint yet: starting again from step 1")
        return None
    display.say(f"resuming after step {found.step}")
    policy.load(found.policy)
    return found


@contextlib.contextmanager
def _parts(job: Job, crew: Crew, policy: Policy, display: Display, converted: Mapping[str, int]) -> Iterator[GrpoParts]:
    """The loop's parts on running processes; `converted` as RefitSession takes it."""
    config = job.config
    prompts = job.prompts
    session = RefitSession(
        crew.policy,
        crew.engines,
        job.facts,
        parallel=job.megatron_parallel,
        settings=config.refit,
        dtype=job.dtype,
        converted=converted,
        converted_at=job.source.megatron and job.source.megatron.parent,
    )
    sleeps = job.crew_spec().engine.sleeps
    turns = DeviceTurns(crew.policy, crew.engines, offload=job.offload, engines_sleep=sleeps)
    keeper = EngineKeeper(
        crew.engines,
        session,
        turns,
        restarts=config.cluster.engine_restarts,
        start_timeout_s=config.cluster.start_timeout_s,
        tell=display.say,
    )
    sampling = Sampling.from_config(config.generation, stop=prompts.stop, stop_token_ids=prompts.stop_token_ids)
    generator = EngineGenerator(
        crew.engines,
        prompts.tokens,
        sampling,
        generations=config.grpo.generations,
        seed=config.run.seed,
        timeout_s=config.cluster.step_timeout_s,
        recover=keeper.recover,
    )
    turns.to_weights()
    session.open()
    try:
        rewards = WorkerRewards(crew.reward, prompts.rows, timeout_s=config.reward.timeout_s)
        yield GrpoParts(generator, rewards, policy, keeper.refit, RunLoss(config.grpo), turns)
    finally:
        session.close()


class _Loop:
    """The steps of a run, and everything that is kept of them."""

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        display: Display,
        parts: GrpoParts,
        loggers: Sequence[Logger],
        saver: Saver,
        first: int,
    ) -> None:
        """`first` is the step to begin with, counted from 0."""
        self.job, self.run_directory, self.display, self.parts = job, run, display, parts
        self.loggers, self.saver, self.first = loggers, saver, first
        precision = precision_of(job.config, job.dtype)
        self.agreement = Agreement.from_config(job.config.grpo, job.config.generation, precision)

    def run(self, stop: StopRequest) -> bool:
        """Every step up to the last one or a stop request; whether it was stopped."""
        steps = self.job.config.grpo.steps
        if self.agreement.note:
            self.display.say(self.agreement.note)
        self.display.doing("first refit, every tensor compared")
        report = self.parts.refit(self.first)
        unread = f"; {report.unread} cannot be read back from it" if report.unread else ""
        self.display.say(
            f"weights in the engine: {report.bytes / 1e6:.0f} MB in {sum(report.seconds.values()):.1f} s, "
            f"{report.verified} tensors compared, all equal{unread}"
        )
        for share in report.shares:
            self.display.say(str(share))
        with stop.between_steps():
            for step in range(self.first, steps):
                self._step(step, last=step + 1 == steps, stop=stop)
                if stop.requested:
                    return True
        return False

    def _step(self, step: int, *, last: bool, stop: StopRequest) -> None:
        timer = StepTimer()
        self.display.doing(f"step {step + 1}")
        result = train_step(self.parts, self.job.config, step, timer)
        self._keep_rollouts(step, result)
        try:
            self._tell_troubles(step, result.metrics)
        except DivergenceError:
            self._log(step, _with_times(result.metrics, timer))  # the report shows what it came to; no checkpoint does
            self.saver.finish()  # that of a step before
            raise
        with timer(Phase.CHECKPOINT):
            self._save(step, last or stop.requested, _with_times(result.metrics, timer))
        self._log(step, _with_times(result.metrics, timer))

    def _log(self, step: int, metrics: dict[str, Any]) -> None:
        for logger in self.loggers:
            logger.log(step, metrics)
        self.display.step(step, metrics)

    def _tell_troubles(self, step: int, metrics: dict[str, Any]) -> None:
        """Say what a reader of the numbers should not miss; DivergenceError where going on makes no sense."""
        if skipped := metrics["skipped_steps"]:
            self.display.say(f"step {step + 1}: {skipped} optimizer step(s) skipped, the gradient was not finite")
        if warning := self.agreement.check(step, metrics):
            self.display.say(warning)

    def _save(self, step: int, ending: bool, metrics: dict[str, Any]) -> None:
        """Begin a save when one is due; the last one is waited for."""
        if self.saver.due(step, ending):
            self.display.doing(f"saving step {step + 1}")
            self.parts.turns.to_policy()  # the refit left the optimizer aside
            self.saver.begin(step, metrics)
        self.saver.finish() if ending else self.saver.finish_if_written()

    def _keep_rollouts(self, step: int, result: StepResult) -> None:
        rows = self.job.prompts.rows(step)
        kept = result.rollouts[: self.job.config.run.log_rollouts]
        self.run_directory.write_rollouts(
            step,
            [
                {
                    "prompt": rows[rollout.group].prompt,
                    "answer": rows[rollout.group].answer,
                    "completion": fetch(rollout.texts)[rollout.index],
                    "reward": float(result.scores.rewards_N[index]),
                    "right": bool(result.scores.accuracy_N[index] == 1),
                    "tokens": rollout.response_tokens,
                    "truncated": rollout.truncated,
                }
                for index, rollout in enumerate(kept)
            ],
        )


def _with_times(metrics: dict[str, Any], timer: StepTimer) -> dict[str, Any]:
    seconds = timer.seconds()
    return {**metrics, "tokens_per_s": metrics["rollout_tokens"] / seconds["total"], "seconds": seconds}


def _loggers(
    job: Job, run: RunDirectory, resume_from: Checkpoint | None, stack: contextlib.ExitStack
) -> Sequence[Logger]:
    """The metrics file and what else is wanted; closed by `stack`."""
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
    """An error of the same kind that also tells how to go on, once there is something to go on from."""
    if not run.has_steps():
        return error
    hints = [error.hint, _how_to_resume(run)]
    return type(error)(error.message, " ".join(hint for hint in hints if hint))


def _how_to_resume(run: RunDirectory) -> str:
    checkpoints = run.checkpoints()
    if not checkpoints:
        return "There is no checkpoint yet to resume from (run.checkpoint_every)."
    return f"Resume from step {checkpoints[-1].step} with: rlctl train grpo --resume --run-dir {run.path}"
