"""Last stage of preparing a run, and all stages in order: the job that training starts from.

    Named -> Located (facts) -> Planned (for short prompts) -> Opened (data, rewards) -> Job (the plan of the steps)

Each stage is a frozen dataclass, and replaces the configuration in one place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rlctl.backends.base import Device, Dtype, Teaching, resolve_dtype
from rlctl.backends.batching.mixtures import ALONE, Mixture
from rlctl.checkpoints.model_files import Tell
from rlctl.config.load import Resolved
from rlctl.methods.rl.critic import METRICS as CRITIC_METRICS
from rlctl.models.facts import architectures
from rlctl.planner.make_plan import refuse_unrunnable
from rlctl.planner.result import Plan
from rlctl.planner.views.render import plan_text
from rlctl.preparation.located import ASSUMED_GPU, locate
from rlctl.preparation.named import Named, name_run
from rlctl.preparation.open_model import NamedModel
from rlctl.preparation.opened import Opened, open_run
from rlctl.preparation.planned import plan_run, require_devices, require_refit_directory
from rlctl.preparation.step_plan import step_plan
from rlctl.preparation.teacher_tokens import task_with_tokenizer
from rlctl.preparation.worker_specs import RunWorkersSpec, converts, device_of, planned_teacher, planned_workers
from rlctl.settings.config import RlctlConfig
from rlctl.telemetry.metrics import Metric
from rlctl.training.capabilities import HasCritic
from rlctl.training.run_loss import declared

log = logging.getLogger(__name__)
Starts = Callable[[RlctlConfig, Plan, RunWorkersSpec], None]
"""Starts Ray and the processes that the run will probably need, in the background."""


def prepare_job(
    resolved: Resolved,
    tell: Tell = lambda _: None,
    *,
    starts: Starts | None = None,
    completion: str | None = None,
    held_adapters: int = 1,
) -> Job:
    """Resolve the model, open data and rewards, and plan. Starts no process; `tell` receives notices of slow work.

    `starts`: not None if the run is about to start, so that this machine or the cluster must have the plan's devices.
    It is called after the devices and everything that needs no weights, data or tokenizer are checked. `completion`: a
    text that the rewards score as a trial, in addition to the first row's reference answer. `held_adapters`: adapters
    over one base, for which the run shares its processes with others (a sweep).

    Raises InputError for names of missing models or data, NoPlanError if nothing fits, ConfigError for a plan that
    rlctl cannot run yet, MachineError for missing devices. Checks that need no weights, data or tokenizer come first.
    """
    return job_of(name_run(resolved, tell), tell, starts=starts, completion=completion, held_adapters=held_adapters)


def job_of(
    named_run: Named,
    tell: Tell,
    *,
    starts: Starts | None = None,
    completion: str | None = None,
    held_adapters: int = 1,
) -> Job:
    """Prepare a run from its first stage; arguments and errors as in `prepare_job`."""
    assume = ASSUMED_GPU if starts is None else None
    planned = plan_run(locate(named_run, tell, assume=assume, held_adapters=held_adapters))
    if starts is not None:
        config, facts, early = planned.config, planned.facts, planned.early
        require_devices(early, config)
        require_refit_directory(config)
        starts(config, early, planned_workers(config, facts, early, Path(), None, planned.method, dummy_weights=True))
    opened = open_run(planned, tell, copies=starts is not None, completion=completion)
    teachers = tuple(teacher.facts for teacher in opened.teachers)
    plan = step_plan(
        opened.config, opened.facts, opened.method, opened.prompts, teachers, opened.assume,
        held_adapters=held_adapters,
    )  # fmt: skip
    refuse_unrunnable(plan)
    log.info("chosen:\n%s", plan_text(plan, opened.config.model.name or ""))
    return Job(**{**vars(opened), "resolved": opened.resolved.with_plan(plan), "plan": plan})


@dataclass(frozen=True, kw_only=True)
class Job(Opened):
    """Everything that a run needs to start. The configuration contains the plan's values."""

    plan: Plan

    @property
    def device(self) -> Device:
        return device_of(self.plan)

    @property
    def dtype(self) -> Dtype:
        return resolve_dtype(self.config.model.dtype, self.device)

    @property
    def converts(self) -> bool:
        """Whether the run starts from a converted checkpoint of the model."""
        return converts(self.config, self.plan)

    @property
    def offload(self) -> bool:
        """Whether the policy waits in host memory during generation."""
        offloads = self.config.training.offload
        return (self.device == "cuda" and self.plan.colocated) if offloads is None else offloads

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics that training computes."""
        critic = self.method.critic if isinstance(self.method, HasCritic) else None
        return (*declared(self.method), *(CRITIC_METRICS if critic else ()))

    @property
    def mixture(self) -> Mixture:
        """How several teachers of a row make one distribution."""
        teacher = self.config.teacher_section
        if teacher is None or not (teacher.models or self.projections):
            return ALONE
        vocab, mix = self._shared_vocab, "divergences" if self.projections else teacher.mix
        return Mixture(mix, top := min(self.method.teacher_top, vocab), top == vocab)

    @property
    def _shared_vocab(self) -> int:
        """The tokens that the policy and all teachers with its tokenizer have."""
        sizes = dict(
            zip(self.config.listed_teachers or (0,), (model.facts.vocab for model in self.teachers), strict=False)
        )
        return min([self.facts.vocab, *(size for number, size in sizes.items() if number not in self.projections)])

    def task_of(self, number: int, model: NamedModel) -> Teaching:
        """Return what a teacher computes."""
        top, projection = self.method.teacher_top, self.projections.get(number)
        if projection is None:
            return Teaching(vocab := self._shared_vocab, min(top, vocab))
        return task_with_tokenizer(number, projection, model.facts, top)

    def workers_spec(self) -> RunWorkersSpec:
        """The processes to start. The engines start with dummy weights; the first refit replaces them."""
        workers = planned_workers(
            self.config, self.facts, self.plan, self.base_model.directory, self.rewards, self.method, dummy_weights=True
        )
        if workers.engines is not None and self.facts.vision is not None:
            never = self.prompts.encoder.never_sampled
            workers = replace(workers, policy=replace(workers.policy, never=never))
        teacher = None
        if self.teacher is not None:
            teachers = [model.facts for model in self.teachers]
            teacher = planned_teacher(self.config, self.facts, teachers, self.plan, self.method)
            of_architecture = [self.teachers[teachers.index(facts)] for facts in architectures(teachers)]
            first, *others = (model.files.directory for model in of_architecture)
            beside = [replace(spec, model_dir=place) for spec, place in zip(teacher.beside, others, strict=True)]
            teacher = replace(teacher, model_dir=first, beside=tuple(beside))
            if self.config.named_teacher is not None and not self.config.listed_teachers:
                teacher = replace(teacher, teaches=self.task_of(0, self.teacher))
        if self.prompts.environment is not None and workers.engines is not None:
            episode = self.prompts.environment.within(workers.engines.engine.max_length)
            workers = replace(workers, engines=replace(workers.engines, episode=episode))
        return replace(workers, validation=self.validation.rewards if self.validation else None, teacher=teacher)
