"""What one line of `rlctl doctor` says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

GIB = 1024**3


@dataclass(frozen=True)
class Check:
    """One finding: `fail` is something needed that is not fit, `warn` something that costs speed or a feature."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return asdict(self)


def gib(count: float) -> str:
    """Bytes in words: `12.3 GiB`."""
    return f"{count / GIB:.1f} GiB"
