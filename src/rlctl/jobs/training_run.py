"""A run from start to end: its processes, the parts of the loop, its files, and how it stops."""

from __future__ import annotations

import contextlib
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from rlctl.backends.clients import PolicyClient
from rlctl.checkpoints.conversion.prepared_model import prepared, require_seen
from rlctl.checkpoints.model_source import ModelSource
from rlctl.cluster.ray_health import dead_process, require_processes
from rlctl.cluster.ray_session import BesideSession, fetch
from rlctl.cluster.usage import UsageSampler, system_metrics
from rlctl.cluster.workers import WorkerGroup, telling_waits
from rlctl.config.files import write_json
from rlctl.data.image_rows import shown_prompt
from rlctl.data.rollouts import Rollout, RolloutGroup, Turn
from rlctl.errors import InputError, RlctlError, WorkerError, faulty_node
from rlctl.jobs.before_after import answered_twice, command_to_try
from rlctl.jobs.kept_tokenizer import keep_tokenizer
from rlctl.jobs.policy_recovery import load_policy, recovery_of
from rlctl.methods.available import command_of
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.result import Plan
from rlctl.preparation.prepare import Job, loggers_of
from rlctl.preparation.run_workers import RunWorkers, start_run_workers
from rlctl.refit.records import RefitReport
from rlctl.refit.sync import WeightSync
from rlctl.report.run_report import LiveReport, write_report
from rlctl.rewards.reward_worker import RewardWorker
from rlctl.rollouts.dataset import HeldOutTexts, TextStream
from rlctl.rollouts.scored_groups import Scorers
from rlctl.rollouts.source import Batch, RolloutBatch, RolloutSource
from rlctl.rollouts.validation import Validated, Validation
from rlctl.runs.directory import Checkpoint, RunDirectory
from rlctl.runs.interrupt import StopRequest
from rlctl.runs.samples import Sample, chosen, one_line, read_samples
from rlctl.runs.thumbnails import thumbnails
from rlctl.settings.run import BatchConfig
from rlctl.telemetry.conversation import conversation
from rlctl.telemetry.display import Display
from rlctl.telemetry.headline import Mean, MetricChange, calls_nothing, error_of, findings, headline, removed
from rlctl.telemetry.heartbeat import Heartbeat
from rlctl.telemetry.loggers import LoggedRun, LoggerThread, start_loggers
from rlctl.telemetry.metrics import LOSS, Metrics, MetricsFile
from rlctl.telemetry.phases import Phase, StepTimer
from rlctl.telemetry.terminal import colored
from rlctl.training.agreement import error_limit
from rlctl.training.capabilities import HasCritic, PrecomputesReference, SampledByEngines
from rlctl.training.health import Health
from rlctl.training.loop import Loop, Parts
from rlctl.training.reference_logprobs import precompute_reference
from rlctl.training.running_parts import SourceParts, ValidationParts
from rlctl.training.saving import Saver, newest_intact

SHOWN_METRICS = ("reward_mean", "accuracy")
"""Metrics of rewards, which a run without them does not have."""
SHOWN_CHARACTERS = 300
"""Characters of a completion that called no tool."""
SAMPLES_EVERY = 10
"""Steps between two looks at samples in a terminal, where run.show_samples is unset."""


