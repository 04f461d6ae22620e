"""What an imported NeMo-RL recipe becomes, and the form of the rules that make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["mapped", "not applicable", "changed", "not yet"]
"""`changed`: runs, but not exactly as written; `not yet`: rlctl cannot run it."""


@dataclass(frozen=True)
class Entry:
    """What became of one key of the recipe."""

    key: str
    value: Any
    status: Status
    note: str
    """The rlctl key, or the reason."""


@dataclass
class Import:
    """A recipe in rlctl's words. `values` by dotted key."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    source: dict[str, str] = field(default_factory=dict)
    """The recipe's key of each value."""

    @property
    def unsupported(self) -> list[str]:
        """What rlctl cannot run yet, a line each."""
        return [f"{entry.key} = {entry.value}: {entry.note}" for entry in self.entries if entry.status == "not yet"]

    @property
    def changed(self) -> list[str]:
        """What runs, but not exactly as written."""
        return [f"{entry.key} = {entry.value}: {entry.note}" for entry in self.entries if entry.status == "changed"]

    def set(self, key: str, value: Any, source: str) -> None:
        self.values[key], self.source[key] = value, source


Rule = Callable[[Import, str, Any, Mapping[str, Any]], None]
"""Called with what has been imported so far, a key of the recipe, its value, and all leaves of the recipe."""
