"""Checks whether runs can share one base model with its processes, and differ in adapters alone."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from rlctl.errors import ConfigError
from rlctl.preparation.job import Job
from rlctl.preparation.worker_specs import RunWorkersSpec
from rlctl.settings.config import RlctlConfig
from rlctl.training.capabilities import HasCritic


def require_adapters(config: RlctlConfig) -> None:
    """Raise ConfigError if a run trains the base."""
    if not config.training.lora.rank:
        raise ConfigError("The runs of a sweep share one base, and this run trains all weights.", "Add --lora.")
    if config.samples_while_training:
        raise ConfigError(
            "The runs of a sweep share engines, and rollouts.mode = async would sample while other runs train.",
            "Leave out --async.",
        )


def require_shareable(label: str, first: Job, job: Job) -> None:
    """Raise ConfigError if a run cannot share the policy and engines of the sweep's first run."""
    reasons = {
        "a critic trains all its weights": isinstance(job.method, HasCritic) and job.method.critic is not None,
        "model.dtype = float16 has a loss scale per run": job.dtype == "float16",
    }
    if refused := [reason for reason, applies in reasons.items() if applies]:
        raise ConfigError(f"The runs of a sweep cannot share a policy: {refused[0]}.", "Start the runs one by one.")
    if changed := difference(shared_part(first), shared_part(job)):
        raise ConfigError(
            f"--vary {label} changes {changed} of the processes, which the runs of a sweep share.",
            "Vary the learning rate, the loss, the rewards, the batch or the steps, or start the runs one by one.",
        )


def shared_part(job: Job) -> RunWorkersSpec:
    """Return the processes of a run without what each run of a sweep has alone: the learning rate and the scorers."""
    spec = job.workers_spec()
    optimizer = spec.policy.optimizer.model_copy(update={"lr": 0.0})
    return replace(spec, policy=replace(spec.policy, optimizer=optimizer), reward=None, validation=None)


def difference(one: Any, other: Any) -> str:
    """Return the dotted name of the first field in which two specifications differ; empty: they are equal."""
    if one == other:
        return ""
    names = [field.name for field in fields(one)] if is_dataclass(one) else list(getattr(type(one), "model_fields", ()))
    if type(one) is not type(other) or not names:
        return "value"
    name = next(name for name in names if getattr(one, name) != getattr(other, name))
    inner = difference(getattr(one, name), getattr(other, name))
    return name if inner == "value" else f"{name}.{inner}"
