"""The refit self-test on real processes: a Megatron policy and a vLLM engine, as a training run would start them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rlctl.backends.base import ParallelSpec, RolloutRow, only_result
from rlctl.backends.megatron.weights import megatron_parallel
from rlctl.backends.packing import plan_batch
from rlctl.backends.vllm.args import resolve_dtype
from rlctl.backends.vllm.messages import GroupResult
from rlctl.checkpoints.converted import fingerprints_of, prepared
from rlctl.checkpoints.source import ModelSource
from rlctl.cluster.session import ray_session
from rlctl.cluster.workers import WorkerGroup
from rlctl.config.load import Resolved
from rlctl.config.schema import RlctlConfig
from rlctl.models.facts import ModelFacts
from rlctl.planner.from_config import plan_from_config
from rlctl.planner.plan import Plan, refuse_unrunnable
from rlctl.refit import selftest
from rlctl.refit.selftest import LogprobLimit
from rlctl.refit.session import Receive, RefitSession
from rlctl.rl.agreement import precision_of
from rlctl.rl.crew import CrewSpec, start_crew
from rlctl.rl.devices import DeviceTurns
from rlctl.rl.job import planned_crew
from rlctl.rl.planned import open_model, refuse_without_effect, require_devices

# By what the policy multiplies in; the limits leave two orders of magnitude above what equal weights give in float32,
# and one in bfloat16. Those of float8 are four times as high, as in `agreement`, and were never measured.
LOGPROB_LIMITS = {
    "float32": LogprobLimit(1e-4, 1e-3),
    "bfloat16": LogprobLimit(0.05, 0.3),
    "float8": LogprobLimit(0.2, 1.2),
}
MAX_LENGTH = 256
MAX_NEW_TOKENS = 16


@dataclass(frozen=True)
class RefitTestJob:
    """What to test."""

    config: RlctlConfig
    """With the values of `plan`."""
    source: ModelSource
    facts: ModelFacts
    plan: Plan
    """How `train` would lay out both engines."""
    receive: Receive = "auto"
    repeat: int = 2

    @property
    def dtype(self) -> str:
        return resolve_dtype(self.config.model.dtype, "cpu" if self.plan.cluster.is_cpu else "cuda")

    def crew(self) -> CrewSpec:
        """What to start: the crew of a training run, with room for the test's short completions alone."""
        config = build_with(self.config, self.max_length)
        empty = self.source.megatron is not None
        return planned_crew(
            config, self.facts, self.plan, self.source.directory, None, dummy_weights=empty, trains=False
        )

    @property
    def max_length(self) -> int:
        return min(self.config.model.max_length or MAX_LENGTH, self.facts.max_length)


def build_with(config: RlctlConfig, max_length: int) -> RlctlConfig:
    """`config` with another `model.max_length`."""
    return config.model_copy(update={"model": config.model.model_copy(update={"max_length": max_length})})


def refit_test_job(resolved: Resolved, receive: Receive, repeat: int, tell: Callable[[str], None]) -> RefitTestJob:
    """The test of the configured model under the plan that `train` would run; what the plan refuses is refused before
    weights are fetched."""
    resolved.require_supported()
    model = open_model(resolved.config.model, weights=False)
    refuse_without_effect(resolved, model.facts)
    plan = plan_from_config(resolved.config, model.facts)
    refuse_unrunnable(plan)
    require_devices(plan, resolved.config)
    config = resolved.with_values(plan.config_values()).config
    model = open_model(config.model, tell)
    return RefitTestJob(config, model.source, model.facts, plan, receive, repeat)


def test_prompts(vocabulary: int, length: int) -> list[tuple[int, ...]]:
    """Prompts of fixed tokens, long enough for the engine to cache their prefixes."""
    longest = max(1, length - MAX_NEW_TOKENS - 1)
    return [tuple((7 * i + 13 * j) % vocabulary for j in range(min(longest, 40 + 11 * i))) for i in range(4)]


def run_refit_test(job: RefitTestJob, tell: Callable[[str], None]) -> selftest.SelfTest:
    """Start both engines, test, and stop them."""
    if job.config.model.convert:
        job = replace(job, source=prepared(job.source, job.dtype, job.plan.cluster.nodes, tell))
    crew_spec = job.crew()
    p = crew_spec.policy.parallel
    with tempfile.TemporaryDirectory(prefix="rlctl-refit-test-") as logs, ray_session(job.config.cluster.ray_address):
        tell("starting the policy and the engine")
        with start_crew(crew_spec, Path(logs)) as crew:
            crew.policy.call("load_hf", job.source.weights)
            sleeps = crew_spec.engine.sleeps
            turns = DeviceTurns(crew.policy, crew.engines, offload=sleeps, engines_sleep=sleeps)
            session = RefitSession(
                crew.policy,
                crew.engines,
                job.facts,
                parallel=megatron_parallel(p),
                settings=job.config.refit,
                dtype=job.dtype,
                receive=job.receive,
                converted=fingerprints_of(job.source, job.dtype),
                converted_at=job.source.megatron and job.source.megatron.parent,
            )
            turns.to_weights()
            session.open()
            try:
                return selftest.run(
                    session,
                    model=job.source.label,
                    prompts=test_prompts(job.facts.vocab, job.max_length),
                    compare_logprobs=lambda results: policy_difference(crew.policy, p, results),
                    repeat=job.repeat,
                    logprob_limit=logprob_limit(job.facts, precision_of(job.config, job.dtype)),
                    timeout_s=job.config.refit.timeout_s,
                    new_tokens=min(MAX_NEW_TOKENS, job.max_length - 1),
                    tell=tell,
                    generating=turns.generating,
                    to_weights=turns.to_weights,
                )
            finally:
                session.close()


def policy_difference(
    policy: WorkerGroup, parallel: ParallelSpec, results: list[GroupResult]
) -> selftest.LogprobDifference:
    """The engine's log-probs of its own tokens against the policy's, by the policy's own forward pass."""
    rows = [
        RolloutRow(r.group, row, r.prompt_tokens, r.prompt_tokens + count, 0.0, 1.0)
        for r in results
        for row, count in enumerate(r.response_tokens)
    ]
    longest = max(row.tokens for row in rows)
    columns = {r.group: r.columns for r in results}
    plan = plan_batch(
        [rows],
        columns,
        dp=parallel.dp,
        micro_batch_tokens=2 * longest,
        multiple=parallel.row_multiple,
        micro_batch_multiple=parallel.micro_batch_multiple,
    )
    shards = [(plan.shards[parallel.data_rank(rank)], list) for rank in range(len(policy))]  # no handles: a few tokens
    policy.call_each("load_batch", shards)
    stats = only_result(policy.call("logprobs", "old_logprobs"))
    tokens = max(stats.tokens, 1)
    return selftest.LogprobDifference(stats.tokens, stats.abs_sum / tokens, stats.abs_max, stats.k3_sum / tokens)


def logprob_limit(facts: ModelFacts, precision: str) -> LogprobLimit:
    """What log-probs of engine and policy may differ by where their weights are equal.

    Below float32 two experts of a token can score the same but for rounding, and then each side may choose another: one
    token says little, the average does.
    """
    limit = LOGPROB_LIMITS[precision]
    return replace(limit, max_abs=float("inf")) if facts.moe is not None and precision != "float32" else limit
