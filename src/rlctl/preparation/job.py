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
from rlctl.checkpoints.model_files import Tell
from rlctl.config.load import Resolved
from rlctl.methods.rl.critic import METRICS as CRITIC_METRICS
from rlctl.planner.make_plan import refuse_unrunnable
from rlctl.planner.result import Plan
from rlctl.planner.views.render import plan_text
from rlctl.preparation.located import ASSUMED_GPU, locate
from rlctl.preparation.named import Named, name_run
from rlctl.preparation.opened import Opened, open_run
from rlctl.preparation.planned import plan_run, require_devices, require_refit_directory
from rlctl.preparation.step_plan import step_plan
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
) -> Job:
    """Resolve the model, open data and rewards, and plan. Starts no process; `tell` receives notices of slow work.

    `starts`: not None if the run is about to start, so that this machine or the cluster must have the plan's devices.
    It is called after the devices and everything that needs no weights, data or tokenizer are checked. `completion`: a
    text that the rewards score as a trial, in addition to the first row's reference answer.

    Raises InputError for names of missing models or data, NoPlanError if nothing fits, ConfigError for a plan that
    rlctl cannot run yet, MachineError for missing devices. Checks that need no weights, data or tokenizer come first.
    """
    return job_of(name_run(resolved, tell), tell, starts=starts, completion=completion)


def job_of(named_run: Named, tell: Tell, *, starts: Starts | None = None, completion: str | None = None) -> Job:
    """Prepare a run from its first stage; arguments and errors as in `prepare_job`."""
    planned = plan_run(locate(named_run, tell, assume=ASSUMED_GPU if starts is None else None))
    if starts is not None:
        config, facts, early = planned.config, planned.facts, planned.early
        require_devices(early, config)
        require_refit_directory(config)
        starts(config, early, planned_workers(config, facts, early, Path(), None, planned.method, dummy_weights=True))
    opened = open_run(planned, tell, copies=starts is not None, completion=completion)
    teacher = opened.teacher.facts if opened.teacher else None
    plan = step_plan(opened.config, opened.facts, opened.method, opened.prompts, teacher, opened.assume)
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
            top = self.method.teacher_top
            teacher = planned_teacher(self.config, self.facts, self.teacher.facts, self.plan, self.method)
            teacher = replace(teacher, model_dir=self.teacher.files.directory)
            # The teacher's output layer may be padded beyond its tokenizer; padding is not a token.
            if self.projection is not None and teacher.teaches is not None:
                vocab = min(self.projection.teacher_vocab, teacher.teaches.vocab)
                teacher = replace(teacher, teaches=Teaching(vocab, min(top, vocab), by_text=True))
        if self.prompts.environment is not None and workers.engines is not None:
            episode = replace(self.prompts.environment, max_length=workers.engines.engine.max_length)
            workers = replace(workers, engines=replace(workers.engines, episode=episode))
        return replace(workers, validation=self.validation.rewards if self.validation else None, teacher=teacher)
