"""Interfaces of a channel's two ends, opened by mover name. A channel carries rounds of bytes; each mover has one file
with both ends."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rlctl.transport.rounds import Channel, Connection, Lengths, Rounds

if TYPE_CHECKING:
    import torch

    from rlctl.transport.round_buffers import Packer
    from rlctl.transport.shared_memory import Staging


class Sender(Protocol):
    """The sending end of one channel on one policy rank: rounds in order, each written into a buffer that it lends."""

    def begin(self, version: int, attempt: int) -> AbstractContextManager[None]: ...

    def wait(self, index: int) -> torch.Tensor:
        """Wait for memory for this rank's part of round `index`, and return it."""
        ...

    def done(self, index: int, length: int) -> None:
        """Hand over this rank's part of round `index`: a message is in the first `length` bytes of that memory."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The receiving end of a channel: rounds in order, each in a buffer that stays valid until it is given back."""

    def begin(self, version: int, attempt: int, changes: Lengths | None = None) -> AbstractContextManager[None]:
        """Like `Sender.begin`, to receive: changes of these lengths, or None for everything."""
        ...

    def wait(self, index: int) -> torch.Tensor:
        """Wait for the bytes of round `index`, and return them."""
        ...

    def done(self, index: int) -> None:
        """Give back the bytes of round `index`."""
        ...

    def close(self) -> None: ...


class Mover(NamedTuple):
    """The file of a mover, and the first part of the names of its classes."""

    file: str
    name: str
    messages: bool
    """A rank sends its boxes in sequence instead of writing into the receiver's image."""
    staging: bool
    """One rank makes memory that the others write or read."""

    def load(self, name: str) -> Any:
        return getattr(import_module(f"rlctl.transport.{self.file}"), name)


MOVERS = {
    "shared-memory": Mover("shared_memory", "SharedMemory", messages=False, staging=True),
    "cuda-ipc": Mover("cuda_ipc", "CudaIpc", messages=False, staging=True),
    "collective": Mover("collective", "Collective", messages=True, staging=False),
    "disk": Mover("disk", "Disk", messages=True, staging=False),
}


def make_staging(channel: Channel, device: torch.device) -> Staging | None:
    """Make the staging memory of a channel, on the rank that shares it with others; None: the mover needs none."""
    mover = MOVERS[channel.connection.mover]
    return mover.load("make_staging")(channel, device) if mover.staging else None


def open_sender(
    channel: Channel, rank: int, packer: Packer, *, staging: Staging | None, device: torch.device
) -> Sender:
    mover = MOVERS[channel.connection.mover]
    return mover.load(f"{mover.name}Sender")(channel, rank, packer, staging=staging, device=device)


def open_receiver(connection: Connection, rounds: Rounds, name: str, device: torch.device) -> Receiver:
    mover = MOVERS[connection.mover]
    return mover.load(f"{mover.name}Receiver")(connection, rounds, name, device)


class TimedReceiver:
    """A receiver that also counts the seconds in which nothing had come that could be loaded."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver, self.waited_s = receiver, 0.0
        self.done = receiver.done

    def wait(self, index: int) -> torch.Tensor:
        begun = time.perf_counter()
        buffer = self.receiver.wait(index)
        self.waited_s += time.perf_counter() - begun
        return buffer


@dataclass
class Received:
    """The outcome of one refit in one engine worker."""

    path: str
    """`direct`, `loader`, or `mixed`."""
    waited_s: float = 0.0
    """Seconds in which nothing had come that could be loaded."""
