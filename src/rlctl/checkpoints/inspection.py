"""Looking at a checkpoint without loading it: format, family, size, and problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TypeVar

from rlctl.checkpoints.conversion import record
from rlctl.checkpoints.hf.hf_files import read_config
from rlctl.checkpoints.hf.hf_model import SCALE, open_hf_model
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory
from rlctl.checkpoints.hf.text_config import has_text_part, text_config
from rlctl.checkpoints.hf.text_part import TextPart
from rlctl.checkpoints.megatron.lora_weights import adapter_keys
from rlctl.checkpoints.megatron.megatron_directory import RELEASE, MegatronDirectory, base_of, find
from rlctl.checkpoints.megatron.megatron_model import MODEL_PREFIXES, are_of_modules, open_megatron_model
from rlctl.errors import InputError
from rlctl.models.families import weights_of

_T = TypeVar("_T")


@dataclass
class Inspection:
    """The answer of `rlctl convert inspect`."""

    path: str
    format: str
    family: str | None = None
    parameters: int = 0
    """Elements of the model's weights."""
    dtype: str | None = None
    bytes: int = 0
    """Size of the model's weights, without an optimizer."""
    iteration: int | None = None
    parallelism_agnostic: bool = False
    """Loads under any parallel sizes."""
    optimizer: bool = False
    adapters: bool = False
    """Only adapters (`training.lora`); `parameters` counts them."""
    text_part: str | None = None
    """The architecture of the text part, where the model takes images or sound as well."""
    problems: list[str] = field(default_factory=list)


def inspect(path: Path) -> Inspection:
    """Inspect a Hugging Face directory, a Megatron checkpoint or a run. Raises InputError for anything else."""
    if not path.exists():
        raise InputError(f"{path} does not exist.")
    checkpoint = find(path) if path.is_dir() else None
    if checkpoint is not None:
        return _inspect_megatron(path, checkpoint)
    if not (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        hint = "Known: a Hugging Face directory, a Megatron torch_dist checkpoint, a run of rlctl."
        raise InputError(f"{path} is not a checkpoint of a known format.", hint)
    result = Inspection(str(path), "huggingface", parallelism_agnostic=True)
    files = _noting(result, lambda: SafetensorsDirectory.open(path))
    if files is not None:
        weights = [tensor for name, tensor in files.tensors.items() if not name.endswith(SCALE)]
        result.parameters = sum(prod(tensor.shape) for tensor in weights)
        result.bytes, result.dtype = files.bytes, next(iter(files.dtypes), None)
    config = _noting(result, lambda: read_config(path))
    if config is not None and has_text_part(path):
        result.text_part = (_noting(result, lambda: text_config(path)) or {}).get("architectures", [None])[0]
        if result.text_part and files is not None:
            _noting(result, lambda: TextPart.open(path))
    elif config is not None:
        facts = _noting(result, lambda: facts_in(path))
        result.family = facts.family if facts else None
        if facts and files is not None:
            _noting(result, lambda: open_hf_model(path, facts))
    return result


def _inspect_megatron(path: Path, checkpoint: MegatronDirectory) -> Inspection:
    from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader

    result = Inspection(str(path), "megatron torch_dist", iteration=checkpoint.iteration, parallelism_agnostic=True)
    reader = _noting(result, lambda: TorchDistReader.open(checkpoint.shards))
    if reader is None:
        return result
    prefixes = MODEL_PREFIXES
    if are_of_modules(reader.shapes):
        result.format = "dtensor torch_dist"
        prefixes = tuple(
            {*prefixes, *(f"{key.partition('.')[0]}." for key in reader.shapes if not key.startswith("optimizer."))}
        )
    made = record.read(checkpoint.root) if checkpoint.shards == checkpoint.root / RELEASE else None
    if made and (problem := record.damage(checkpoint.root, made, f"{RELEASE}/")):
        result.problems.append(f"changed since its conversion: {problem}")
    model = {key: spec for key, spec in reader.shapes.items() if key.startswith(prefixes)}
    result.adapters = bool(adapter_keys(reader.shapes))
    result.parameters = sum(spec.size for spec in model.values())
    result.bytes = sum(spec.bytes for spec in model.values())
    result.dtype = max((s.dtype for s in model.values()), key=[s.dtype for s in model.values()].count, default=None)
    result.optimizer = any(key.startswith(("optimizer.", "chained_")) for key in reader.shapes)
    companions = checkpoint.huggingface()
    if companions is None:
        result.problems.append("no config.json next to it: `megatron-to-hf` needs --config-from")
        return result
    facts = _noting(result, lambda: facts_in(companions))
    if facts is not None:
        result.family = facts.family
        if result.adapters:
            _noting(result, lambda: base_of(checkpoint))
            return result
        opened = _noting(result, lambda: open_megatron_model(checkpoint, facts))
        if opened is not None:  # without padding rows and second spellings of norms
            result.parameters = weights_of(opened.facts).parameters
    return result


def _noting(result: Inspection, make: Callable[[], _T]) -> _T | None:
    try:
        return make()
    except InputError as error:
        result.problems.append(error.message)
        return None
