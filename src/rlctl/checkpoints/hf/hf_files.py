"""The files of a Hugging Face directory other than its weights: configuration, tokenizer and chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rlctl.config.files import problem_with
from rlctl.errors import InputError

COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "*.model", "*.tiktoken", "chat_template*", "preprocessor_config.json", "*.py",
)  # fmt: skip


def read_config(directory: Path) -> dict[str, Any]:
    """Return what `config.json` says. Raises InputError where there is none, or one that is damaged."""
    return read_object(directory, "config.json", "Name a Hugging Face model directory.")


def read_object(directory: Path, file: str, hint: str | None = None) -> dict[str, Any]:
    """The JSON object in `directory/file`. Raises InputError where there is none; `hint`: what to do then."""
    if (directory / file).exists() and (problem := problem_with(directory / file)):
        raise InputError(f"{directory / file} cannot be read: {problem}.", hint)
    try:
        value = json.loads((directory / file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{directory} has no {file}.", hint) from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{directory / file} cannot be read as JSON: {error}.", "Download the file again.") from error
    if not isinstance(value, dict):
        raise InputError(f"{directory / file} does not hold a JSON object.", "Download the file again.")
    return value


READ_QUANTISED = ("fp8", "mxfp4")
"""Quantisers (`quant_method`) whose weights are read through their scales, as `hf_model.py` does."""


def refuse_quantised(directory: Path) -> None:
    """Raise InputError where `config.json` names a quantiser whose weights are not read. No weights are looked at, so
    that this is known before they are fetched."""
    quantised = read_config(directory).get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if method is not None and method not in READ_QUANTISED:
        raise InputError(
            f"{directory}: its weights are quantised ({method}), and not read.", "Use the model's unquantised weights."
        )


def copy_companions(source: Path, destination: Path, drop_from_config: tuple[str, ...] = (), **config: Any) -> None:
    """Copy configuration, generation configuration, tokenizer and chat template.

    `config` values replace those of config.json, and the keys in `drop_from_config` are taken out of it.
    """
    destination.mkdir(parents=True, exist_ok=True)
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, destination / path.name)
    values = {k: v for k, v in read_config(destination).items() if k not in drop_from_config} | config
    (destination / "config.json").write_text(json.dumps(values, indent=2) + "\n")
