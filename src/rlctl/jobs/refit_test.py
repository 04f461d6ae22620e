"""The refit test on real processes: policy and engines as a training run would start them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlctl.checkpoints.conversion.prepared_model import prepared, require_seen
from rlctl.cluster.ray_session import ray_session
from rlctl.config.files import temporary_folder
from rlctl.jobs import refit_report
from rlctl.jobs.refit_report import LogprobLimit, RefitTestReport
from rlctl.jobs.refit_test_job import RefitTestJob
from rlctl.models.facts import ModelFacts
from rlctl.preparation.run_workers import RunWorkers, start_run_workers
from rlctl.preparation.worker_specs import converts
from rlctl.refit.decoding import fixed_prompts, policy_difference
from rlctl.settings.generation import RefitConfig
from rlctl.training.agreement import precision_of

# By the precision of the policy's products. The limits are 100 times the differences of equal weights in float32, and
# 10 times in bfloat16. The float8 limits are four times the bfloat16 limits, as in `agreement`, and were not measured.
LOGPROB_LIMITS = {
    "float32": LogprobLimit(1e-4, 1e-3),
    "bfloat16": LogprobLimit(0.05, 0.3),
    "float16": LogprobLimit(0.0125, 0.1),
    "float8": LogprobLimit(0.2, 1.2),
}
MAX_NEW_TOKENS = 16
PROMPTS = 4


def run_refit_test(job: RefitTestJob, tell: Callable[[str], None]) -> RefitTestReport:
    """Start policy and engines, test their refits, and stop them."""
    require_seen(job.base_model, job.plan.cluster.nodes)
    if converts(job.config, job.plan):
        job = replace(job, base_model=prepared(job.base_model, job.dtype, job.plan.cluster.nodes, tell))
    address = job.config.cluster.ray_address
    with temporary_folder("refit-test", tell) as logs, ray_session(address, logs=logs, tell=tell):
        tell("starting the policy and the engine")
        with start_run_workers(job.workers(), logs) as workers:
            workers.policy.load_model(job.base_model.weights)
            return refit_workers(job, workers, job.config.refit, tell)


def refit_workers(
    job: RefitTestJob, workers: RunWorkers, settings: RefitConfig, tell: Callable[[str], None]
) -> RefitTestReport:
    """Test the refits of running workers. The policy's weights are loaded."""
    with workers.weight_sync(settings, job.base_model, receive=job.receive, adapters=None) as sync:
        return refit_report.run(
            sync,
            model=job.base_model.label,
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
    """Return the limit of differences between log-probs of engine and policy with equal weights.

    Below float32, rounding can change a token's experts if their router scores are nearly equal. Single tokens may then
    differ much, so only the mean has a limit.
    """
    limit = LOGPROB_LIMITS[precision]
    return replace(limit, max_abs=float("inf")) if facts.moe is not None and precision != "float32" else limit
