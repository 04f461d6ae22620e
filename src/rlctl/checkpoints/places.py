"""Where converted models are kept, so that every node finds them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def converted_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Folder `rlctl` in the first set of RLCTL_MEGATRON_CHECKPOINT_DIR, NRL_MEGATRON_CHECKPOINT_DIR and HF_HOME.

    In ~/.cache/huggingface where none is set. rlctl writes only below its own folder, so the directory may be shared.
    """
    environment = os.environ if environment is None else environment
    for name in ("RLCTL_MEGATRON_CHECKPOINT_DIR", "NRL_MEGATRON_CHECKPOINT_DIR", "HF_HOME"):
        if environment.get(name):
            return Path(environment[name]).expanduser() / "rlctl"
    return Path.home() / ".cache" / "huggingface" / "rlctl"
