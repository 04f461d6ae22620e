"""Paths as users write them, in flags, configuration and environment."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(name: str | os.PathLike[str]) -> Path:
    """Return `name` with `~` and `~user` expanded, or unchanged where the user is unknown or has no home.

    `Path.expanduser` raises a RuntimeError there. The unchanged path does not exist, which its reader reports in the
    user's own words.
    """
    return Path(os.path.expanduser(name))
