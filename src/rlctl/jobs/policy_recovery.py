"""The policy of a run as its recovery has it: which processes are lost, and how they start and load again."""

from __future__ import annotations

from rlctl.backends.clients import PolicyClient, Teacher
from rlctl.errors import RlctlError
from rlctl.preparation.prepare import Job
from rlctl.preparation.run_workers import RunWorkers
from rlctl.refit.sync import WeightSync
from rlctl.runs.directory import Checkpoint, RunDirectory
from rlctl.telemetry.display import Display
from rlctl.training.recovery import NoRecovery, Recovery
from rlctl.training.saving import Saver, intact


def load_policy(job: Job, display: Display, policy: PolicyClient, teacher: PolicyClient | None) -> None:
    """Give the policy and its teacher the weights that the run begins with."""
    load_first(job, display, policy)
    if teacher is not None:
        load_teacher(job, display, policy, teacher)


def load_first(job: Job, display: Display, policy: PolicyClient) -> None:
    display.doing("loading weights")
    policy.load_model(job.source.weights)
    if "reference_logprobs" in job.method.needs:
        # The reference is the model the run began with, also when it goes on from a checkpoint.
        policy.hold_reference()
    if job.projection is not None:
        policy.hold_projection(job.projection)


def load_teacher(job: Job, display: Display, policy: PolicyClient, teacher: PolicyClient) -> None:
    assert job.teacher is not None  # its process was started
    display.doing(f"loading the {teacher.group.name}")
    # Rollouts are scored while the policy trains, where they are sampled meanwhile.
    stays = job.config.samples_while_training and not job.config.named_teacher
    policy.teacher = Teacher(teacher, job.offload and not stays)
    policy.teacher.load_model(job.teacher.source.weights)


def recovery_of(
    job: Job, run: RunDirectory, workers: RunWorkers, sync: WeightSync | None, saver: Saver, display: Display
) -> NoRecovery:
    limit = job.config.cluster.policy_restarts
    if not limit:
        return NoRecovery()
    return Recovery(RunPolicy(job, run, workers, sync, display), saver, limit, display.say)


class RunPolicy:
    """Methods as in `TrainedPolicy`."""

    def __init__(
        self, job: Job, run: RunDirectory, workers: RunWorkers, sync: WeightSync | None, display: Display
    ) -> None:
        assert workers.again is not None  # it is a run's
        self._job, self._run, self._display = job, run, display
        self._workers, self._again, self._sync = workers, workers.again, sync
        self._teacher_lost = False

    def lost(self) -> RlctlError | None:
        teacher = self._workers.teacher
        of_teacher = None if teacher is None else teacher.lost()
        self._teacher_lost = of_teacher is not None
        return self._workers.policy.lost() or of_teacher

    def end(self) -> None:
        self._again.policy.kill()
        if self._teacher_lost and self._again.teacher is not None:
            self._again.teacher.kill()
        if self._sync is not None:
            self._sync.devices.begin_again()

    def start(self, newest: int) -> int:
        policy, teacher = self._workers.policy, self._workers.teacher
        self._display.doing("starting the policy again")
        self._again.start_policy()
        load_first(self._job, self._display, policy)
        if self._teacher_lost and teacher is not None:
            self._again.start_teacher()
            load_teacher(self._job, self._display, policy, teacher)
        found = self._checkpoint(newest)
        if found is None:
            return 0
        policy.load_saved(found.policy)
        return found.step

    def _checkpoint(self, newest: int) -> Checkpoint | None:
        found = [one for one in self._run.checkpoints() if one.step <= newest]
        return intact(found, self._run, self._workers.policy, self._display.say)

    def rejoin(self, version: int) -> None:
        if self._sync is None:
            return
        report = self._sync.rejoin(version)
        self._display.say(
            f"the policy is back: {report.bytes / 1e6:.0f} MB of version {version} in the engines in "
            f"{sum(report.seconds.values()):.1f} s, {report.verified} tensors compared, all equal"
        )
        if not self._job.config.turn_tokens:  # engines of validation alone
            self._sync.to_policy()

    def take_turn(self) -> None:
        if self._sync is not None:
            self._sync.to_policy()
