"""Megatron checkpoint directories: shards, iteration and configuration. Imports no torch.

Supports Megatron-LM and Megatron-Bridge (`latest_checkpointed_iteration.txt` next to `release/` or `iter_0000100/`),
one iteration, a bare torch_dist directory, and rlctl's runs (`checkpoints/step_N/policy`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlctl.checkpoints.identity import model_fingerprint
from rlctl.errors import InputError
from rlctl.settings.training import Rounding

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Folder of the shards of a checkpoint that was converted and not trained."""
HF_FOLDER = "huggingface"
"""The folder of configuration and tokenizer next to the shards."""


RUN_TOKENIZER = "tokenizer"
"""The folder of a run's tokenizer and chat template, where they are not its base model's."""


@dataclass(frozen=True)
class MegatronDirectory:
    """A checkpoint on disk."""

    root: Path
    shards: Path
    iteration: int | None
    """None: a release, that is, converted and not trained."""

    def huggingface(self) -> Path | None:
        """Return the directory with `config.json`: next to or above the shards, or the run's base model."""
        for base in (self.shards, *self.shards.parents[:4]):
            for candidate in (base / HF_FOLDER, base / "tokenizer", base / "hf_metadata", base):
                if (candidate / "config.json").is_file():
                    return candidate
        try:
            directory = Path(manifest_of(self)["model"]["directory"])
        except (InputError, KeyError):
            return None
        return directory if (directory / "config.json").is_file() else None


def manifest_of(directory: MegatronDirectory) -> dict[str, Any]:
    """Return the manifest of the run that saved a checkpoint (RUN/checkpoints/step_N/policy). Raises InputError if
    unreadable."""
    path = Path(directory.shards.absolute(), "../../../manifest.json").resolve()
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{directory.shards} holds a part of a model, but {path}, which names the model, cannot be read.",
            "Name the run, or a checkpoint inside of it.",
        ) from error


def find(path: Path) -> MegatronDirectory | None:
    """Return the Megatron checkpoint at `path` (its latest iteration), or None."""
    if (path / "metadata.json").is_file() and (path / ".metadata").is_file():
        return MegatronDirectory(path, path, _iteration_of(path.name))
    if (path / LATEST).is_file():
        text = (path / LATEST).read_text(errors="replace").strip()[:40]
        name = RELEASE if text == RELEASE else f"iter_{int(text):07d}" if text.isdecimal() else None
        if name is None:
            raise InputError(f"{path / LATEST} says `{text}`; expected `release` or a number.")
        if not (path / name).is_dir():
            raise InputError(f"{path / LATEST} names {name}, which is missing.", "Copy the checkpoint again.")
        return MegatronDirectory(path, path / name, None if name == RELEASE else int(text))
    for shards in (
        path / "policy",
        *sorted(path.glob("checkpoints/step_*/policy"), key=lambda folder: _iteration_of(folder.parent.name) or 0)[
            ::-1
        ],
    ):
        if (shards / "metadata.json").is_file():
            return MegatronDirectory(path, shards, _iteration_of(shards.parent.name) or 0)
    return None


def _iteration_of(name: str) -> int | None:
    digits = name.removeprefix("iter_").removeprefix("step_")
    return int(digits) if digits.isdigit() else None


class Named(Protocol):
    """A model that the user names as a run's base (`ModelFiles`)."""

    @property
    def directory(self) -> Path: ...
    @property
    def weights(self) -> Path: ...
    @property
    def origin(self) -> Path | None: ...
    def fingerprint(self) -> str: ...
    def own_fingerprint(self) -> str: ...


@dataclass(frozen=True)
class Base:
    """A model directory as a run's manifest names it."""

    directory: Path
    """With configuration and tokenizer."""
    weights: Path
    """A Hugging Face directory, or the shards of a Megatron checkpoint."""
    config: dict[str, Any]
    """The run's configuration: by key, its value and origin."""
    origin: Path | None = None
    """Source of a derived base: the multimodal model of a text part, or the checkpoint of merged adapters."""

    @property
    def megatron(self) -> MegatronDirectory | None:
        """The Megatron checkpoint with the weights; None: they are safetensors."""
        return find(self.weights) if self.weights != self.directory else None


def is_of_run(directory: MegatronDirectory) -> bool:
    """Whether a checkpoint is one that a run saved: RUN/checkpoints/step_N/policy."""
    return directory.shards.name == "policy"


def computed_in(directory: MegatronDirectory) -> tuple[str | None, Rounding]:
    """The dtype that the run of a checkpoint computed in (None: no manifest says), and how it rounded to it."""
    try:
        manifest = manifest_of(directory)
        config, precision = manifest["config"], manifest["plan"]["training"]["precision"]
        dtype = config["model.dtype"]["value"]
        rounding: Rounding = config.get("optimizer.rounding", {"value": "nearest"})["value"]
    except (InputError, KeyError):
        return None, "unbiased"
    planned = "float32" if precision == "float32" else "bfloat16"
    return planned if dtype == "auto" else dtype, rounding


def base_of(checkpoint: MegatronDirectory, source: Named | None = None) -> Base:
    """Return the base model of a checkpoint's run; `named`: its current place. Raises InputError if the manifest is
    unreadable or the model missing or different."""
    stored = manifest_of(checkpoint)
    model, config = stored["model"], stored["config"]
    directory = source.directory if source else Path(model["directory"])
    weights = source.weights if source else Path(model.get("weights", directory))
    hint = "Name the model that the run began with, wherever it is now, with --config-from."
    if not (directory / "config.json").is_file() or not weights.is_dir():
        raise InputError(
            f"The model that the run of {checkpoint.shards} began with is not at {weights} any more.", hint
        )
    # A text part, or a model with merged adapters, is recognized by its source or its files.
    prints = {source.fingerprint(), source.own_fingerprint()} if source else {model_fingerprint(directory, weights)}
    if not prints & {model.get("fingerprint"), model.get("own_fingerprint")}:
        raise InputError(f"{weights} is not the model that the run of {checkpoint.shards} began with.", hint)
    origin = (source.origin if source else None) or (Path(model["origin"]) if model.get("origin") else None)
    return Base(directory, weights, config, origin)
