"""A transport with both ends of a channel, which carries rounds of bytes. Each technology has one file, whose class
derives from `Transport`; torch is imported when an end is opened, so that the planner can read the facts."""

from __future__ import annotations

import time
from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlctl.errors import ConfigError
from rlctl.transport.available import transport_facts
from rlctl.transport.facts import TransportFacts
from rlctl.transport.rounds import Channel, Connection, Lengths, Rounds

if TYPE_CHECKING:
    import torch

    from rlctl.transport.round_buffers import Packer
    from rlctl.transport.staging import Staging


class Sender(Protocol):
    """The sending end of one channel on one policy rank: rounds in order, each written into a buffer that it lends."""

    def begin(self, version: int, attempt: int) -> AbstractContextManager[None]: ...

    def wait(self, index: int) -> torch.Tensor:
        """Wait for memory for this rank's part of round `index`, and return it."""
        ...

    def done(self, index: int, length: int) -> None:
        """Hand over this rank's part of round `index`: a message is in the first `length` bytes of that memory."""
        ...

    def introduce(self) -> None:
        """Send what the receiver must know before the first refit, once every channel of the rank is open."""

    def close(self) -> None:
        """Let go of memory and connections."""


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

    def close(self) -> None:
        """Let go of memory and connections."""


class Transport(TransportFacts):
    """A transport: its facts, and both ends of a channel."""

    def make_staging(self, channel: Channel, device: torch.device) -> Staging:
        """Make the staging memory of a channel, on the rank that shares it with others. Called only if `shares` is
        set."""
        raise ConfigError(
            f"refit.mover = {self.name} shares memory ({self.shares}), but its class has no make_staging.",
            "Define make_staging in the class, or leave `shares` empty.",
        )

    @abstractmethod
    def sender(
        self, channel: Channel, rank: int, packer: Packer, *, staging: Staging | None, device: torch.device
    ) -> Sender:
        """Open the end of policy rank `rank`. `staging`: the memory that this rank made for the channel."""
        ...

    @abstractmethod
    def receiver(self, connection: Connection, rounds: Rounds, name: str, device: torch.device) -> Receiver:
        """Open the end of the engine worker `name`."""
        ...


def transport(name: str) -> Transport:
    """Return a transport by its name. Raises InputError for an unknown name or a broken package."""
    facts = transport_facts(name)
    assert isinstance(facts, Transport)
    return facts


class TimedReceiver:
    """A receiver that also counts the seconds without data to load."""

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
    """Seconds without data to load."""
