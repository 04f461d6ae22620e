"""The receiving ends of the movers; `refit` has the sending ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from rlctl.backends.vllm import weight_files
from rlctl.backends.vllm.channel import Connection, Lengths, Rounds, buffer_bytes, decode_parts
from rlctl.backends.vllm.cuda_buffers import open_buffer
from rlctl.backends.vllm.group import Group, Pending
from rlctl.backends.vllm.image import Images
from rlctl.backends.vllm.receiver import Inlet
from rlctl.backends.vllm.ring import Ring
from rlctl.backends.vllm.segment import Segment
from rlctl.backends.vllm.sparse import region
from rlctl.errors import VerificationError, WorkerError


def open_inlet(connection: Connection, rounds: Rounds, name: str, device: torch.device) -> Inlet:
    """The inlet of the receiver called `name`."""
    kinds: dict[str, Callable[..., Inlet]] = {
        "shared-memory": SharedMemoryInlet,
        "cuda-ipc": CudaIpcInlet,
        "collective": CollectiveInlet,
        "disk": DiskInlet,
    }
    return kinds[connection.mover](connection, rounds, name, device)


class SharedMemoryInlet:
    """Rounds in a ring that senders of the same node fill."""

    memory: list[torch.Tensor] | None = None

    def __init__(self, connection: Connection, rounds: Rounds, name: str, device: torch.device) -> None:
        if connection.address is None:
            raise WorkerError("A shared memory channel without an address.")
        self.ring = Ring(
            Segment(connection.address),
            connection.senders,
            connection.receivers,
            len(connection.senders) + connection.receivers.index(name),
            capacity=connection.capacity,
            buffers=min(2, len(rounds)),
            timeout_s=connection.timeout_s,
            memory=self.memory,
        )

    def begin(self, version: int, epoch: int, changes: Lengths | None = None) -> AbstractContextManager[None]:
        return self.ring.refit(version, epoch)

    def wait(self, index: int) -> torch.Tensor:
        return self.ring.wait_filled(index)

    def done(self, index: int) -> None:
        self.ring.read(index)

    def close(self) -> None:
        self.ring.close()


class CudaIpcInlet(SharedMemoryInlet):
    """The same ring with its buffers on the device, which the policy rank on the same device fills."""

    def __init__(self, connection: Connection, rounds: Rounds, name: str, device: torch.device) -> None:
        self.memory = [open_buffer(handle, device) for handle in connection.handles]
        super().__init__(connection, rounds, name, device)
        self.device = device

    def done(self, index: int) -> None:
        torch.cuda.current_stream(self.device).synchronize()  # the copies out of the buffer have been made
        self.ring.read(index)


class CollectiveInlet:
    """Rounds from messages over a process group.

    Of several receivers that need the same, the first takes the messages and hands each finished round to the next,
    which hands it on: a sender sends once, however many there are, and rounds flow through the chain side by side.
    """

    def __init__(self, connection: Connection, rounds: Rounds, name: str, device: torch.device) -> None:
        if connection.group is None:
            raise WorkerError("A collective channel without a group.")
        self.connection, self.rounds, self.names = connection, rounds, connection.group.names
        chain = [self.names.index(receiver) for receiver in connection.receivers]
        place = connection.receivers.index(name)
        self.before = chain[place - 1] if place else None
        self.after = chain[place + 1] if place + 1 < len(chain) else None
        self.tag = connection.channel
        self.group = Group(connection.group, chain[place], device, connection.timeout_s)
        self.senders = [self.names.index(sender) for sender in connection.senders]
        parts = [] if place else [decode_parts(self.group.receive_bytes(rank, self.tag)) for rank in self.senders]
        self.images = Images(rounds, parts, device, connection.capacity)
        self._arriving: dict[int, list[Pending]] = {}
        self._leaving: dict[int, list[Pending]] = {}

    @contextmanager
    def begin(self, version: int, epoch: int, changes: Lengths | None = None) -> Iterator[None]:
        try:
            self._require_version(version)
            self._arriving, self._leaving = {}, {}
            self._changes, self._count = changes, len(self.rounds if changes is None else changes)
            for index in range(2):
                self._expect(index)
            yield
            for index in list(self._leaving):
                self._left(index, "the last rounds")
        except BaseException:
            self._arriving, self._leaving = {}, {}  # what is under way would keep the connections open
            self.close()  # so that nobody waits for this end
            raise

    def _require_version(self, version: int) -> None:
        sources = [self.before] if self.before is not None else self.senders
        for rank in sources:
            found = torch.zeros(1, dtype=torch.int64, device=self.group.device)
            self.group.receive(found, rank, self.tag).wait("the version")
            if int(found) != version:
                raise VerificationError(
                    f"{self.names[rank]} sends version {int(found)} of the weights; version {version} was expected."
                )
        if self.after is not None:
            told = torch.tensor([version], dtype=torch.int64, device=self.group.device)
            self.group.send(told, self.after, self.tag).wait("the version")

    @property
    def _puts_together(self) -> bool:
        """Messages arrive beside the image and are put in place, rather than in the image itself."""
        return self.before is None and self._changes is None

    def _expect(self, index: int) -> None:
        """Begin to receive round `index`."""
        if index >= self._count:
            return
        if self._puts_together:
            memory = [(rank, self.images.message(sender, index)) for sender, rank in enumerate(self.senders)]
        else:
            ranks = self.senders if self.before is None else [self.before] * len(self.senders)
            memory = list(zip(ranks, self._parts(index), strict=False))
        self._arriving[index] = [self.group.receive(one, rank, self.tag) for rank, one in memory if len(one)]

    def _parts(self, index: int) -> list[torch.Tensor]:
        """What round `index` consists of in its image: the whole, or the changes of each sender."""
        image = self.images.image(index)
        if self._changes is None:
            return [image[: buffer_bytes((self.rounds[index],))]]
        count, capacity = len(self.senders), self.connection.capacity
        return [region(image, capacity, count, i)[:length] for i, length in enumerate(self._changes[index])]

    def _left(self, index: int, what: str) -> None:
        for pending in self._leaving.pop(index, ()):
            pending.wait(what)

    def wait(self, index: int) -> torch.Tensor:
        self._left(index - 2, f"round {index - 1}")  # the image that this round is put together in
        for pending in self._arriving.pop(index):
            pending.wait(f"round {index + 1} of {self._count}")
        if self._puts_together:
            for sender in range(len(self.senders)):
                self.images.unpack(sender, index)
            self._expect(index + 2)
        if self.after is not None:
            self._leaving[index] = [self.group.send(one, self.after, self.tag) for one in self._parts(index)]
        return self.images.image(index)

    def done(self, index: int) -> None:
        if not self._puts_together and index + 2 < self._count:
            self._left(index, f"round {index + 1}")
            self._expect(index + 2)

    def close(self) -> None:
        self.group.close()


class DiskInlet:
    """Rounds from the files of a finished version in a directory that both sides see."""

    def __init__(self, connection: Connection, rounds: Rounds, name: str, device: torch.device) -> None:
        self.connection, self.rounds, self.device = connection, rounds, device

    @contextmanager
    def begin(self, version: int, epoch: int, changes: Lengths | None = None) -> Iterator[None]:
        link = self.connection
        with ExitStack() as stack:
            self._files = [
                stack.enter_context(weight_files.open_read(link.directory, version, link.channel, sender))
                for sender in link.senders
            ]
            parts = [decode_parts(file.header) for file in self._files]
            self.images = Images(self.rounds, parts, torch.device("cpu"), link.capacity)
            yield

    def wait(self, index: int) -> torch.Tensor:
        for sender, file in enumerate(self._files):
            if len(message := self.images.message(sender, index)):
                file.read_into(message)
                self.images.unpack(sender, index)
        return self.images.image(index)

    def done(self, index: int) -> None:
        pass

    def close(self) -> None:
        pass
