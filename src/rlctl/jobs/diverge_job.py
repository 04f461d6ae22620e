"""The model or checkpoint of `rlctl diverge`, and its plan."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from rlctl.checkpoints.model_files import Tell
from rlctl.config.load import PLANNER, Resolved
from rlctl.config.sources import Value
from rlctl.jobs.diverge import DivergeJob
from rlctl.jobs.refit_test_job import MAX_LENGTH, refit_test_job
from rlctl.runs.directory import Checkpoint, RunDirectory

WITHOUT_GRAPHS = "vllm.enforce_eager"
"""Recording needs modules that run one by one. Compiled models and CUDA graphs are not looked into."""

REPLAY = "training.router_replay"
"""A trainer that replays an engine's experts would hide its own router."""


def diverge_job(resolved: Resolved, checkpoint: Checkpoint | None, tokens: int | None, tell: Tell) -> DivergeJob:
    """Return the comparison of a model, or of a run's checkpoint, with the plan that `train` would use or the run
    used."""
    run = RunDirectory(checkpoint.path.parents[1]) if checkpoint else None
    resolved = resolved.deciding([Value(WITHOUT_GRAPHS, True, PLANNER)], without=[REPLAY])
    with run.opened_from_here() if run else contextlib.nullcontext():
        job = DivergeJob(refit_test_job(resolved, "auto", 2, tell), checkpoint, tokens)
    return replace(job, test=replace(job.test, longest=max(MAX_LENGTH, job.wanted + 2)))
