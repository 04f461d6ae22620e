"""Reports of a run during training: lines in the terminal, metrics in every logger, and samples of rollouts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from rlctl.cluster.ray_session import fetch
from rlctl.data.image_rows import shown_prompt
from rlctl.data.rollouts import Rollout, RolloutGroup, Turn
from rlctl.jobs.run_machine import Machine
from rlctl.preparation.job import Job
from rlctl.preparation.named import loggers_of
from rlctl.refit.records import RefitReport
from rlctl.report.run_report import LiveReport
from rlctl.rollouts.source import Batch, RolloutBatch
from rlctl.rollouts.validation import Validated
from rlctl.runs.directory import Checkpoint, RunDirectory
from rlctl.runs.samples import Sample, chosen, one_line
from rlctl.runs.thumbnails import thumbnails
from rlctl.telemetry.display import Display
from rlctl.telemetry.headline import Mean, error_of
from rlctl.telemetry.heartbeat import Heartbeat
from rlctl.telemetry.loggers import LoggedRun, LoggerThread, start_loggers
from rlctl.telemetry.metrics import LOSS, MetricsFile

SHOWN_METRICS = ("reward_mean", "accuracy")
"""Metrics that only runs with rewards have."""
SAMPLES_EVERY = 10
"""Default of `run.show_samples` in a terminal: steps between two displays of samples."""


class RunJournal:
    """Receives a run's status messages, metrics and rollouts, and writes them to the terminal, loggers and files."""

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        display: Display,
        loggers: Sequence[MetricsFile | LoggerThread | Heartbeat],
        machine: Machine,
    ) -> None:
        self._kept = job.config.run.log_rollouts
        every = job.config.run.show_samples
        self._show_every = (SAMPLES_EVERY if display.in_terminal else 0) if every is None else every
        self._prompts = job.prompts
        self._run, self._display, self._loggers, self._machine = run, display, loggers, machine
        self._report = LiveReport(run, display.say)
        self._examples: list[Sample] = []

    def doing(self, activity: str) -> None:
        self._display.doing(activity)

    def begin_step(self, step: int) -> None:
        self._display.begin_step(step)

    def say(self, text: str) -> None:
        self._display.say(text)

    def refitted(self, report: RefitReport) -> None:
        unread = f"; {report.unread} cannot be read back from it" if report.unread else ""
        decoded = "" if report.decoding is None else f"; its log-probs are within {report.decoding:.1e} of the policy's"
        self.say(
            f"weights in the engine: {report.bytes / 1e6:.0f} MB in {sum(report.seconds.values()):.1f} s, "
            f"{report.verified} tensors compared, all equal{unread}{decoded}"
        )
        if 2 * report.unread_bytes > report.bytes:
            share = f"{report.unread_bytes / report.bytes:.0%} of the weights"
            self.say(f"warning: {share} in the engine were not compared with the policy's: {report.unread_why}.")
        for share in report.shares:
            self._display.note(str(share))

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        metrics = {**metrics, **self._machine.losses(), "system": self._machine.metrics()}
        for logger in self._loggers:
            logger.log(step, metrics)
        self._display.step(step, metrics)
        for name, example in zip(("best", "worst"), self._examples, strict=False):
            self.say(one_line(example, name, self._display.width))
        self._report.step()

    def keep_rollouts(self, step: int, batch: Batch) -> None:
        """Write some of the batch's rollouts to `rollouts/`. Every `run.show_samples` steps, also keep the best and the
        worst for the terminal, which `log` prints."""
        shows = self._show_every > 0 and (step - 1) % self._show_every == 0
        if not isinstance(batch, RolloutBatch) or not (sampled := _sampled(batch.groups)):
            return
        pairs = chosen(sampled, max(self._kept, 2 * shows))
        samples = [self._sample(step, group, rollout) for group, rollout in pairs]
        self._examples = samples[:2] if shows else []
        if self._kept:
            self._run.write_rollouts(step, samples[: self._kept])

    def validated(self, step: int, result: Validated) -> None:
        names = [name for name in (*SHOWN_METRICS, LOSS) if name in result.metrics]
        metrics = ", ".join(
            f"{name} {Mean(result.metrics[name], result.metrics.get(error_of(name)))}" for name in names
        )
        when = f"after step {step}" if step else "before step 1"
        self.say(f"validation {when}: {metrics} ({result.measured} {self._prompts.kind}s)")
        if not (sampled := _sampled(result.groups)):
            return
        kept = sorted((group for group in sampled if group.rollouts), key=lambda group: group.position)[: self._kept]
        pairs = [(group, group.rollouts[0]) for group in kept]  # the same prompts in each validation, for comparison
        samples = [self._sample(step, *pair, trained=False) for pair in pairs]
        if samples:
            self._run.write_rollouts(step, samples, "validation")
        for name, pair in zip(("best", "worst"), chosen(sampled, 2), strict=False):
            self.say(one_line(self._sample(step, *pair, trained=False), name, self._display.width))

    def _sample(self, step: int, group: RolloutGroup, rollout: Rollout, *, trained: bool = True) -> Sample:
        turns: list[Turn] = fetch(group.transcripts)[rollout.sample] if group.transcripts else []
        sample_line = {
            "messages": [{"role": turn.role, "content": turn.text} for turn in turns if not turn.auxiliary],
            "turns": [turn.record() for turn in turns],
            **({"counts": dict(rollout.episode.counts)} if rollout.episode else {}),
        }
        return {
            "step": step,
            "prompt": shown_prompt(group.prompt.prompt),
            **(sample_line if turns else {"rendered": self._prompts.text(group.prompt)} if trained else {}),
            "answer": group.prompt.answer,
            "completion": fetch(group.texts)[rollout.sample],
            **(thumbnails(fetch(group.columns).media(rollout.sample)) if rollout.images else {}),
            **({"source": group.prompt.source} if group.prompt.source else {}),
            "reward": rollout.reward,
            "terms": dict(rollout.terms),
            "right": None if rollout.accuracy is None else rollout.accuracy == 1,
            "tokens": rollout.response_tokens,
            "truncated": rollout.truncated,
            "stop_reason": rollout.stop_reason,
            **({"error": rollout.episode.failure} if rollout.episode and rollout.episode.failure else {}),
            "position": rollout.position,
            "sample": rollout.sample,
            "seed": rollout.seed,
        }


def _sampled(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    return [group for group in groups if group.texts is not None]


def open_loggers(
    job: Job, run: RunDirectory, resume_from: Checkpoint | None, display: Display, stack: contextlib.ExitStack
) -> Sequence[MetricsFile | LoggerThread | Heartbeat]:
    finished = 0 if resume_from is None else resume_from.step
    loggers: list[MetricsFile | LoggerThread | Heartbeat] = [run.open_metrics(resume_from)]
    config, options = job.config.model_dump(mode="json"), job.config.run
    logged = LoggedRun(run.path, options.project, options.name or run.name, config, finished)
    for logger in start_loggers(loggers_of(job.resolved), logged, display.say):
        loggers.append(logger)
        stack.callback(logger.close)
    if options.heartbeat_url is not None:
        loggers.append(heartbeat := Heartbeat(options.heartbeat_url, options.name or run.name, display.say))
        stack.callback(heartbeat.close)
    return loggers
