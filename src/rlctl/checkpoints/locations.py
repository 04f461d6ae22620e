"""Model storage: conversions where every node finds them, downloads in rlctl's cache."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rlctl.config.files import lock_file, user_path

NAMED = ("RLCTL_MEGATRON_CHECKPOINT_DIR", "NRL_MEGATRON_CHECKPOINT_DIR")
"""Variables that name the directory of converted models."""


def named_directory() -> Path | None:
    """Folder `rlctl` in the directory that the first set variable of NAMED names."""
    variable = next((os.environ[name] for name in NAMED if os.environ.get(name)), None)
    return None if variable is None else user_path(variable) / "rlctl"


def hub_directory() -> Path:
    """HF_HOME, else ~/.cache/huggingface: the Hugging Face libraries' directory, with the hub's models below it."""
    return user_path(os.environ.get("HF_HOME") or "~/.cache/huggingface")


def converted_directory() -> Path:
    """Return the `named_directory`, else folder `rlctl` in the `hub_directory`. rlctl writes only below its folder."""
    return named_directory() or hub_directory() / "rlctl"


def foreign_conversion(name: str) -> Path | None:
    """Return another trainer's conversion of `name`, below NRL_MEGATRON_CHECKPOINT_DIR or its default in the
    `hub_directory`."""
    variable = os.environ.get(NAMED[1])
    folder = user_path(variable) if variable and variable.strip() else hub_directory() / "nemo_rl"
    place = folder / (f"model_{name.replace('/', '_')}" if os.path.exists(name) else name)
    return place if (place / "iter_0000000").is_dir() else None


def nearest_existing(directory: Path) -> Path:
    directory = user_path(directory).absolute()
    return next(place for place in (directory, *directory.parents) if os.path.exists(place))  # False: not to be seen


def write_problem(place: Path) -> str | None:
    """Return why a file cannot be written and locked in `place`, tested with a real file; None: it can."""
    if not place.is_dir():
        return f"{place} is not a directory"
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            lock_file(file)
            file.write(b"rlctl")
            file.flush()
    except OSError as error:
        return f"no file can be written in {place} ({error.strerror})"
    return None
