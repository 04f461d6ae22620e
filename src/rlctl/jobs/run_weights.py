"""The weights of a run: conversion, checkpoint, reference log-probs and refits of its engines."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from rlctl.backends.clients import PolicyClient
from rlctl.checkpoints.conversion.prepared_model import prepared, require_seen
from rlctl.checkpoints.model_files import ModelFiles
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.result import Plan
from rlctl.preparation.job import Job
from rlctl.preparation.run_workers import RunWorkers
from rlctl.refit.sync import WeightSync
from rlctl.rollouts.dataset import HeldOutTexts, TextStream
from rlctl.runs.directory import RESUMES, Checkpoint, RunDirectory
from rlctl.telemetry.display import Display
from rlctl.training.agreement import error_limit
from rlctl.training.reference_logprobs import precompute_reference
from rlctl.training.saving import newest_intact


def converted(job: Job, display: Display) -> Job:
    """Return the job with converted models of policy and teacher, if the backend loads converted checkpoints.

    Raises MachineError if a model's directory may not exist on every node of the run."""
    for files in (
        job.base_model,
        *([job.teacher.files] if job.teacher else []),
        *(t.files for t in job.further_teachers),
    ):
        require_seen(files, job.plan.cluster.nodes)
    if job.converts and job.base_model.megatron is None:
        display.doing("preparing the converted model", own_bar=True)
        job = replace(job, base_model=prepared(job.base_model, job.dtype, job.plan.cluster.nodes, display.say))
    if job.converts and job.teacher is not None and job.config.named_teacher:
        display.doing("preparing the converted teacher", own_bar=True)
        first, *further = (
            replace(teacher, files=prepared(teacher.files, job.dtype, job.plan.cluster.nodes, display.say))
            for teacher in (job.teacher, *job.further_teachers)
        )
        job = replace(job, teacher=first, further_teachers=tuple(further))
    return job


def load_newest(
    run: RunDirectory, policy: PolicyClient, display: Display, manifest: dict[str, Any]
) -> Checkpoint | None:
    """Load the newest intact checkpoint into the policy and return it; None: there is no checkpoint yet. Write
    `manifest` after the load, so that a configuration that cannot load the checkpoint does not replace the stored
    one."""
    display.doing("checking the checkpoint")
    newest = newest_intact(run, policy, display.say)
    if newest is None:
        display.say("no checkpoint yet: starting again from step 1")
    else:
        display.say(f"resuming after step {newest.step}")
        policy.load_saved(newest.policy)
    run.write_manifest({**manifest, RESUMES: run.manifest().get(RESUMES, 0) + 1})
    return newest


def open_weight_sync(
    job: Job, workers: RunWorkers, source: ModelFiles | None, display: Display, stack: contextlib.ExitStack
) -> WeightSync:
    """Return the weight sync of a run, closed by `stack`. `source`: the model whose weights the policy has; None: a
    checkpoint's."""
    settings = job.config.engine_settings
    assert settings is not None  # weights are sent to engines
    sync = workers.weight_sync(
        settings.refit, source, offload=job.offload, tell=display.say,
        restarts=job.config.cluster.engine_restarts, decode_limit=error_limit(job.config, job.dtype),
        shown=job.prompts.encoder.shown_image() if job.facts.vision is not None else None,
    )  # fmt: skip
    assert workers.spec.engines is not None  # weights are sent to engines
    flag = workers.spec.engines.backend.without_graphs
    sync.devices.when_all_sleep = lambda used: display.say(doubt) if (doubt := crowded(job.plan, used, flag)) else None
    return stack.enter_context(sync)


def crowded(plan: Plan, used: tuple[int, int], flag: str) -> str:
    """Return a warning if training may not fit on a GPU; empty: it fits. `used`: (bytes in use, total bytes) of a GPU
    while policy and engines sleep. `flag`: option with which sleeping engines keep less memory; empty: none."""
    in_use, size = used
    training = plan.memory["training"]
    planned = training.parts["engine asleep"] + plan.memory["generation"].parts["policy asleep"]
    need = training.total + in_use - planned
    if need <= size:
        return ""
    return (
        f"While policy and engines sleep, {in_use / GIB:.1f} GiB of a GPU are in use, and the plan has "
        f"{planned / GIB:.1f}. Training then needs about {need / GIB:.1f} GiB of {size / GIB:.1f} and may run out of "
        "memory. Give it less with --set training.micro_batch_tokens=N"
        + (f", or engines that keep less with {flag} (no CUDA graphs)." if flag else ".")
    )


def keep_reference_logprobs(job: Job, run: RunDirectory, policy: PolicyClient) -> None:
    """Compute the reference log-probs of training and validation texts with the policy, before it trains."""
    assert isinstance(job.prompts, TextStream)  # pairs are texts
    parts = [("training", job.prompts, [*job.prompts.used], job.prompts.fingerprint())]
    if isinstance(job.validation, HeldOutTexts):
        parts.append(("held out", job.validation.stream, [*job.validation.rows], job.validation.fingerprint))
    precompute_reference(run.path / "reference.json", policy, job.method, parts, job.config.batch.prompts)
