"""The model, or the checkpoint of a run, that completes prompts, and its plan."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from rlctl.backends.lookup import engine_backend
from rlctl.checkpoints.conversion.prepared_model import require_seen
from rlctl.checkpoints.model_source import Tell
from rlctl.config.load import Resolved
from rlctl.jobs.backend_arguments import BackendArguments
from rlctl.models.facts import ModelFacts
from rlctl.planner.from_config import PROMPT_TOKENS, completions_workload, plan_from_config
from rlctl.planner.make_plan import refuse_unrunnable
from rlctl.planner.result import Plan
from rlctl.preparation.open_model import NamedModel, open_model
from rlctl.preparation.planned import require_devices
from rlctl.preparation.worker_specs import EnginesSpec, RunWorkersSpec, device_of, planned_engines, planned_workers
from rlctl.runs.directory import Checkpoint, RunDirectory
from rlctl.settings.config import RolloutConfig


@dataclass(frozen=True)
class CompletionJob:
    """The model, or the checkpoint of a run, that completes prompts, and how many samples each gets."""

    resolved: Resolved
    model: NamedModel
    samples: int = 1
    checkpoint: Checkpoint | None = None
    """Weights of a run, in place of the model's own."""
    compares: bool = False
    """A policy computes the log-probs of what the engines sample, too."""

    @property
    def config(self) -> RolloutConfig:
        return self.resolved.config

    @property
    def facts(self) -> ModelFacts:
        return self.model.facts

    def plan(self, prompt_tokens: list[int], assume: str | None = None) -> Plan:
        """The engines for prompts of these lengths; where the weights are a Megatron checkpoint, the policy that reads
        it too, laid out as for training with the same prompts.

        `assume` is the GPU to plan for where GPUs are asked for and this machine has none to look at. Raises what
        `plan_from_config` raises.
        """
        work = completions_workload(self.config, self.facts, prompt_tokens, self.samples)
        if self.checkpoint or self.model.source.megatron or self.compares:
            step = self.config.batch
            prompts, generations = max(work.prompts, step.prompts), max(work.generations, step.generations)
            work = replace(work, trains=True, prompts=prompts, generations=generations)
        return plan_from_config(self.config, self.facts, work, assume=assume)

    def checked_plan(self, prompt_tokens: list[int]) -> Plan:
        """The plan, refused where it cannot be run, this machine lacks its devices, or nodes may not see the model."""
        plan = self.plan(prompt_tokens)
        refuse_unrunnable(plan)
        engine_backend(self.config.generation.backend).refuse(self.config, self.facts, device_of(plan))
        require_devices(plan, self.config)
        require_seen(self.model.source, plan.cluster.nodes)
        return plan

    def engines(self, plan: Plan) -> EnginesSpec:
        """The engines of a plan; the configuration holds the plan's values."""
        if plan.training is not None:
            engines = self.workers(plan).engines
            assert engines is not None  # a plan of completions has them
            return engines
        directory = self.model.source.directory
        return planned_engines(self.config, self.facts, plan, directory, plan.workload.max_length, colocated=False)

    def workers(self, plan: Plan) -> RunWorkersSpec:
        """Policy and engines of a plan with both."""
        directory, length = self.model.source.directory, plan.workload.max_length
        return planned_workers(self.config, self.facts, plan, directory, None, max_length=length, dummy_weights=True)

    def arguments(self, plan: Plan) -> BackendArguments:
        """The arguments of the classes that are built for a plan."""
        return BackendArguments.of(self.workers(plan) if plan.training else self.engines(plan))


def completion_job(
    resolved: Resolved, samples: int, checkpoint: Checkpoint | None, prompts: int, tell: Tell
) -> CompletionJob:
    """The job of completing `prompts` prompts; what can be refused without the weights is refused before they are
    fetched."""
    resolved.require_supported()
    run = RunDirectory(checkpoint.path.parents[1]) if checkpoint else None
    with run.opened_from_here() if run else contextlib.nullcontext():
        model = open_model(resolved.config.model, weights=False, engines_alone=True)
    early = CompletionJob(resolved, model, samples, checkpoint)
    early.checked_plan([PROMPT_TOKENS] * prompts)
    return replace(early, model=open_model(resolved.config.model, tell, engines_alone=True))
