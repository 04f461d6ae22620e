"""What the driver, the policy's ranks and the engines tell each other in a refit. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlctl.backends.vllm.segment import SegmentAddress
from rlctl.models.facts import ModelFacts
from rlctl.telemetry.phases import RefitPhase
from rlctl.weights.layout import Layout, ParamSpec, Piece, whole
from rlctl.weights.plan import SingleWorld

if TYPE_CHECKING:
    from rlctl.weights.megatron import MegatronParallel


@dataclass(frozen=True)
class TableRow:
    """One published tensor in the staging memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """In bytes."""
    bytes: int


def staging_world(table: tuple[TableRow, ...]) -> SingleWorld:
    """The staging memory as a destination: each published tensor whole, under its own name."""
    params = {row.name: ParamSpec(row.shape, row.dtype, buffer="staging", offset_bytes=row.offset) for row in table}
    pieces = tuple(
        Piece(row.name, whole(row.shape), row.name, whole(row.shape), tuple(range(len(row.shape)))) for row in table
    )
    return SingleWorld(Layout(0, params, pieces))


@dataclass(frozen=True)
class SourceSetup:
    """What a policy rank needs to know once."""

    facts: ModelFacts
    parallel: MegatronParallel
    dtype: str
    table: tuple[TableRow, ...]
    address: SegmentAddress | None


@dataclass(frozen=True)
class RefitReport:
    """A finished refit."""

    version: int
    seconds: dict[RefitPhase, float]
    bytes: int
    """Payload: one full copy of the weights."""
    staging_bytes: int
    """Most memory that held weights between the two sides."""
    verified: int = 0
    """Tensors compared element by element (by fingerprint) at the source and inside every engine; 0: not this time."""
    verify_s: float = 0.0
    """Seconds of that comparison, not part of `seconds`."""
    mover: str = "shared-memory"
    receive: str = "loader"
    reasons: dict[str, str] = field(default_factory=dict)
    """Why tensors took the path they took, by path."""

    @property
    def gb_per_s(self) -> float:
        return self.bytes / 1e9 / max(sum(self.seconds.values()), 1e-9)
