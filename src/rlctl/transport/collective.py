"""The collective transport: policy ranks send boxes to engine workers over joint process groups (gloo, NCCL)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlctl.errors import VerificationError
from rlctl.transport.facts import Places, Refusal
from rlctl.transport.movers import Receiver, Sender, Transport
from rlctl.transport.rounds import (
    Channel,
    Connection,
    Lengths,
    MessagePart,
    Rounds,
    buffer_bytes,
    decode_parts,
    encode_parts,
)

if TYPE_CHECKING:
    import torch

    from rlctl.transport.process_group import Pending
    from rlctl.transport.round_buffers import Packer
    from rlctl.transport.staging import Staging


class Collective(Transport):
    """Messages over a network, or between the devices of a node."""

    name = "collective"
    way = "Weights go from device to device."
    joins = True

    def suits(self, places: Places) -> bool:
        return True

    def refusal(self, places: Places) -> Refusal | None:
        if places.on_cpu or places.elsewhere:
            return None
        return Refusal(
            "engines share GPUs with the policy, and NCCL takes one process of each GPU",
            "Use auto or cuda-ipc, or give the engines GPUs: --set generation.colocated=false.",
        )

    def sender(
        self, channel: Channel, rank: int, packer: Packer, *, staging: Staging | None, device: torch.device
    ) -> Sender:
        return CollectiveSender(channel, rank, packer, device=device)

    def receiver(self, connection: Connection, rounds: Rounds, name: str, device: torch.device) -> Receiver:
        return CollectiveReceiver(connection, rounds, name, device)


class CollectiveSender(Sender):
    """Sends one rank's messages to the first receiver of a channel. Two buffers let packing and sending overlap."""

    def __init__(self, channel: Channel, rank: int, packer: Packer, *, device: torch.device) -> None:
        import torch

        from rlctl.transport.changed_elements import region_bytes
        from rlctl.transport.process_group import TransferGroup

        link = channel.connection
        assert link.group is not None
        self.group = group = TransferGroup.join(link.group, channel.senders.index(rank), device, link.timeout_s)
        self.packer, self.tag = packer, channel.index
        self.to = group.names.index(link.receivers[0])
        size = max(region_bytes(link.capacity, len(link.senders)) * link.sparse, *packer.lengths, 0)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=group.device) for _ in range(2)]
        self._leaving: dict[int, Pending] = {}

    def introduce(self) -> None:
        """Tell the receiver which boxes come in which round, once."""
        import torch

        body = torch.frombuffer(bytearray(encode_parts(self.packer.parts)), dtype=torch.uint8).to(self.group.device)
        self.group.send_number(len(body), self.to, self.tag).wait("its list of boxes")
        self.group.send(body, self.to, self.tag).wait("its list of boxes")

    @contextmanager
    def begin(self, version: int, attempt: int) -> Iterator[None]:
        try:
            self._leaving = {-1: self.group.send_number(version, self.to, self.tag)}
            yield
            for pending in self._leaving.values():
                pending.wait("the last rounds")
        except BaseException:
            self._leaving.clear()  # messages in flight would keep the connections open
            self.group.close()  # so that nobody waits for this rank
            raise

    def wait(self, index: int) -> torch.Tensor:
        if index - 2 in self._leaving:
            self._leaving.pop(index - 2).wait(f"round {index - 1}")
        return self._buffers[index % 2]

    def done(self, index: int, length: int) -> None:
        if length:
            self.group.finish_copies()
            self._leaving[index] = self.group.send(self._buffers[index % 2][:length], self.to, self.tag)

    def close(self) -> None:
        self.group.close()


