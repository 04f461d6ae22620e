"""The findings of a rehearsal, and their table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rlctl.errors import RlctlError
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.result import Plan
from rlctl.planner.views.render import wrapped
from rlctl.rehearsal.shrink import (
    ReplacedValue,
)

WIDEST = 36
"""Most columns of the names of parts in the table; a longer one stands out."""


@dataclass
class Rehearsal:
    """The findings of a rehearsal."""

    folder: str
    done: list[tuple[str, str]] = field(default_factory=list)
    """Parts that were rehearsed, and how."""
    stand_ins: list[tuple[str, str]] = field(default_factory=list)
    """Parts that a stand-in replaced."""
    shrunk: list[ReplacedValue] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Parts that could not be rehearsed, and why."""
    notices: list[str] = field(default_factory=list)
    """Problems of the run that raise no error."""
    error: RlctlError | None = None
    """The error that stopped the rehearsal; None: it finished."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the findings as plain data, without the error."""
        return {
            "rehearsed": dict(self.done),
            "stand_ins": dict(self.stand_ins),
            "shrunk": [asdict(change) for change in self.shrunk],
            "not_rehearsed": dict(self.left_out),
            "notices": self.notices,
            "seconds": round(self.seconds, 1),
        }

    def text(self) -> str:
        """Return the table, and the notices below it."""
        rows = [("rehearsed", subject, how) for subject, how in self.done]
        rows += [("stand-in", subject, how) for subject, how in self.stand_ins]
        rows += [("shrunk", value.key, f"{short(value.was)} -> {short(value.now)}") for value in self.shrunk]
        rows += [("not rehearsed", subject, reason) for subject, reason in self.left_out]
        width = min(WIDEST, max((len(subject) for _, subject, _ in rows), default=0))
        lines = [
            line
            for kind, subject, how in rows
            for line in wrapped(how, f"  {kind:<13}  {subject:<{width}}  ", " " * (width + 19))
        ]
        for notice in self.notices:
            lines += wrapped(notice, "  notice: ", "    ")
        ended = "stopped by an error" if self.error else "every part was rehearsed"
        return "\n".join([*lines, f"{ended} ({self.seconds:.0f} s)"])


def short(value: Any, most: int = 60) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= most else f"{text[:most]}..."


def not_rehearsed(plan: Plan) -> list[tuple[str, str]]:
    """Return the properties that a rehearsal on CPUs cannot test, with the plan's predictions."""
    if plan.cluster.is_cpu:
        return [("memory and speed", "a tiny model says nothing about the run's")]
    most = max(plan.memory.values(), key=lambda phase: phase.total).total / GIB
    gpus = f"{plan.cluster.gpus} x {plan.cluster.device.name.upper()}"
    return [
        ("kernels of GPUs", "all was computed on processors"),
        ("memory", f"planned are {most:.0f} GiB of a GPU ({gpus})"),
        ("speed", f"planned are {plan.total_s:.0f} s a step"),
        ("links between GPUs and nodes", "all processes were on this machine"),
    ]