@dataclass(frozen=True)
class RunSummary:
    """How a run ended."""

    directory: str
    steps: int
    """Finished steps, those before a resume included."""
    interrupted: bool
    headline: MetricChange | None
    """How the reward has changed, or the loss where there is none; None: no step was finished."""
    findings: tuple[str, ...]
    """Sentences on what kept steps from teaching much, with what to do about it."""
    seconds: float
    checkpoint: str | None
    dropped_rollouts: int = 0
    """Rollouts that were left out because a reward function failed on them."""
    stopped_by: str | None = None
    """The signal that stopped it; None: none did."""
    command: str = "train grpo"
    """The command that resumes it."""
    removed: tuple[str, ...] = ()
    """Sentences on what kept the first steps from teaching much, and the last ones no longer."""
    answers: tuple[str, ...] = ()
    """Lines with a held-out prompt and its answers before and after training."""
    trial: str = ""
    """The command that tries the trained model."""

    def text(self) -> str:
        """Return the summary as a person reads it."""
        by = f"stopped by {self.stopped_by} after" if self.stopped_by else "stopped after"
        ended = colored(by if self.interrupted else "finished", "warn" if self.interrupted else "ok", sys.stdout)
        is_saved = (self.checkpoint or "").endswith(f"step_{self.steps}")
        saved = f", {'saved' if is_saved else 'not saved'}" if self.interrupted else ""
        lines = [f"{ended} step {self.steps} in {self.seconds:.0f} s{saved}"]
        if self.headline is not None:
            lines.append(self.headline.text())
        lines += [*self.answers, *self.removed, *self.findings]
        if self.dropped_rollouts:
            lines.append(f"{self.dropped_rollouts} rollouts were left out: a reward function failed on them")
        if self.steps:
            lines.append(f"report: {self.directory}/report.html")
        if self.checkpoint and self.trial:
            lines.append(f"{'export' if ' convert ' in self.trial else 'try'} it: {self.trial}")
        if self.interrupted:
            lines.append(f"resume with: rlctl {self.command} --resume --run-dir {shlex.quote(self.directory)}")
        return "\n".join(lines)


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
    """Train until the last step or a stop request. The run directory is locked and has its manifest, and `ray` has
    begun to start.

    With `resume` it goes on from the newest checkpoint that is intact.

    Raises the error of whatever failed, with how to resume as its hint once a step is finished.
    """
    started = time.perf_counter()
    stop.limit_s = job.config.run.stop_within_s
    display.metrics = (*job.method.columns, *job.metrics)
    if job.rewards is None:
        display.without = SHOWN_METRICS[1:] if job.prompts.environment else SHOWN_METRICS
    try:
        with run.writing():
            steps, interrupted = _train(job, run, display, stop, ray, resume, loop)
    except RlctlError as error:
        _report(run, display, "stopped")
        run.blame(faulty_node(error))
        raise _with_resume_hint(error, run, command_of(job.config.run.algorithm)) from error
    except KeyboardInterrupt:
        _report(run, display, "stopped")
        if run.has_steps():
            display.say(f"Stopped by {stop.by}. {how_to_resume(run, command_of(job.config.run.algorithm))}")
        raise
    lines = _report(run, display, "stopped" if interrupted else "finished")
    checkpoints = run.checkpoints()
    return RunSummary(
        directory=str(run.path),
        steps=steps,
        interrupted=interrupted,
        headline=headline(lines),
        findings=(*findings(lines), *_uncalled(job, run, lines)),
        removed=tuple(removed(lines)),
        stopped_by=stop.by if interrupted else None,
        seconds=time.perf_counter() - started,
        checkpoint=str(checkpoints[-1].path) if checkpoints else None,
        command=command_of(job.config.run.algorithm),
        dropped_rollouts=sum(line.get("dropped_rollouts", 0) for line in lines),
        answers=tuple(answered_twice(run, lines)),
        trial=command_to_try(job, run) if checkpoints else "",
    )


def _train(
    job: Job,
    run: RunDirectory,
    display: Display,
    stop: StopRequest,
    ray: BesideSession,
    resume: bool,
    loop: type[Loop],
) -> tuple[int, bool]:
    """Run the steps with their processes; return the finished ones and whether a stop was requested."""
    manifest = job.manifest()
    keep_tokenizer(job, run.path)
    with contextlib.ExitStack() as stack:
        job = _converted(job, display)
        display.doing("starting Ray")
        stack.enter_context(ray.wait(run.logs))
        stack.enter_context(telling_waits(display.say))
        stop.install()  # an import of Ray's may have swallowed a signal
        stop.trouble = dead_process
        load = partial(load_policy, job, display)
        workers = stack.enter_context(
            start_run_workers(job.workers_spec(), run.logs, display.doing, load, ray.early, display.say)
        )
        policy = workers.policy
        if isinstance(job.method, PrecomputesReference) and job.method.reference_before_training:
            display.doing("log-probs of the reference model")
            _precompute_reference(job, run, policy)
        resume_from = _load_newest(run, policy, display, manifest) if resume else None
        loggers = _loggers(job, run, resume_from, display, stack)
        sync = None
        if workers.engines is not None:
            trained = resume_from is not None or not job.config.turn_tokens
            sync = _weight_sync(job, workers, None if trained else job.source, display, stack)
        agreement = job.method.agreement(job.dtype) if isinstance(job.method, SampledByEngines) else None
        if agreement is not None and agreement.note:
            display.say(agreement.note)
        saver = Saver(run, policy, job.config, display.say)
        stack.push(lambda kind, *_: saver.close(display.say, at_once=kind is KeyboardInterrupt))
        timer = StepTimer()
        timer.watch, display.progress = display.phase, _progress_of(workers, job.config.batch)
        rollouts = stack.enter_context(_rollouts(job, workers, sync, timer, display))
        journal = RunJournal(job, run, display, loggers, Machine(workers, sync))
        validation = _validation(job, workers, policy, sync, journal)
        step, version = _restored(resume_from, rollouts, validation)
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
            recovery=recovery_of(job, run, workers, sync, saver, display),
        )
        steps = loop(job.config, parts, step=step, version=version)
        interrupted = steps.run(stop)
        if steps.step < job.config.run.steps:
            require_processes()
        _keep_memory(run, workers, display)
        return steps.step, interrupted


