"""Parts of messages: near matches of names that are not there, and what an error of a library says."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def suggest(word: str, known: Iterable[str]) -> str | None:
    """Return `Did you mean ...?` for the nearest of `known`, or None when none is near."""
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.55)
    return f"Did you mean {' or '.join(near)}?" if near else None


def suggest_file(path: Path, suffixes: Iterable[str]) -> str | None:
    """Return `Did you mean ...?` for files next to `path` with a like name; the suffix counts for nothing."""
    if not path.parent.is_dir():
        return None
    siblings = {entry.stem: entry.name for entry in sorted(path.parent.iterdir()) if entry.suffix.lower() in suffixes}
    near = difflib.get_close_matches(path.stem, siblings, n=3, cutoff=0.55)
    return f"Did you mean {' or '.join(siblings[stem] for stem in near)}?" if near else None


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
