"""The two ends of a channel: a small interface for each, and opening one by its mover's name.

A channel carries rounds of bytes from policy ranks to engine workers. Each mover has one file here with both ends.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlctl.errors import WorkerError
from rlctl.transport.rounds import Channel, Connection, Lengths, Rounds

if TYPE_CHECKING:
    import torch

    from rlctl.transport.round_buffers import Packer
    from rlctl.transport.shared_memory import Staging


class Sender(Protocol):
    """The sending end of one channel on one policy rank: rounds in order, each written into a buffer that it lends."""

    @property
    def packer(self) -> Packer:
        """Makes this rank's copies of each round."""
        ...

    def begin(self, version: int, attempt: int) -> AbstractContextManager[None]:
        """A context in which `version` is sent, as attempt number `attempt`; the other ends learn of what it raises."""
        ...

    def wait(self, index: int) -> torch.Tensor:
        """Wait for memory for this rank's part of round `index`, and return it."""
        ...

    def done(self, index: int) -> None:
        """Hand over this rank's part of round `index`, which is now in that memory."""
        ...

    def wait_changes(self, index: int) -> torch.Tensor:
        """Wait for memory for the changed elements that this rank sends in round `index`, and return it."""
        ...

    def done_changes(self, index: int, length: int) -> None:
        """Hand over those changed elements, which are now in the first `length` bytes of that memory."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The receiving end of a channel: rounds in order, each in a buffer that stays valid until it is given back."""

    def begin(self, version: int, attempt: int, changes: Lengths | None = None) -> AbstractContextManager[None]:
        """As `Sender.begin`, to receive. With `changes` only changed elements come, of these lengths; with None
        everything."""
        ...

    def wait(self, index: int) -> torch.Tensor:
        """Wait for the bytes of round `index`, and return them."""
        ...

    def done(self, index: int) -> None:
        """Give back the bytes of round `index`."""
        ...

    def close(self) -> None: ...


class TimedReceiver:
    """A receiver that also counts the seconds in which nothing had come that could be loaded."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver, self.waited_s = receiver, 0.0

    def wait(self, index: int) -> torch.Tensor:
        begun = time.perf_counter()
        buffer = self.receiver.wait(index)
        self.waited_s += time.perf_counter() - begun
        return buffer

    def done(self, index: int) -> None:
        self.receiver.done(index)


@dataclass
class Received:
    """The outcome of one refit in one engine worker."""

    path: str
    """`direct`, `loader`, or `mixed`."""
    waited_s: float = 0.0
    """Seconds in which nothing had come that could be loaded."""


def sends_messages(mover: str) -> bool:
    """Whether a rank sends its boxes one behind the other, rather than writing them into the image that is read."""
    return mover in ("collective", "disk")


def make_staging(channel: Channel, device: torch.device) -> Staging | None:
    """Make the staging memory of a channel, on the rank that shares it with others; None: the mover needs none."""
    if channel.connection.mover == "shared-memory":
        from rlctl.transport import shared_memory

        return shared_memory.make_staging(channel)
    if channel.connection.mover == "cuda-ipc":
        from rlctl.transport import cuda_ipc

        return cuda_ipc.make_staging(channel, device)
    return None


def open_sender(channel: Channel, rank: int, packer: Packer, *, made: Staging | None, device: torch.device) -> Sender:
    """Open the sending end of policy rank `rank`, which made the staging memory `made` and has its weights on
    `device`."""
    mover = channel.connection.mover
    if mover == "shared-memory":
        from rlctl.transport.shared_memory import SharedMemorySender

        return SharedMemorySender(channel, rank, packer, made)
    if mover == "cuda-ipc" and made is not None:
        from rlctl.transport.cuda_ipc import CudaIpcSender

        return CudaIpcSender(channel, rank, packer, made)
    if mover == "disk":
        from rlctl.transport.disk import DiskSender

        return DiskSender(channel, rank, packer)
    if mover == "collective":
        from rlctl.transport.collective import CollectiveSender

        return CollectiveSender(channel, rank, packer, device)
    raise WorkerError(f"refit.mover = {mover} was not prepared on policy rank {rank}.")


def open_receiver(connection: Connection, rounds: Rounds, name: str, device: torch.device) -> Receiver:
    """Open the receiving end of the engine worker called `name`."""
    mover = connection.mover
    if mover == "shared-memory":
        from rlctl.transport.shared_memory import SharedMemoryReceiver

        return SharedMemoryReceiver(connection, rounds, name)
    if mover == "cuda-ipc":
        from rlctl.transport.cuda_ipc import CudaIpcReceiver

        return CudaIpcReceiver(connection, rounds, name, device)
    if mover == "disk":
        from rlctl.transport.disk import DiskReceiver

        return DiskReceiver(connection, rounds)
    if mover == "collective":
        from rlctl.transport.collective import CollectiveReceiver

        return CollectiveReceiver(connection, rounds, name, device)
    raise WorkerError(f"refit.mover = {mover} is not a mover that an engine can receive with.")