def _restored(saved: Checkpoint | None, rollouts: RolloutSource, validation: Validation | None) -> tuple[int, int]:
    """Continue where a checkpoint was saved; return its step and its version of the weights."""
    if saved is None:
        return 0, 0
    state = saved.state()
    rollouts.restore(state["source"], saved.path)
    if validation is not None:
        validation.restore(state.get("validation") or {})
    return state["step"], state["version"]


def _validation(
    job: Job, workers: RunWorkers, policy: PolicyClient, sync: WeightSync | None, journal: RunJournal
) -> Validation | None:
    if job.validation is None:
        return None
    scorers = _scorers(job, workers.validation, policy)
    return job.method.validation(job.validation, ValidationParts(policy, scorers, sync, journal.refitted))


def _weight_sync(
    job: Job, workers: RunWorkers, source: ModelSource | None, display: Display, stack: contextlib.ExitStack
) -> WeightSync:
    """Return the synchronization of a run's weights, closed by `stack`. `source` None: they are those of a
    checkpoint."""
    settings = job.config.engine_settings
    assert settings is not None  # weights are sent to engines
    sync = workers.weight_sync(
        settings.refit, source, offload=job.offload, tell=display.say,
        restarts=job.config.cluster.engine_restarts, decode_limit=error_limit(job.config, job.dtype),
        shown=job.prompts.encoder.shown_image() if job.facts.vision is not None else None,
    )  # fmt: skip
    assert workers.spec.engines is not None  # weights are sent to engines
    flag = workers.spec.engines.backend.without_graphs
    sync.devices.when_all_sleep = lambda used: display.say(doubt) if (doubt := crowded(job.plan, used, flag)) else None
    return stack.enter_context(sync)


def crowded(plan: Plan, used: tuple[int, int], flag: str) -> str:
    """Return why training will not fit after all, with `used` (bytes in use, all bytes) of a GPU on which policy and
    engines sleep; empty: it fits. `flag`: the one with which engines keep less, empty where there is none."""
    in_use, size = used
    training = plan.memory["training"]
    planned = training.parts["engine asleep"] + plan.memory["generation"].parts["policy asleep"]
    need = training.total + in_use - planned
    if need <= size:
        return ""
    return (
        f"While policy and engines sleep, {in_use / GIB:.1f} GiB of a GPU are in use, and the plan has "
        f"{planned / GIB:.1f}. Training then needs about {need / GIB:.1f} GiB of {size / GIB:.1f} and may run out of "
        "memory. Give it less with --set training.micro_batch_tokens=N"
        + (f", or engines that keep less with {flag} (no CUDA graphs)." if flag else ".")
    )


def _converted(job: Job, display: Display) -> Job:
    """Return the job with the policy's and the teacher's models converted, where the backend reads converted ones.

    Raises MachineError where the run has nodes that may not see the model."""
    for source in (job.source, *([job.teacher.source] if job.teacher else [])):
        require_seen(source, job.plan.cluster.nodes)
    if job.converts and job.source.megatron is None:
        display.doing("preparing the converted model", own_bar=True)
        job = replace(job, source=prepared(job.source, job.dtype, job.plan.cluster.nodes, display.say))
    if job.converts and job.teacher is not None and job.config.named_teacher:
        display.doing("preparing the converted teacher", own_bar=True)
        source = prepared(job.teacher.source, job.dtype, job.plan.cluster.nodes, display.say)
        job = replace(job, teacher=replace(job.teacher, source=source))
    return job


