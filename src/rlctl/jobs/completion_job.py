"""The model or checkpoint that completes prompts, and its plan."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from rlctl.backends.lookup import engine_backend
from rlctl.checkpoints.conversion.prepared_model import require_seen
from rlctl.checkpoints.model_files import Tell
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
    """The model or checkpoint that completes prompts, and the number of samples per prompt."""

    resolved: Resolved
    model: NamedModel
    samples: int = 1
    checkpoint: Checkpoint | None = None
    """A run's checkpoint whose weights replace the model's; None: the model's weights."""
    compares: bool = False
    """Also compute the log-probs of sampled tokens with a policy."""

    @property
    def config(self) -> RolloutConfig:
        return self.resolved.config

    @property
    def facts(self) -> ModelFacts:
        return self.model.facts

    def plan(self, prompt_tokens: list[int], assume: str | None = None) -> Plan:
        """Return a plan of engines for prompts of these lengths. For a Megatron checkpoint, the plan also contains a
        policy that reads it, laid out for training with the same prompts.

        `assume`: GPU type to plan for if this machine lacks the requested GPUs. Raises the errors of
        `plan_from_config`.
        """
        work = completions_workload(self.config, self.facts, prompt_tokens, self.samples)
        if self.checkpoint or self.model.files.megatron or self.compares:
            step = self.config.batch
            prompts, generations = max(work.prompts, step.prompts), max(work.generations, step.generations)
            work = replace(work, trains=True, prompts=prompts, generations=generations)
        return plan_from_config(self.config, self.facts, work, assume=assume)

    def checked_plan(self, prompt_tokens: list[int]) -> Plan:
        """Return the plan. Raises if it cannot run, this machine lacks its devices, or other nodes may not see the
        model's directory."""
        plan = self.plan(prompt_tokens)
        refuse_unrunnable(plan)
        engine_backend(self.config.generation.backend).refuse(self.config, self.facts, device_of(plan))
        require_devices(plan, self.config)
        require_seen(self.model.files, plan.cluster.nodes)
        return plan

    def engines(self, plan: Plan) -> EnginesSpec:
        """Return the specification of a plan's engines. The configuration contains the plan's values."""
        if plan.training is not None:
            engines = self.workers(plan).engines
            assert engines is not None  # a plan for completions has engines
            return engines
        directory = self.model.files.directory
        return planned_engines(self.config, self.facts, plan, directory, plan.workload.max_length, colocated=False)

    def workers(self, plan: Plan) -> RunWorkersSpec:
        """Return the specification of the policy and engines of a plan with both."""
        directory, length = self.model.files.directory, plan.workload.max_length
        return planned_workers(self.config, self.facts, plan, directory, None, max_length=length, dummy_weights=True)

    def arguments(self, plan: Plan) -> BackendArguments:
        """Return the arguments of the classes in a plan's processes."""
        return BackendArguments.of(self.workers(plan) if plan.training else self.engines(plan))


def completion_job(
    resolved: Resolved, samples: int, checkpoint: Checkpoint | None, prompts: int, tell: Tell
) -> CompletionJob:
    """Return a job that completes `prompts` prompts. Checks that need no weights run before the weights are fetched."""
    resolved.require_supported()
    run = RunDirectory(checkpoint.path.parents[1]) if checkpoint else None
    with run.opened_from_here() if run else contextlib.nullcontext():
        model = open_model(resolved.config.model, weights=False, engines_alone=True)
    early = CompletionJob(resolved, model, samples, checkpoint)
    early.checked_plan([PROMPT_TOKENS] * prompts)
    return replace(early, model=open_model(resolved.config.model, tell, engines_alone=True))
