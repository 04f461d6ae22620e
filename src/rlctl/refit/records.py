"""Records that the driver and the policy's ranks exchange in a refit, and its report. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from rlctl.telemetry.phases import RefitPhase
from rlctl.transport.rounds import Channel, SegmentAddress
from rlctl.weights.layout import ITEM_BYTES


class TableRow(NamedTuple):
    """One published tensor, as the engines compute with it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True)
class SenderPlace:
    """Where a policy rank runs."""

    name: str
    node: str
    device: str
    address: str
    """Network address of its node."""
    not_shared: str = ""
    """The reason why its GPU's memory cannot be shared with other processes; empty: it can."""


@dataclass(frozen=True)
class SenderSetup:
    """One-time setup of a policy rank."""

    table: tuple[TableRow, ...]
    places: tuple[SenderPlace, ...] = ()
    """All policy ranks."""
    channels: tuple[Channel, ...] = ()


@dataclass(frozen=True)
class Made:
    """Staging memory and store that one policy rank made before the session opens."""

    addresses: dict[int, SegmentAddress]
    """Staging memory, by channel."""
    handles: dict[int, tuple[tuple, ...]] = field(default_factory=dict)
    """Handles of staging buffers on a device, by channel."""
    store_port: int | None = None
    """Port of the store at which collective groups meet."""
    sends: frozenset[int] = frozenset()
    """In a process group: the channels that this rank sends on."""


@dataclass(frozen=True)
class Sent:
    """The part of one policy rank in one refit."""

    packing_s: float
    """Seconds of copying."""
    bytes: int
    """Bytes sent, with bytes to ranks that relay to the staging memory."""
    exchange_s: float = 0.0
    """Seconds of waiting for boxes of other ranks, or until they were gone."""


@dataclass(frozen=True)
class Share:
    """Tensors that take one receive path for one reason."""

    path: str
    reason: str
    tensors: int
    bytes: int
    """Bytes of the published tensors, each counted once."""

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
    """Tensors whose fingerprints were compared at the source and inside every engine; 0: none this time."""
    unread: int = 0
    """Tensors that were not compared, because an engine holds them in a form that cannot be read back."""
    unread_bytes: int = 0
    """Their bytes in the published tensors."""
    unread_why: str = ""
    """Why the first of them is unreadable."""
    compared_all: bool = False
    """They are all that can be compared, and not a sample."""
    decoding: float | None = None
    """Mean absolute log-prob difference of decoded tokens; None: not checked."""
    mover: str = ""
    receive: str = "loader"
    """`direct`, `loader`, or `mixed`."""
    shares: tuple[Share, ...] = ()
    """The tensors by receive path, and why they took it."""
    sparse: str | None = None
    """With `refit.sparse`: the share that has changed, or why everything was sent."""
    sent_bytes: int = 0
    """Bytes that policy ranks wrote, all receivers together."""
    packing_s: float = 0.0
    """Seconds of copying on the busiest policy rank; partly while engines loaded."""

    @property
    def gb_per_s(self) -> float:
        return self.bytes / 1e9 / max(sum(self.seconds.values()), 1e-9)
