"""What the driver, the policy's ranks and the engines tell each other in a refit. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlctl.backends.vllm.channel import Connection
from rlctl.backends.vllm.segment import SegmentAddress
from rlctl.models.facts import ModelFacts
from rlctl.telemetry.phases import RefitPhase
from rlctl.weights.layout import ITEM_BYTES, Layout

if TYPE_CHECKING:
    from rlctl.weights.megatron import MegatronParallel


@dataclass(frozen=True)
class TableRow:
    """One published tensor, as the engines compute with it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        size = ITEM_BYTES[self.dtype]
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class SourcePlace:
    """Where a policy rank runs."""

    name: str
    node: str
    device: str
    address: str
    """Network address of its node."""


@dataclass(frozen=True)
class Channel:
    """One stream of rounds: engine workers that need the same bytes and can read them from the same place."""

    index: int
    layout: Layout
    node: str
    """Where its staging memory is; for movers that have none to share, where its first receiver is."""
    device: str
    senders: tuple[int, ...]
    """Policy ranks that write into it."""
    connection: Connection


@dataclass(frozen=True)
class SourceSetup:
    """What a policy rank needs to know once."""

    facts: ModelFacts
    parallel: MegatronParallel
    table: tuple[TableRow, ...]
    places: tuple[SourcePlace, ...] = ()
    """Of all policy ranks."""
    channels: tuple[Channel, ...] = ()
    sparse: bool = False
    """Keep what was sent, to send changed elements alone."""


@dataclass(frozen=True)
class Made:
    """What one policy rank made before the session opens."""

    addresses: dict[int, SegmentAddress]
    """Staging memory, by channel."""
    handles: dict[int, tuple[tuple, ...]] = field(default_factory=dict)
    """Of staging buffers on a device, by channel."""
    store_port: int | None = None
    """Port of the store at which a collective group meets."""


@dataclass(frozen=True)
class Opened:
    """What a policy rank sets up."""

    rank: int
    copies: int
    """Strided copies that it makes in a refit."""
    problems: tuple[str, ...] = ()
    """What keeps a channel's plan from writing every element exactly once."""


@dataclass(frozen=True)
class Sent:
    """What one policy rank did in one refit."""

    rank: int
    seconds: float
    packing_s: float
    """Seconds of copying."""
    bytes: int
    exchanged: int = 0
    """Bytes sent to ranks of other nodes, which handed them over."""
    exchange_s: float = 0.0
    """Seconds in which it waited for boxes of other nodes, or for them to be gone."""


@dataclass(frozen=True)
class Share:
    """Tensors that take one receive path for one reason."""

    path: str
    reason: str
    tensors: int
    bytes: int
    """Of the published tensors, once."""

    def __str__(self) -> str:
        way = "written directly" if self.path == "direct" else "through vLLM's loader"
        noun = "tensor" if self.tensors == 1 else "tensors"
        return f"{self.tensors} {noun} ({self.bytes / 1e6:.1f} MB) {way}: {self.reason}"


@dataclass(frozen=True)
class RefitReport:
    """A finished refit."""

    version: int
    seconds: dict[RefitPhase, float]
    bytes: int
    """Payload: one full copy of the weights."""
    staging_bytes: int
    """Most memory that held weights between the two sides, on one node."""
    verified: int = 0
    """Tensors compared element by element (by fingerprint) at the source and inside every engine; 0: not this time."""
    unread: int = 0
    """Tensors that an engine holds in a form that cannot be read back, and which were not compared therefore."""
    verify_s: float = 0.0
    """Seconds of that comparison, not part of `seconds`."""
    mover: str = "shared-memory"
    receive: str = "loader"
    """`direct`, `loader`, or `mixed`."""
    shares: tuple[Share, ...] = ()
    """The tensors by receive path, and why they took it."""
    sparse: str | None = None
    """With `refit.sparse`: what was sent, or why everything was."""
    sent_bytes: int = 0
    """Bytes that policy ranks wrote, all receivers together."""
    packing_s: float = 0.0
    """Seconds in which the busiest policy rank copied; partly while engines loaded."""

    @property
    def gb_per_s(self) -> float:
        return self.bytes / 1e9 / max(sum(self.seconds.values()), 1e-9)


__all__ = [
    "Channel", "Made", "Opened", "RefitReport", "SegmentAddress", "Sent", "SourcePlace", "SourceSetup", "TableRow",
]  # fmt: skip


@dataclass(frozen=True)
class Changes:
    """What one rank would send for one channel of a sparse refit."""

    channel: int
    elements: int
    changed: int
    sizes: tuple[int, ...]
    """Bytes of each round."""

    @property
    def bytes(self) -> int:
        return sum(self.sizes)
