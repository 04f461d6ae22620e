"""Opening what `data.name` names: a reasoning-gym task, a JSONL or parquet file, a Hugging Face dataset."""

from __future__ import annotations

from pathlib import Path

from rlctl.config.schema import DataConfig
from rlctl.data.files import open_jsonl, open_parquet
from rlctl.data.gym import open_gym
from rlctl.data.hub import open_hub
from rlctl.data.names import suggest_file
from rlctl.data.rows import GYM_PREFIX, PromptSource
from rlctl.errors import InputError

FILE_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


def open_prompts(data: DataConfig, seed: int = 0) -> PromptSource:
    """The source that `data.name` names; reads and checks it, without a download except by Hugging Face datasets.

    `seed` makes the questions of a reasoning-gym task that is given no seed of its own. Raises InputError for a source
    that does not exist, has no rows, or lacks a field.
    """
    name = data.name
    if not name:
        raise InputError("No data: data.name is not set.", "Give --data, for example reasoning-gym:chain_sum.")
    if name.startswith(GYM_PREFIX):
        return open_gym(name, data, seed)
    if data.params:
        raise InputError(
            f"data.params ({', '.join(data.params)}) belong to a reasoning-gym task, but data.name is {name!r}.",
            "Remove them, or clear those of a preset with --set data.params={}.",
        )
    suffix = Path(name).suffix.lower()
    if suffix in FILE_SUFFIXES:
        path = existing_file(name)
        return open_jsonl(path, data) if FILE_SUFFIXES[suffix] == "jsonl" else open_parquet(path, data)
    if Path(name).is_file():
        raise InputError(f"{name}: unknown kind of data file.", f"Known are {', '.join(FILE_SUFFIXES)}.")
    return open_hub(name, data)


def existing_file(name: str) -> Path:
    """The path, if it is a file; InputError with near matches in its folder otherwise."""
    path = Path(name)
    if path.is_file():
        return path
    if not path.parent.is_dir():
        raise InputError(f"Data file {name} does not exist: there is no folder {path.parent}.", "Check the path.")
    raise InputError(f"Data file {name} does not exist.", suggest_file(path, FILE_SUFFIXES) or "Check the path.")