class CollectiveReceiver(Receiver):
    """Receive rounds as messages. Receivers with the same needs pass finished rounds along a chain, so the sender sends
    once."""

    def __init__(self, connection: Connection, rounds: Rounds, name: str, device: torch.device) -> None:
        from rlctl.transport.process_group import TransferGroup
        from rlctl.transport.round_buffers import Images

        assert connection.group is not None
        self.connection, self.rounds, self.names = connection, rounds, connection.group.names
        chain = [self.names.index(receiver) for receiver in connection.receivers]
        place = connection.receivers.index(name)
        self.before = chain[place - 1] if place else None
        self.after = chain[place + 1] if place + 1 < len(chain) else None
        self.tag = connection.channel
        self.group = TransferGroup.join(connection.group, chain[place], device, connection.timeout_s)
        self.senders = [self.names.index(sender) for sender in connection.senders]
        parts = [] if place else [self._introduced(rank) for rank in self.senders]
        self.images = Images(rounds, parts, device, connection.capacity)
        self._arriving: dict[int, list[Pending]] = {}
        self._leaving: dict[int, list[Pending]] = {}

    def _introduced(self, rank: int) -> list[tuple[MessagePart, ...]]:
        import torch

        length = self.group.receive_number(rank, self.tag, "its list of boxes")
        body = torch.zeros(length, dtype=torch.uint8, device=self.group.device)
        self.group.receive(body, rank, self.tag).wait("its list of boxes")
        return decode_parts(bytes(body.cpu().numpy()))

    @contextmanager
    def begin(self, version: int, attempt: int, changes: Lengths | None = None) -> Iterator[None]:
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
            self._arriving, self._leaving = {}, {}  # messages in flight would keep the connections open
            self.close()  # so that nobody waits for this end
            raise

    def _require_version(self, version: int) -> None:
        for rank in self.senders if self.before is None else [self.before]:
            sent_version = self.group.receive_number(rank, self.tag, "the version")
            if sent_version != version:
                raise VerificationError(
                    f"{self.names[rank]} sends version {sent_version} of the weights; version {version} was expected."
                )
        if self.after is not None:
            self.group.send_number(version, self.after, self.tag).wait("the version")

    @property
    def _puts_together(self) -> bool:
        return self.before is None and self._changes is None

    def _expect(self, index: int) -> None:
        from rlctl.transport.process_group import Message

        if index >= self._count:
            return
        if self._puts_together:
            memory = [(rank, self.images.message(sender, index)) for sender, rank in enumerate(self.senders)]
        else:
            ranks = self.senders if self.before is None else [self.before] * len(self.senders)
            memory = list(zip(ranks, self._parts(index), strict=False))
        self._arriving[index] = self.group.together(
            [], [Message(region, rank, self.tag) for rank, region in memory if len(region)]
        )

    def _parts(self, index: int) -> list[torch.Tensor]:
        from rlctl.transport.changed_elements import region

        image = self.images.image(index)
        if self._changes is None:
            return [image[: buffer_bytes((self.rounds[index],))]]
        count, capacity = len(self.senders), self.connection.capacity
        return [region(image, capacity, count, i)[:length] for i, length in enumerate(self._changes[index])]

    def _left(self, index: int, peer_state: str) -> None:
        for pending in self._leaving.pop(index, ()):
            pending.wait(peer_state)

    def wait(self, index: int) -> torch.Tensor:
        self._left(index - 2, f"round {index - 1}")  # the image that this round is put together in
        for pending in self._arriving.pop(index):
            pending.wait(f"round {index + 1} of {self._count}")
        if self._puts_together:
            for sender in range(len(self.senders)):
                self.images.unpack(sender, index)
            self._expect(index + 2)
        if self.after is not None:
            from rlctl.transport.process_group import Message

            self._leaving[index] = self.group.together(
                [Message(part, self.after, self.tag) for part in self._parts(index)], []
            )
        return self.images.image(index)

    def done(self, index: int) -> None:
        if not self._puts_together and index + 2 < self._count:
            self._left(index, f"round {index + 1}")
            self._expect(index + 2)

    def close(self) -> None:
        self.group.close()
