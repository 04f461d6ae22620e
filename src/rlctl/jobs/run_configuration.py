"""The configuration of an existing run, overridden by the command line."""

from __future__ import annotations

from pathlib import Path

from rlctl.config.facts import LAYOUT
from rlctl.config.load import Resolved, stored_values
from rlctl.config.sources import Source
from rlctl.errors import InputError
from rlctl.methods.available import method_class
from rlctl.methods.configuration import from_sources
from rlctl.runs.directory import Checkpoint, RunDirectory
from rlctl.settings.config import RolloutConfig
from rlctl.training.capabilities import ScalarHead


def of_run(directory: Path, step: int | None, base: Resolved) -> tuple[Resolved, Checkpoint]:
    """Return a run's configuration, overridden by the command line's `base`, and its checkpoint of `step` (None: the
    newest). The layout and the cluster address are dropped, since engines are planned for the current devices. Raises
    InputError for a missing checkpoint and for a reward model."""
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
    left_out = {*base.schema.with_fact(LAYOUT), "cluster.ray_address"}
    values = [value for value in stored_values(stored["config"]) if value.key not in left_out]
    resolved = from_sources([Source(values, shared=True), Source(base.given(), shared=True)], RolloutConfig)
    method = method_class(resolved.config.run.algorithm)
    if method is not None and issubclass(method, ScalarHead):
        raise InputError(
            f"--run-dir {directory} holds a reward model, which scores texts and writes none.",
            f"Export it (rlctl convert megatron-to-hf {directory} DIR), and score with --reward model:DIR.",
        )
    return resolved, matching[-1]
