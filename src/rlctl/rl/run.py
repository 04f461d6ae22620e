"""A GRPO run from start to end: processes, the loop, checkpoints, metrics, and how it stops."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlctl.backends.vllm.messages import Sampling
from rlctl.cluster.objects import fetch
from rlctl.cluster.session import ray_session
from rlctl.errors import RlctlError
from rlctl.refit.session import RefitSession
from rlctl.rl.crew import Crew, start_crew
from rlctl.rl.generator import EngineGenerator
from rlctl.rl.grpo import GrpoParts, StepResult, train_step
from rlctl.rl.job import Job
from rlctl.rl.losses import GrpoLoss
from rlctl.rl.policy import Policy
from rlctl.rl.rewards import WorkerRewards
from rlctl.runs.directory import Checkpoint, RunDirectory
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
        lines.append(f"report: {self.directory}/report.html")
        if self.checkpoint:
            lines.append(f"try it: rlctl generate --model {self.checkpoint} --prompt '...'")
        if self.interrupted:
            lines.append(f"go on with: rlctl train grpo --resume --run-dir {self.directory}")
        return "\n".join(lines)


def run_grpo(job: Job, run: RunDirectory, display: Display, resume_from: Checkpoint | None) -> RunSummary:
    """Train until the last step or a stop request. The run directory is locked and has its manifest.

    Raises the error of whatever failed, with how to resume as its hint where a checkpoint exists.
    """
    started = time.perf_counter()
    try:
        with ray_session(job.config.cluster.ray_address, gpus=0 if job.device == "cpu" else None):
            display.doing("starting policy and engines")
            with start_crew(job.crew_spec(), run.logs) as crew, _parts(job, crew, display, resume_from) as parts:
                interrupted = _Loop(job, run, display, parts, resume_from).run()
    except RlctlError as error:
        raise _with_resume_hint(error, run) from error
    finally:
        display.close()
        lines = read_metrics(run.metrics) if run.metrics.exists() else []
        if lines:
            write_report(run.report, run.name, lines)
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


@contextlib.contextmanager
def _parts(job: Job, crew: Crew, display: Display, resume_from: Checkpoint | None) -> Iterator[GrpoParts]:
    """The loop's parts on running processes, with the policy's weights loaded."""
    config = job.config
    policy = Policy(
        crew.policy,
        job.parallel,
        micro_batch_tokens=job.micro_batch_tokens,
        packing=config.training.packing,
        share_prompts=config.training.share_prompts,
    )
    display.doing("loading weights")
    policy.load_hf(job.model_dir)
    if config.grpo.holds_reference:
        # The reference is the model the run began with, also when it goes on from a checkpoint.
        policy.hold_reference()
    if resume_from is not None:
        policy.load(resume_from.policy)
    prompts = job.prompts
    sampling = Sampling.from_config(config.generation, stop=prompts.stop, stop_token_ids=prompts.stop_token_ids)
    generator = EngineGenerator(
        crew.engines,
        prompts.tokens,
        sampling,
        generations=config.grpo.generations,
        seed=config.run.seed,
        timeout_s=config.cluster.step_timeout_s,
    )
    session = RefitSession(
        crew.policy, crew.engines, job.facts, parallel=job.megatron_parallel, settings=config.refit, dtype=job.dtype
    )
    session.open()
    try:
        rewards = WorkerRewards(crew.reward, prompts.rows, timeout_s=config.reward.timeout_s)
        yield GrpoParts(generator, rewards, policy, session.refit, GrpoLoss.from_config(config.grpo))
    finally:
        session.close()


class _Loop:
    """The steps of a run, and everything that is kept of them."""

    def __init__(
        self, job: Job, run: RunDirectory, display: Display, parts: GrpoParts, resume_from: Checkpoint | None
    ) -> None:
        self.job, self.run_directory, self.display, self.parts = job, run, display, parts
        self.first = 0 if resume_from is None else resume_from.step
        self.file = MetricsFile(run.metrics, keep_before=self.first)
        if resume_from is not None and self.first - 1 not in self.file.steps:
            # The run was killed between the checkpoint and its metrics line.
            self.file.log(self.first - 1, resume_from.state()["metrics"])
        self.loggers: list[Logger] = [self.file, *_loggers(job, run, self.first)]

    def run(self) -> bool:
        """Every step up to the last one or a stop request; whether it was stopped."""
        steps = self.job.config.grpo.steps
        self.display.doing("first refit, every tensor compared")
        report = self.parts.refit(self.first)
        self.display.say(
            f"weights in the engine: {report.bytes / 1e6:.0f} MB in {sum(report.seconds.values()):.1f} s, "
            f"{report.verified} tensors compared, all equal"
        )
        try:
            with StopRequest(self.display.say) as stop:
                for step in range(self.first, steps):
                    self._step(step, last=step + 1 == steps, stop=stop)
                    if stop.requested:
                        return True
        finally:
            for logger in self.loggers:
                logger.close()
        return False

    def _step(self, step: int, *, last: bool, stop: StopRequest) -> None:
        timer = StepTimer()
        self.display.doing(f"step {step + 1}")
        result = train_step(self.parts, self.job.config, step, timer)
        self._keep_rollouts(step, result)
        if self._checkpoint_due(step, last or stop.requested):
            with timer(Phase.CHECKPOINT):
                self._save(step, result)
        seconds = timer.seconds()
        metrics = {
            **result.metrics,
            "tokens_per_s": result.metrics["rollout_tokens"] / seconds["total"],
            "seconds": seconds,
        }
        for logger in self.loggers:
            logger.log(step, metrics)
        self.display.step(step, metrics)

    def _checkpoint_due(self, step: int, ending: bool) -> bool:
        every = self.job.config.run.checkpoint_every
        return (ending and self.job.config.run.save_final) or (every > 0 and (step + 1) % every == 0)

    def _save(self, step: int, result: StepResult) -> None:
        self.display.doing(f"saving step {step + 1}")
        with self.run_directory.checkpoint(step + 1, {"metrics": result.metrics}) as directory:
            self.parts.policy.save(directory)
        self.run_directory.prune(self.job.config.run.keep_last)

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


def _loggers(job: Job, run: RunDirectory, first: int) -> Sequence[Logger]:
    wanted: list[Callable[[], Logger]] = []
    if job.config.run.tensorboard:
        wanted.append(lambda: TensorBoardLogger(run.path / "tensorboard", keep_before=first))
    wandb = job.config.run.wandb
    if wandb or (wandb is None and os.environ.get("WANDB_API_KEY")):
        wanted.append(lambda: WandbLogger(run.name, job.config.model_dump(mode="json"), run.path))
    return [make() for make in wanted]


def _with_resume_hint(error: RlctlError, run: RunDirectory) -> RlctlError:
    """The same error, telling how to go on from the last checkpoint if there is one."""
    checkpoints = run.checkpoints()
    how = (
        f"Resume from step {checkpoints[-1].step} with: rlctl train grpo --resume --run-dir {run.path}"
        if checkpoints
        else "There is no checkpoint yet (run.checkpoint_every)."
    )
    error.hint = how if error.hint is None else f"{error.hint} {how}"
    return error
