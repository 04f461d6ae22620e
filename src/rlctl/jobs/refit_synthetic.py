"""`refit-test --synthetic`: refits between two process groups with a published model's tensors at reduced width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlctl.backends.base import Dtype, PolicySpec
from rlctl.backends.lookup import policy_backend
from rlctl.cluster.placement import Placement
from rlctl.cluster.ray_session import ray_session
from rlctl.cluster.workers import WorkerGroup, WorkerSpec
from rlctl.config.files import temporary_folder
from rlctl.errors import InputError
from rlctl.jobs import refit_report
from rlctl.models.catalog import lookup
from rlctl.models.constraints import require_engine_sizes
from rlctl.models.facts import ModelFacts
from rlctl.planner.from_config import pinned_parallel
from rlctl.refit.session import RefitSession
from rlctl.refit.synthetic import SyntheticSender, reduced
from rlctl.settings.config import RolloutConfig
from rlctl.weights.vllm import VllmParallel

MODELS = {
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "qwen3-235b": "Qwen/Qwen3-235B-A22B",
    "qwen3-30b": "Qwen/Qwen3-30B-A3B",
    "llama-70b": "meta-llama/Llama-3.1-70B",
}
SOURCE, ENGINE = "rlctl.refit.synthetic:SyntheticSender", "rlctl.refit.synthetic:SyntheticEngine"
HIDDEN = 64


@dataclass(frozen=True)
class SyntheticJob:
    """A model of `MODELS` to test, with the parallel sizes, transport and limits in `config`."""

    config: RolloutConfig
    name: str
    repeat: int = 2
    hidden: int = HIDDEN

    @property
    def facts(self) -> ModelFacts:
        """The model at reduced width. Raises InputError for a name outside MODELS."""
        published = lookup(MODELS[self.name]) if self.name in MODELS else None
        if published is None:
            raise InputError(f"--synthetic {self.name} is not known.", f"Choose one of {', '.join(MODELS)}.")
        return reduced(published, self.hidden)

    @property
    def dtype(self) -> Dtype:
        return "bfloat16" if self.config.model.dtype == "auto" else self.config.model.dtype


@contextmanager
def synthetic_session(job: SyntheticJob, tell: Callable[[str], None]) -> Iterator[RefitSession]:
    """Yield an open session between processes with parameters in the layouts of the policy's backend and of vLLM."""
    config, facts = job.config, job.facts
    policy_spec = PolicySpec(facts, pinned_parallel(facts, config.training), job.dtype)
    world = policy_backend(config.training.backend).layouts(policy_spec)
    sizes = config.generation
    tp, pp, dp, ep = sizes.tp or 1, sizes.pp or 1, sizes.dp or 1, sizes.ep or 1
    require_engine_sizes(facts, tp=tp, pp=pp, dp=dp, ep=ep)
    target = VllmParallel(tp, dp, ep > 1, pp)
    replicas = config.generation.engines or 1
    limits = config.cluster
    with temporary_folder("synthetic", tell) as logs, ray_session(limits.ray_address, logs=logs, tell=tell):
        placement = Placement(1, gpus=False, timeout_s=limits.start_timeout_s)

        def start(name: str, kind: str, specs: list[dict]) -> WorkerGroup:
            env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
            workers = [WorkerSpec(spec, (placement.bundles[0],), env) for spec in specs]
            return WorkerGroup(
                name, kind, workers, placement, logs,
                start_timeout_s=limits.start_timeout_s, call_timeout_s=limits.step_limit_s, wait=False,
            )  # fmt: skip

        sources = [{"rank": rank, "world": world, "threads": 1} for rank in range(policy_spec.parallel.world_size)]
        shared = {"facts": facts, "dtype": job.dtype, "parallel": target, "threads": 1}
        receivers = [shared | {"index": index} for index in range(target.world_size * replicas)]
        groups = [start("policy", SOURCE, sources), start("engine", ENGINE, receivers)]
        try:
            for group in groups:
                group.ready()
            policy, engines = groups
            policy.call(SyntheticSender.setup)
            session = RefitSession(
                policy, engines, facts, settings=config.refit, dtype=job.dtype, members=target.world_size
            )
            session.open()
            yield session
            session.close()
        finally:
            for group in groups:
                group.kill()
            placement.release()


def run_synthetic(job: SyntheticJob, tell: Callable[[str], None]) -> refit_report.RefitTestReport:
    """Start the processes, refit between them, compare every tensor, and stop them."""
    tell(f"starting processes with the tensors of {job.name}, {job.hidden} wide; no engine, nothing is generated")
    with synthetic_session(job, tell) as session:
        return refit_report.run_without_engine(
            session, model=job.name, repeat=job.repeat, timeout_s=job.config.refit.timeout_s, tell=tell
        )
