"""The shared memory transport: policy ranks write two staging buffers in /dev/shm that engine workers of their node
read."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rlctl.transport.facts import Places, Rates, Refusal
from rlctl.transport.movers import Receiver, Sender, Transport
from rlctl.transport.rounds import Channel, Connection, Lengths, Rounds

if TYPE_CHECKING:
    import torch

    from rlctl.transport.round_buffers import Packer
    from rlctl.transport.staging import Staging


class SharedMemory(Transport):
    """Memory of the host, for processors, and for GPUs whose memory processes cannot share (WSL2)."""

    name = "shared-memory"
    way = "Policy and engines share a node's memory."
    shares = "node"

    def suits(self, places: Places) -> bool:
        return not places.away if places.on_cpu else bool(places.barred) and not places.elsewhere

    def refusal(self, places: Places) -> Refusal | None:
        return Refusal(places.away, "Use auto or collective.") if places.away else None

    def remark(self, places: Places) -> str:
        return f"{places.barred}: refits go through shared memory of the host" if places.barred else ""

    def detour_s(self, size: float, rates: Rates) -> float:
        return 0.0 if math.isinf(rates.host) else 2 * size / rates.host

    def make_staging(self, channel: Channel, device: torch.device) -> Staging:
        from rlctl.transport.staging import host_staging

        return host_staging(channel)

    def sender(
        self, channel: Channel, rank: int, packer: Packer, *, staging: Staging | None, device: torch.device
    ) -> Sender:
        return SharedMemorySender(channel, rank, packer, staging=staging)

    def receiver(self, connection: Connection, rounds: Rounds, name: str, device: torch.device) -> Receiver:
        return SharedMemoryReceiver(connection, rounds, name)


class SharedMemorySender(Sender):
    """Writes one rank's part of the rounds where the receivers read it."""

    def __init__(self, channel: Channel, rank: int, packer: Packer, *, staging: Staging | None) -> None:
        from rlctl.transport.staging import ring_of

        segment, memory = (staging.segment, staging.buffers) if staging else (None, None)
        self.ring = ring_of(channel.connection, packer.rounds, channel.senders.index(rank), memory, segment)

    def begin(self, version: int, attempt: int) -> AbstractContextManager[None]:
        return self.ring.refit(version, attempt)

    def wait(self, index: int) -> torch.Tensor:
        return self.ring.wait_free(index)

    def done(self, index: int, length: int) -> None:
        self.ring.filled(index)

    def close(self) -> None:
        self.ring.close()


class SharedMemoryReceiver(Receiver):
    """Reads rounds that senders of the same node fill."""

    def __init__(
        self, connection: Connection, rounds: Rounds, name: str, memory: list[torch.Tensor] | None = None
    ) -> None:
        """`memory`: the two buffers, where they are not in the segment."""
        from rlctl.transport.staging import ring_of

        place = len(connection.senders) + connection.receivers.index(name)
        self.ring = ring_of(connection, rounds, place, memory)

    def begin(self, version: int, attempt: int, changes: Lengths | None = None) -> AbstractContextManager[None]:
        return self.ring.refit(version, attempt)

    def wait(self, index: int) -> torch.Tensor:
        return self.ring.wait_filled(index)

    def done(self, index: int) -> None:
        self.ring.read(index)

    def close(self) -> None:
        self.ring.close()