def _progress_of(workers: RunWorkers, batch: BatchConfig) -> Callable[[Phase], tuple[int, int] | None]:
    def progress(phase: Phase) -> tuple[int, int] | None:
        if phase is Phase.GENERATION and workers.engines is not None:
            told = workers.engines.group.progress()
            return (sum(done for done, _ in told.values()), batch.rollouts) if told else None
        if phase in (Phase.TRAINING, Phase.LOGPROBS, Phase.CRITIC):
            return workers.policy.group.part([0]).progress().get(0)
        return None

    return progress


def _rollouts(
    job: Job, workers: RunWorkers, sync: WeightSync | None, timer: StepTimer, display: Display
) -> contextlib.AbstractContextManager[RolloutSource]:
    scorers = _scorers(job, workers.reward, workers.policy)
    return job.method.source(SourceParts(job.prompts, timer, scorers, sync, display.say))


def _scorers(job: Job, workers: WorkerGroup[RewardWorker] | None, policy: PolicyClient) -> Scorers | None:
    model = None if job.config.named_teacher else policy.teacher
    return None if workers is None else Scorers(workers, model, job.rewards is not None and job.rewards.compares)


def _uncalled(job: Job, run: RunDirectory, lines: Sequence[Metrics]) -> Iterator[str]:
    """Yield a completion of a run that called no tool, next to the form of a call."""
    if job.prompts.environment is None or not calls_nothing(lines):
        return
    with contextlib.suppress(InputError):  # a run may keep no samples
        said = conversation(read_samples(run.path)[0])
        first = next((one.text for one in said if one.role == "assistant"), said[-1].text)
        yield f"The first completion: {textwrap.shorten(repr(first), SHOWN_CHARACTERS, placeholder=' ...')}"
    if example := job.prompts.environment.example:
        yield f"A call of a tool: {example!r}"


def _keep_memory(run: RunDirectory, workers: RunWorkers, display: Display) -> None:
    """Write what the processes held at most, for `rlctl plan --run`. Without them a run does not fail."""
    display.doing("stopping the processes")
    try:
        write_json(run.memory, {name: group.peak_memory() for name, group in workers.groups.items()})
    except (WorkerError, OSError) as error:
        display.say(f"The processes' memory was not recorded: {error}")


def _report(run: RunDirectory, display: Display, state: str) -> list[dict[str, Any]]:
    """Write report.html from the metrics of the run, which are returned. A run does not fail for lack of a report."""
    try:
        return write_report(run, state)
    except Exception as error:  # noqa: BLE001 - whatever it is, all that the run was for is done
        display.say(f"The report could not be written: {type(error).__name__}: {error}")
    return []


def _precompute_reference(job: Job, run: RunDirectory, policy: PolicyClient) -> None:
    """Give training and validation the log-probs of the reference, which is what the policy is now."""
    assert isinstance(job.prompts, TextStream)  # pairs are texts
    parts = [("training", job.prompts, job.prompts.used, job.prompts.fingerprint())]
    if isinstance(job.validation, HeldOutTexts):
        parts.append(("held out", job.validation.stream, [*job.validation.rows], job.validation.fingerprint))
    precompute_reference(run.path / "reference.json", policy, job.method, parts, job.config.batch.prompts)


def _load_newest(
    run: RunDirectory, policy: PolicyClient, display: Display, manifest: dict[str, Any]
) -> Checkpoint | None:
    """Bring the policy to where the run goes on from; None: there is no checkpoint yet. Only then does `manifest`
    replace the stored one: with a change that the checkpoint cannot be loaded with, the run stays what it was."""
    display.doing("checking the checkpoint")
    found = newest_intact(run, policy, display.say)
    if found is None:
        display.say("no checkpoint yet: starting again from step 1")
    else:
        display.say(f"resuming after step {found.step}")
        policy.load_saved(found.policy)
    run.write_manifest(manifest)
    return found


