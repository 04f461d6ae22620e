"""The files of a Hugging Face directory other than its weights: configuration, tokenizer and chat template."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlctl.errors import InputError
from rlctl.models.quantized_base import quantized_base, refuse_unread

NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of the tokenizer's additional chat templates."""
TEMPLATES = ("chat_template*", f"{NAMED_TEMPLATES}/*.jinja")
TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "bpe.codes", "dict.txt",
    "emoji.json", "normalizer.json", "tekken.json", "*.model", "*.spm", "*.tiktoken", *TEMPLATES,
)  # fmt: skip
"""Files of tokenizer and chat templates."""
COMPANIONS = (
    "config.json", "generation_config.json", *TOKENIZER, "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "*.py",
)  # fmt: skip
WEIGHTS = (
    "*.safetensors", "consolidated*", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack",
    "*.onnx",
)  # fmt: skip
"""Weights in any format: some repositories carry copies next to the published ones."""
log = logging.getLogger(__name__)
GENERATION_CONFIG = "generation_config.json"
ADAPTERS = "adapter_config.json"
"""PEFT's configuration, which replaces config.json in a directory of adapters."""
LFS_POINTER = b"version https://git-lfs"
"""First bytes of a Git LFS pointer, which replaces a file that was not fetched."""


def is_lfs_pointer(file: Path) -> bool:
    """Return whether a file is a Git LFS pointer."""
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(len(LFS_POINTER)) == LFS_POINTER
    return False


def read_config(directory: Path) -> dict[str, Any]:
    """Return `config.json`. Raises InputError if missing or damaged, or if the directory holds only adapters."""
    if not (directory / "config.json").exists():
        refuse_adapters(directory)
    return read_object(directory, "config.json", "Name a Hugging Face model directory.")


def refuse_adapters(directory: Path) -> None:
    """Raise InputError, with the base model, where a directory holds PEFT adapters and no model."""
    weights = {path.name for path in directory.glob("*.safetensors")}
    if not (directory / ADAPTERS).is_file() or weights - {"adapter_model.safetensors"}:
        return
    base = read_object(directory, ADAPTERS).get("base_model_name_or_path")
    of = f"adapters of {base}" if base else f"adapters, and {ADAPTERS} does not name their base"
    merge = f"merge the adapters into it (`rlctl convert merge-adapters {directory} DST --onto BASE`) and name DST"
    raise InputError(f"{directory} holds PEFT {of}, and no model.", f"Name the base model, or {merge}.")


def read_object(directory: Path, file: str, hint: str | None = None) -> dict[str, Any]:
    """Return the JSON object in `directory/file`. Raises InputError with `hint` if missing."""
    try:
        value = json.loads((directory / file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{directory} has no {file}.", hint) from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{directory / file} cannot be read as JSON: {error}.", "Download the file again.") from error
    if not isinstance(value, dict):
        raise InputError(f"{directory / file} does not hold a JSON object.", "Download the file again.")
    return value


def read_generation(directory: Path) -> dict[str, Any]:
    """Return `generation_config.json`, empty if missing or unreadable: transformers 5.19 and vLLM 0.32 then continue
    without it, and some published files are invalid JSON (Mistral-Small-3.2's ends in a comma)."""
    if not (directory / GENERATION_CONFIG).is_file():
        return {}
    try:
        return read_object(directory, GENERATION_CONFIG)
    except InputError as error:
        log.warning("%s It is left out, as in transformers.", error.message)
        return {}


PACKED = (".qweight", ".weight_packed", ".absmax")
"""How names of packed weights end."""


def refuse_quantized(directory: Path, tensors: Iterable[str] = (), *, planned: bool = False) -> None:
    """Raise InputError for quantization that is not read, by `config.json` or tensor names. Without `tensors` it works
    before weights are fetched; `planned` allows formats that are only planned."""
    try:
        base = quantized_base(read_config(directory))
        if base is not None and not planned:
            refuse_unread(base)
    except InputError as error:
        raise InputError(f"{directory}: {error.message[0].lower()}{error.message[1:]}", error.hint) from error
    packed = next((name for name in tensors if name.endswith(PACKED)), None)
    if base is None and packed is not None:
        reason = f"{directory}: config.json names no quantization, and tensor {packed} is quantized."
        raise InputError(reason, "Use a model that is not quantized, or download config.json again.")


def copy_matching(source: Path, destination: Path, patterns: Iterable[str]) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    for path in (path for pattern in patterns for path in source.glob(pattern) if path.is_file()):
        copy = destination / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def remove_matching(directory: Path, patterns: Iterable[str]) -> None:
    for path in [path for pattern in patterns for path in directory.glob(pattern) if path.is_file()]:
        path.unlink()


def copy_companions(source: Path, destination: Path, drop_from_config: tuple[str, ...] = (), **config: Any) -> None:
    """Copy configuration, tokenizer and chat template. `config` replaces values of config.json; `drop_from_config`
    removes keys."""
    copy_matching(source, destination, COMPANIONS)
    values = {k: v for k, v in read_config(destination).items() if k not in drop_from_config} | config
    (destination / "config.json").write_text(json.dumps(values, indent=2) + "\n")
