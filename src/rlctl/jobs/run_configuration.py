"""The configuration of an existing run, overridden by the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlctl.config.facts import LAYOUT
from rlctl.config.load import Resolved, stored_values
from rlctl.config.sources import Source, Value
from rlctl.errors import InputError
from rlctl.methods.available import method_class
from rlctl.methods.configuration import from_sources
from rlctl.runs.directory import Checkpoint, RunDirectory
from rlctl.settings.config import RlctlConfig, RolloutConfig
from rlctl.training.capabilities import ScalarHead

POLICY_SECTIONS = ("model", "training", "generation", "vllm", "megatron", "ddp", "refit", "cluster", "optimizer")
"""Sections of the processes of policy and engines."""


def of_run(directory: Path, step: int | None, base: Resolved) -> tuple[Resolved, Checkpoint]:
    """Return a run's configuration, overridden by the command line's `base`, and its checkpoint of `step` (None: the
    newest). The layout and the cluster address are dropped, since engines are planned for the current devices. Raises
    InputError for a missing checkpoint and for a reward model."""
    stored, checkpoint = _stored(directory, step)
    left_out = {*base.schema.with_fact(LAYOUT), "cluster.ray_address"}
    values = [value for value in stored if value.key not in left_out]
    return _without_head(directory, _resolved(values, base, RolloutConfig)), checkpoint


def processes_of_run(directory: Path, step: int | None, base: Resolved) -> tuple[Resolved, Checkpoint]:
    """Return the configuration of a run's processes, whatever method it trains with, and its checkpoint, as `of_run`
    does. The layout stays; other sections are `base`'s."""
    stored, checkpoint = _stored(directory, step)
    _without_head(directory, _resolved(stored, base, RolloutConfig))
    kept = [value for value in stored if value.key.partition(".")[0] in POLICY_SECTIONS]
    values = [value for value in kept if value.key != "cluster.ray_address"]
    return _resolved(values, base, type(base.config)), checkpoint


def _resolved(values: Sequence[Value], base: Resolved, kind: type[RlctlConfig]) -> Resolved:
    return from_sources([Source(values, shared=True), Source(base.given(), shared=True)], kind)


def _without_head(directory: Path, resolved: Resolved) -> Resolved:
    method = method_class(resolved.config.run.algorithm)
    if method is not None and issubclass(method, ScalarHead):
        raise InputError(
            f"--run-dir {directory} holds a reward model, which scores texts and writes none.",
            f"Export it (rlctl convert megatron-to-hf {directory} DIR), and score with --reward model:DIR.",
        )
    return resolved


def _stored(directory: Path, step: int | None) -> tuple[list[Value], Checkpoint]:
    run = RunDirectory(directory)
    stored = run.manifest()
    checkpoints = run.checkpoints()
    matching = [checkpoint for checkpoint in checkpoints if step is None or checkpoint.step == step]
    if not matching:
        have = ", ".join(str(checkpoint.step) for checkpoint in checkpoints) or "none"
        description = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise InputError(
            f"--run-dir {directory} does not have {description} (it has: {have}).", "Choose another with --step."
        )
    return list(stored_values(stored["config"])), matching[-1]
