"""Where converted models are kept, so that every node finds them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

NAMED = ("RLCTL_MEGATRON_CHECKPOINT_DIR", "NRL_MEGATRON_CHECKPOINT_DIR")
"""Variables by which users say where converted models belong."""


def named_directory(environment: Mapping[str, str] | None = None) -> Path | None:
    """Folder `rlctl` in the directory that the first set variable of NAMED names."""
    environment = os.environ if environment is None else environment
    return next((Path(environment[name]).expanduser() / "rlctl" for name in NAMED if environment.get(name)), None)


def converted_directory(environment: Mapping[str, str] | None = None) -> Path:
    """The `named_directory`, else folder `rlctl` in HF_HOME, else in ~/.cache/huggingface.

    rlctl writes only below its own folder, so the directory may be shared.
    """
    environment = os.environ if environment is None else environment
    cache = environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return named_directory(environment) or Path(cache).expanduser() / "rlctl"
