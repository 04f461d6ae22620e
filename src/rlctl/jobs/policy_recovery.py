"""Restart of a run's policy for its recovery: detect lost processes, start them again, and load their state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlctl.backends.clients import PolicyClient
from rlctl.backends.teachers import Member, Teacher
from rlctl.config.load import PLANNER
from rlctl.errors import ConfigError, MachineError, NoPlanError, RlctlError, WaitTimeoutError, WorkerError
from rlctl.models.facts import architectures
from rlctl.planner.make_plan import refuse_unrunnable
from rlctl.preparation.job import Job
from rlctl.preparation.memory_hosts import MemoryHosts
from rlctl.preparation.run_workers import RunWorkers
from rlctl.preparation.step_plan import step_plan
from rlctl.preparation.teacher_tokens import endpoint_of
from rlctl.refit.sync import WeightSync
from rlctl.runs.directory import RunDirectory
from rlctl.telemetry.display import Display
from rlctl.training.memory_checkpoints import MemoryCheckpoints
from rlctl.training.recovery import NoRecovery, Recovery
from rlctl.training.saving import Saver, intact

PLACE_S = 30.0
"""Time limit for Ray to place the ranks of a lost host elsewhere. Without a spare host, the policy is planned again."""


def load_policy(job: Job, display: Display, policy: PolicyClient, teacher: PolicyClient | None) -> None:
    """Load the initial weights of the policy and its teacher."""
    load_first(job, display, policy)
    if teacher is not None:
        load_teacher(job, display, policy, teacher)
    elif job.config.served_teachers:
        policy.teacher = Teacher(policy, None, False, _members(job), job.mixture)


def load_first(job: Job, display: Display, policy: PolicyClient) -> None:
    display.doing("loading weights")
    policy.load_model(job.base_model.weights)
    if adapter := job.config.training.lora.adapter:
        policy.load_adapter(Path(adapter))
    if "reference_logprobs" in job.method.needs:
        # The reference is the base model, so copy it before a checkpoint is loaded.
        policy.hold_reference()
    if job.projections:
        policy.hold_projections(job.projections)


def load_teacher(job: Job, display: Display, policy: PolicyClient, teacher: PolicyClient) -> None:
    assert job.teacher is not None  # its process was started
    display.doing(f"loading the {teacher.group.name}")
    # In asynchronous runs a reward model scores rollouts while the policy trains, so it stays on the device.
    stays = job.config.samples_while_training and not job.config.named_teacher
    source = Teacher(policy, teacher, job.offload and not stays, _members(job), job.mixture)
    source.load_model(job.teacher.files.weights)
    policy.teacher = source


def _members(job: Job) -> tuple[Member, ...]:
    """Return the members of `teacher.models`."""
    models, distinct = iter(job.teachers), architectures(model.facts for model in job.teachers)
    entries = {**job.config.listed_teachers, **job.config.served_teachers}
    members = list[Member]()
    for number, entry in sorted(entries.items()):
        if entry.endpoint is not None:
            members.append(Member(endpoint_of(entry), entry.weight, entry.sources))
            continue
        model = next(models)
        task = job.task_of(number, model) if job.projections else None
        place = model.files.weights
        members.append(Member(place, entry.weight, entry.sources, distinct.index(model.facts), task))
    return tuple(members)


def recovery_of(
    job: Job, run: RunDirectory, workers: RunWorkers, sync: WeightSync | None, saver: Saver, display: Display
) -> NoRecovery:
    limit = job.config.cluster.policy_restarts
    if not limit:
        return NoRecovery()
    memory = None
    if every := job.plan.memory_checkpoint_every:
        assert workers.restarts is not None  # set by `start_run_workers`
        hosts = MemoryHosts(workers.restarts.places, workers.restarts.start_memory, run.path / "memory_checkpoint")
        limit_s = job.config.cluster.step_limit_s
        memory = MemoryCheckpoints(workers.policy, hosts, every, limit_s, display.say)
    return Recovery(RunPolicy(job, run, workers, sync, memory, display), saver, limit, display.say)


def smaller(job: Job, nodes: int, devices: int) -> Job:
    """Return the job with a new plan of the policy for `nodes` nodes, of which Ray left it `devices` devices. The
    engines keep their layout, unless they share the policy's devices. Raises the errors of `step_plan`, and NoPlanError
    if no layout has so few ranks."""
    planned = _planned_for(job, {"cluster.nodes": nodes, "cluster.spare_nodes": 0})
    assert planned.plan.training is not None  # the run trains
    layout = planned.plan.training.parallel
    if layout.world_size <= devices:
        return planned
    # The planner counts the cores of a CPU node, of which Ray may offer fewer.
    if not (replicas := devices // (layout.world_size // layout.dp)):
        raise NoPlanError(f"the new plan needs {layout.world_size // layout.dp} devices")
    return _planned_for(job, {"cluster.nodes": nodes, "cluster.spare_nodes": 0, "training.dp": replicas})


def _planned_for(job: Job, changes: dict[str, int]) -> Job:
    decided = {key for key, origin in job.resolved.origin.items() if origin == PLANNER}
    redecided = {key for key in decided if job.plan.colocated or not key.startswith("generation.")}
    resolved = job.resolved.replacing(changes, "a lost host", without={*redecided, "training.dp"})
    plan = step_plan(resolved.config, job.facts, job.method, job.prompts, (), None)
    refuse_unrunnable(plan)
    return replace(job, resolved=resolved.with_plan(plan), plan=plan)


class RunPolicy:
    """Implements `TrainedPolicy` (training/recovery.py) with a run's processes and checkpoints."""

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        workers: RunWorkers,
        sync: WeightSync | None,
        memory: MemoryCheckpoints | None,
        display: Display,
    ) -> None:
        """`memory` None: the run keeps no checkpoints in the hosts' memory."""
        assert workers.restarts is not None  # set by `start_run_workers`
        self._job, self._run, self._memory, self._display = job, run, memory, display
        self._workers, self._restarts, self._sync = workers, workers.restarts, sync
        self._teacher_lost = False

    def lost(self) -> list[RlctlError]:
        teacher = self._workers.teacher
        of_teacher = [] if teacher is None else teacher.lost()
        self._teacher_lost = bool(of_teacher)
        return [*self._workers.policy.lost(), *of_teacher]

    def end(self) -> None:
        self._restarts.policy.kill()
        if self._teacher_lost and self._restarts.teacher is not None:
            self._restarts.teacher.kill()
        if self._memory is not None:
            self._memory.lose()
        if self._sync is not None:
            self._sync.devices.begin_again()

    def keep(self, step: int) -> None:
        if self._memory is not None:
            self._memory.begin(step)

    def start(self, newest: int) -> int:
        policy, teacher = self._workers.policy, self._workers.teacher
        self._display.doing("starting the policy again")
        self._start_processes()
        self._restarts.start_scorers()
        if self._memory is not None:
            self._memory.renew()
        load_first(self._job, self._display, policy)
        if self._teacher_lost and teacher is not None:
            self._restarts.start_teacher()
            load_teacher(self._job, self._display, policy, teacher)
        step, directory = self._newest(newest)
        if directory is not None:
            policy.load_saved(directory)
        return step

    def _start_processes(self) -> None:
        """Start the processes. Repeat if their start fails because Ray reports another lost host in the meantime."""
        while True:
            self._find_places()
            try:
                self._restarts.start_policy()
                return
            except WorkerError:
                if self._restarts.all_stand:
                    raise

    def _find_places(self) -> None:
        """Update the bundles of the policy's ranks, or plan again for the remaining bundles."""
        try:
            self._restarts.find_places(PLACE_S)
        except WaitTimeoutError:
            if not self._plan_again():
                self._restarts.find_places(self._job.config.cluster.start_timeout_s)

    def _plan_again(self) -> bool:
        (places, lost), before = self._restarts.standing(), self._job.plan
        try:
            if self._workers.teacher is not None:
                raise NoPlanError("its teacher has no other layout")
            self._job = smaller(self._job, before.cluster.nodes - lost, places)
        except (NoPlanError, ConfigError, MachineError) as error:
            self._display.say(f"a host of the policy is lost, and no plan fits {places} device(s): {error}")
            return False
        self._display.say(
            f"a host of the policy is lost: continuing with {self._job.plan.name()} instead of {before.name()}; the "
            "numbers are the same within rounding, not bitwise"
        )
        spec = self._job.workers_spec()
        self._restarts.use_layout(spec)
        self._workers.policy.lay_out(spec.policy, spec.micro_batch_tokens)
        return True

    def _newest(self, most: int) -> tuple[int, Path | None]:
        """Return (step, folder) of the newest intact state up to step `most`, in memory or on disk. Folder None: no
        checkpoint, so the policy keeps the initial weights of step 0."""
        saved = [checkpoint for checkpoint in self._run.checkpoints() if checkpoint.step <= most]
        least = saved[-1].step if saved else 0
        if self._memory is not None and (kept := self._memory.newest(least, most)) is not None:
            self._display.say(f"the policy continues from its checkpoint in memory, of step {kept[0]}")
            return kept
        intact_saves = intact(saved, self._run, self._workers.policy, self._display.say)
        return (0, None) if intact_saves is None else (intact_saves.step, intact_saves.policy)

    def rejoin(self, version: int) -> None:
        if self._sync is None:
            return
        report = self._sync.rejoin(version)
        self._display.say(
            f"the policy is back: {report.bytes / 1e6:.0f} MB of version {version} in the engines in "
            f"{sum(report.seconds.values()):.1f} s, {report.verified} tensors compared, all equal"
        )
        if not self._job.config.turn_tokens:  # the engines only validate, so the loop does not take the devices back
            self._sync.to_policy()

    def take_turn(self) -> None:
        if self._sync is not None:
            self._sync.to_policy()
