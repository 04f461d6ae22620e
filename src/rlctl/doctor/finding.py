"""One line of `rlctl doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

GIB = 1024**3
Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding. `fail`: a run cannot work. `warn`: it loses speed or a feature."""

    name: str
    status: Status
    detail: str
    fix: str | None = None
    repair: Callable[[], str] | None = field(default=None, compare=False)
    """The safe repair of `--fix`, if any; returns a description and may raise OSError."""

    def to_json(self) -> dict[str, str | None]:
        return {"name": self.name, "status": self.status, "detail": self.detail, "fix": self.fix}


def gib(count: float) -> str:
    """Format bytes as `12.3 GiB`."""
    return f"{count / GIB:.1f} GiB"
