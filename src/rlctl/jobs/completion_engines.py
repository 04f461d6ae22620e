"""Engines with a model's or a checkpoint's weights, outside of training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rlctl.backends.clients import EngineClient, PolicyClient
from rlctl.checkpoints.model_files import Tell
from rlctl.cluster.ray_session import ray_session
from rlctl.config.files import temporary_folder
from rlctl.jobs.completion_job import CompletionJob
from rlctl.planner.result import Plan
from rlctl.preparation.run_workers import start_engines, start_run_workers
from rlctl.rollouts.source_episodes import SourceEpisodes
from rlctl.training.agreement import error_limit


@contextlib.contextmanager
def started_engines(
    job: CompletionJob, plan: Plan, tell: Tell, play: SourceEpisodes | None = None
) -> Iterator[tuple[EngineClient, PolicyClient | None, contextlib.AbstractContextManager[Any]]]:
    """Yield (engines with the job's weights, policy or None, context in which the engines may use shared devices).

    `play`: how engines play episodes; None: one answer per prompt. A Megatron checkpoint needs a policy on the same
    devices, which loads the checkpoint and refits the engines.
    """
    spec, address = job.engines(plan), job.config.cluster.ray_address
    if play is not None:
        spec = replace(spec, episode=play.within(spec.engine.max_length))
    with temporary_folder("generate", tell) as logs, ray_session(address, logs=logs, tell=tell):
        tell("starting the engine" if spec.count == 1 else f"starting {spec.count} engines")
        if plan.training is None:
            with start_engines(spec, job.config.cluster, logs) as engines:
                yield engines, None, contextlib.nullcontext()
            return
        with start_run_workers(replace(job.workers(plan), engines=spec), logs) as workers:
            saved, adapters = job.checkpoint, job.config.training.lora.rank > 0
            if saved is None or adapters:  # a checkpoint of adapters contains no base weights
                workers.policy.load_model(job.model.files.weights)
            if saved is not None:
                (workers.policy.load_saved if adapters else workers.policy.load_model)(saved.policy)
            source, limit = None if saved else job.model.files, error_limit(job.config, workers.spec.policy.dtype)
            with workers.weight_sync(job.config.refit, source, decode_limit=limit) as sync:
                for share in sync.refit(saved.step if saved else 0).shares:
                    tell(f"weights: {share}")
                yield sync.engines, workers.policy, sync.generating()
