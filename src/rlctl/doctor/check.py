"""What one line of `rlctl doctor` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

GIB = 1024**3


@dataclass(frozen=True)
class Check:
    """One finding: `fail` is something needed that is not fit, `warn` something that costs speed or a feature."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str | None = None
    repair: Callable[[], str] | None = field(default=None, compare=False)
    """What `--fix` does about it, where that is safe; says what it did. Raises OSError where it cannot."""

    def to_json(self) -> dict[str, str | None]:
        return {"name": self.name, "status": self.status, "detail": self.detail, "fix": self.fix}


def gib(count: float) -> str:
    """Bytes in words: `12.3 GiB`."""
    return f"{count / GIB:.1f} GiB"
