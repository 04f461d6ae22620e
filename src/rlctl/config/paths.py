"""Paths as users write them, in flags, configuration and environment."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(name: str | os.PathLike[str]) -> Path:
    """`name` with `~` and `~user` for home directories; left as it is where the user is unknown or has no home.

    `Path.expanduser` raises a RuntimeError there, which says nothing to whoever wrote the path: as it is, the path does
    not exist, and that is what every reader of one reports by the user's own word.
    """
    return Path(os.path.expanduser(name))