class RunJournal:
    """Shows and keeps what happens in a run: lines in the terminal, metrics in every logger, some of its rollouts."""

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
        """Write some rollouts to rollouts/; the best and the worst are shown with every so many steps."""
        shows = self._show_every > 0 and (step - 1) % self._show_every == 0
        if not isinstance(batch, RolloutBatch) or not (sampled := _sampled(batch.groups)):
            return
        pairs = chosen(sampled, max(self._kept, 2 * shows))
        samples = [self._sample(step, group, rollout) for group, rollout in pairs]
        self._examples = samples[:2] if shows else []
        if self._kept:
            self._run.write_rollouts(step, samples[: self._kept])

    def validated(self, step: int, result: Validated) -> None:
        shown = [name for name in (*SHOWN_METRICS, LOSS) if name in result.metrics]
        metrics = ", ".join(
            f"{name} {Mean(result.metrics[name], result.metrics.get(error_of(name)))}" for name in shown
        )
        when = f"after step {step}" if step else "before step 1"
        self.say(f"validation {when}: {metrics} ({result.measured} {self._prompts.kind}s)")
        if not (sampled := _sampled(result.groups)):
            return
        kept = sorted((group for group in sampled if group.rollouts), key=lambda group: group.position)[: self._kept]
        pairs = [(group, group.rollouts[0]) for group in kept]  # the same prompts each time, to compare their answers
        samples = [self._sample(step, *pair, trained=False) for pair in pairs]
        if samples:
            self._run.write_rollouts(step, samples, "validation")
        for name, pair in zip(("best", "worst"), chosen(sampled, 2), strict=False):
            self.say(one_line(self._sample(step, *pair, trained=False), name, self._display.width))

    def _sample(self, step: int, group: RolloutGroup, rollout: Rollout, *, trained: bool = True) -> Sample:
        turns: list[Turn] = fetch(group.transcripts)[rollout.sample] if group.transcripts else []
        said = {
            "messages": [{"role": one.role, "content": one.text} for one in turns],
            "turns": [asdict(one) for one in turns],
        }
        return {
            "step": step,
            "prompt": shown_prompt(group.prompt.prompt),
            **(said if turns else {"rendered": self._prompts.text(group.prompt)} if trained else {}),
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


class Machine:
    """Asks once a step for the memory and processors that driver, ranks and engines use."""

    def __init__(self, workers: RunWorkers, sync: WeightSync | None) -> None:
        self._workers, self._sync, self._driver = workers, sync, UsageSampler()
        self._told_engines = 0
        self.metrics()  # the next answer is of the time since this one

    def losses(self) -> dict[str, int]:
        """Return how many engines were lost since the last call, if any."""
        lost = 0 if self._sync is None else self._sync.lost_engines
        new, self._told_engines = lost - self._told_engines, lost
        return {"lost_engines": new} if new else {}

    def metrics(self) -> dict[str, Any]:
        """Return `system` of a metrics line. Processes that are gone are left out."""
        driver = self._driver.sample()
        try:
            used = {name: group.usage() for name, group in self._workers.groups.items()}
            policy = [one for name in ("policy", "teacher", "reward-model") for one in used.get(name, [])]
            return system_metrics(driver, policy, used.get("engine", []))
        except RlctlError:  # Ray is broken, which the step that needs it tells
            return system_metrics(driver, [], [])


def _loggers(
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


def _with_resume_hint(error: RlctlError, run: RunDirectory, command: str) -> RlctlError:
    """Return an error of the same kind that also tells how to go on, once there is something to go on from."""
    if not run.has_steps():
        return error
    hints = [error.hint, how_to_resume(run, command)]
    return type(error)(error.message, " ".join(hint for hint in hints if hint))


def how_to_resume(run: RunDirectory, command: str = "train grpo") -> str:
    """Say which checkpoint the run can be resumed from, and how."""
    checkpoints = run.checkpoints()
    if not checkpoints and run.damaged:
        return "No checkpoint is left to resume from."
    if not checkpoints:
        return "There is no checkpoint yet to resume from (run.checkpoint_minutes says when they are saved)."
    place = shlex.quote(str(run.path))
    return f"Resume from step {checkpoints[-1].step} with: rlctl {command} --resume --run-dir {place}"
