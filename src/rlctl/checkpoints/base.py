"""The model that a run began with: where the rest of what its checkpoints hold in part is found."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.checkpoints.identity import model_fingerprint
from rlctl.checkpoints.megatron_directory import MegatronDirectory, find
from rlctl.errors import InputError


@dataclass(frozen=True)
class Base:
    """A model directory as a run's manifest names it."""

    directory: Path
    """With configuration and tokenizer."""
    weights: Path
    """A Hugging Face directory, or the shards of a Megatron checkpoint."""
    config: dict[str, Any]
    """The run's own configuration: by key, its value and where that is from."""

    @property
    def megatron(self) -> MegatronDirectory | None:
        """The Megatron checkpoint with the weights; None: they are safetensors."""
        return find(self.weights) if self.weights != self.directory else None


def is_of_run(found: MegatronDirectory) -> bool:
    """Whether a checkpoint is one that a run saved: RUN/checkpoints/step_N/policy."""
    return found.shards.name == "policy"


def base_of(found: MegatronDirectory, named: Path | None = None) -> Base:
    """The model that the run of a checkpoint began with; `named`: where it is now.

    Raises InputError where the run's manifest cannot be read, or the model is gone or another.
    """
    path = found.shards.absolute().parents[2] / "manifest.json"
    try:
        stored = json.loads(path.read_text())
        model, config = stored["model"], stored["config"]
        directory = named or Path(model["directory"])
        weights = directory if named else Path(model.get("weights", directory))
        fingerprint = model.get("fingerprint")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{found.shards} holds a part of a model, but {path}, which says of which, cannot be read.",
            "Name the run, or a checkpoint inside of it.",
        ) from error
    hint = "Name the model that the run began with, wherever it is now, with --config-from."
    if not (directory / "config.json").is_file() or not weights.is_dir():
        raise InputError(f"The model that the run of {found.shards} began with is not at {weights} any more.", hint)
    if model_fingerprint(directory, weights) != fingerprint:
        raise InputError(f"{weights} is not the model that the run of {found.shards} began with.", hint)
    return Base(directory, weights, config)
