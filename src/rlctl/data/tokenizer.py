"""Loading the tokenizer, and the tokens that end a completion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.config.paths import user_path
from rlctl.config.schema import ModelConfig
from rlctl.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model_directory: Path | str, model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer` (a directory or a hub name), or else of the model's directory.

    Raises InputError where there is none that transformers can load.
    """
    # transformers takes seconds to import, and only runs need it
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    name = model.tokenizer or str(model_directory)
    origin = f"--tokenizer {name}" if model.tokenizer else f"The model directory {name}"
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=model.trust_remote_code)
    except StrictDataclassError as error:  # it reads the model's configuration for the tokenizer's class
        raise InputError(
            f"{origin}: transformers refuses its config.json: {str(error).strip().splitlines()[-1].strip()}",
            "Take the model's own file.",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError) as error:
        # what transformers raises for files missing or damaged, unknown classes, untrusted code, a hub out of reach
        first = str(error).strip().splitlines()[:1]
        raise InputError(
            f"{origin} has no tokenizer that can be loaded: {first[0] if first else type(error).__name__}",
            "Give a directory with tokenizer.json, or a hub name, with --tokenizer.",
        ) from error


def require_directory(tokenizer: str | None) -> None:
    """Raises InputError where `model.tokenizer` is a path and nothing is there; a hub name is tried at loading."""
    if tokenizer and tokenizer.startswith(("/", ".", "~")) and not user_path(tokenizer).is_dir():
        raise InputError(f"--tokenizer {tokenizer}: there is no such directory.", "Give one with tokenizer.json.")


def end_token_ids(tokenizer: PreTrainedTokenizerBase, model_directory: Path | str) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's own, and those of the model's generation_config.json; sorted."""
    ids = {tokenizer.eos_token_id}
    path = Path(model_directory) / "generation_config.json"
    if path.is_file():
        try:
            listed = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, RecursionError, AttributeError) as error:
            raise InputError(f"{path} is no JSON object: {error}.", "Take the model's own file.") from error
        found = listed if isinstance(listed, list) else [listed]
        if any(token is not None and type(token) is not int for token in found):
            raise InputError(f"{path}: `eos_token_id` is {listed!r}; expected token ids.", "Take the model's own file.")
        ids |= set(found)
    return tuple(sorted(token for token in ids if token is not None))
