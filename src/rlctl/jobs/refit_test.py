"""The refit test on real processes: policy and engines as a training run would start them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rlctl.backends.base import resolve_dtype
from rlctl.backends.lookup import engine_backend
from rlctl.checkpoints.conversion.prepared_model import prepared, require_seen
from rlctl.checkpoints.model_source import ModelSource
from rlctl.cluster.ray_session import ray_session
from rlctl.config.files import temporary_folder
from rlctl.config.load import Resolved
from rlctl.jobs import refit_report
from rlctl.jobs.refit_report import LogprobLimit, RefitTestReport
from rlctl.methods.available import method_from_config
from rlctl.models.facts import ModelFacts
from rlctl.planner.result import Plan
from rlctl.preparation.open_model import open_model
from rlctl.preparation.prepare import require_devices, runnable_plan
from rlctl.preparation.run_workers import (
    RunWorkers,
    RunWorkersSpec,
    converts,
    device_of,
    planned_workers,
    start_run_workers,
)
from rlctl.refit.decoding import fixed_prompts, policy_difference
from rlctl.refit.session import Receive
from rlctl.settings.config import RolloutConfig
from rlctl.settings.generation import RefitConfig
from rlctl.training.agreement import precision_of

# By what the policy multiplies in; the limits leave two orders of magnitude above what equal weights give in float32,
# and one in bfloat16. Those of float8 are four times as high, as in `agreement`, and were never measured.
LOGPROB_LIMITS = {
    "float32": LogprobLimit(1e-4, 1e-3),
    "bfloat16": LogprobLimit(0.05, 0.3),
    "float16": LogprobLimit(0.0125, 0.1),
    "float8": LogprobLimit(0.2, 1.2),
}
MAX_LENGTH = 256
MAX_NEW_TOKENS = 16
PROMPTS = 4


@dataclass(frozen=True)
class RefitTestJob:
    """The model to test, and the plan that `train` would run."""

    config: RolloutConfig
    """With the values of `plan`."""
    source: ModelSource
    facts: ModelFacts
    plan: Plan
    """How `train` would lay out policy and engines."""
    receive: Receive = "auto"
    repeat: int = 2

    @property
    def dtype(self) -> str:
        return resolve_dtype(self.config.model.dtype, device_of(self.plan))

    def workers(self) -> RunWorkersSpec:
        """The workers of a training run, with room for the test's short completions alone."""
        directory, empty = self.source.directory, self.source.megatron is not None
        return planned_workers(
            self.config, self.facts, self.plan, directory, None,
            max_length=self.max_length, dummy_weights=empty,
        )  # fmt: skip

    @property
    def max_length(self) -> int:
        return min(self.config.model.max_length or MAX_LENGTH, self.facts.max_length)


def refit_test_job(resolved: Resolved, receive: Receive, repeat: int, tell: Callable[[str], None]) -> RefitTestJob:
    """The test of the configured model under the plan that `train` would run; what the plan refuses is refused before
    weights are fetched."""
    resolved.require_supported()
    model = open_model(resolved.config.model, weights=False)
    planned, plan = runnable_plan(resolved, model.facts, method_from_config(resolved.config, tries_loss=False))
    engine_backend(planned.config.generation.backend).refuse(planned.config, model.facts, device_of(plan))
    require_devices(plan, resolved.config)
    model = open_model(planned.config.model, tell)
    if model.source.note:
        tell(model.source.note)
    return RefitTestJob(planned.config, model.source, model.facts, plan, receive, repeat)


def run_refit_test(job: RefitTestJob, tell: Callable[[str], None]) -> RefitTestReport:
    """Start policy and engines, test, and stop them."""
    require_seen(job.source, job.plan.cluster.nodes)
    if converts(job.config, job.plan):
        job = replace(job, source=prepared(job.source, job.dtype, job.plan.cluster.nodes, tell))
    address = job.config.cluster.ray_address
    with temporary_folder("refit-test", tell) as logs, ray_session(address, logs=logs, tell=tell):
        tell("starting the policy and the engine")
        with start_run_workers(job.workers(), logs) as workers:
            workers.policy.load_model(job.source.weights)
            return refit_workers(job, workers, job.config.refit, tell)


def refit_workers(
    job: RefitTestJob, workers: RunWorkers, settings: RefitConfig, tell: Callable[[str], None]
) -> RefitTestReport:
    """Test the refits of a run's workers, whose policy has its weights."""
    with workers.weight_sync(settings, job.source, receive=job.receive) as sync:
        return refit_report.run(
            sync,
            model=job.source.label,
            prompts=fixed_prompts(job.facts.text_vocab, max(1, job.max_length - MAX_NEW_TOKENS - 1), PROMPTS),
            compare_logprobs=lambda results: policy_difference(workers.policy, results),
            repeat=job.repeat,
            logprob_limit=logprob_limit(job.facts, precision_of(job.config, job.dtype)),
            timeout_s=settings.timeout_s,
            new_tokens=min(MAX_NEW_TOKENS, job.max_length - 1),
            never=job.facts.never_sampled,
            tell=tell,
        )


def logprob_limit(facts: ModelFacts, precision: str) -> LogprobLimit:
    """How much log-probs of engine and policy may differ where their weights are equal.

    Below float32 two experts of a token can score the same but for rounding, and then each side may choose another: one
    token says little, the average does.
    """
    limit = LOGPROB_LIMITS[precision]
    return replace(limit, max_abs=float("inf")) if facts.moe is not None and precision != "float32" else limit
