"""The collective mover: policy ranks send boxes to engine workers over joint process groups (gloo, NCCL).

Each channel has a group built from its own store and the backend's class, so default groups of trainers and vLLM stay
unchanged, and it can be rebuilt when engines come or go.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BarrierOptions
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] - not in __all__

from rlctl.errors import PeerFailedError, VerificationError, WaitTimeoutError, WorkerError
from rlctl.transport.changed_elements import region, region_bytes
from rlctl.transport.round_buffers import Images, Packer
from rlctl.transport.rounds import (
    Channel,
    Connection,
    Lengths,
    MessagePart,
    Rendezvous,
    Rounds,
    buffer_bytes,
    decode_parts,
    encode_parts,
)


class ServedStore(TCPStore):
    """A store at a free port of this process, only at `host` (torch would listen on every network). It has no password,
    so serve it only until all members have joined."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """Raise WorkerError for an address that is not this node's."""
        try:
            family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(place[:2], family=family)
        except OSError as error:
            raise WorkerError(
                f"This node cannot listen at {host} ({error}).", "RLCTL_ADDRESS must be an address of the node itself."
            ) from None
        port, limit, self._descriptor = listening.getsockname()[1], timedelta(seconds=timeout_s), listening.detach()
        super().__init__(
            host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=self._descriptor,
            use_libuv=True,
        )  # fmt: skip

    def stop_listening(self) -> None:
        """Refuse new connections; members stay connected and can form further groups."""
        # The store closes its descriptor at its end. Until then another socket stands there, to which nobody connects.
        with socket.socket() as other:
            os.dup2(other.fileno(), self._descriptor, inheritable=False)


class Message(NamedTuple):
    """Memory to send or to receive into, the other member, and a tag that tells messages apart."""

    memory: torch.Tensor
    peer: int
    tag: int


class TransferGroup:
    """This process's membership in a group: it sends and receives bytes, in order between each two members."""

    def __init__(self, group: Any, names: tuple[str, ...], device: torch.device, timeout_s: float) -> None:
        """Send messages over a backend of torch's, which stays when this object is closed."""
        self.names, self.device, self.timeout_s = names, device, timeout_s
        self._group: Any = group
        self._joined = False

    @classmethod
    def join(cls, at: Rendezvous, rank: int, device: torch.device, timeout_s: float) -> TransferGroup:
        """Make a group with the others that meet there. It ends for all of them when one closes it."""
        limit, size = timedelta(seconds=timeout_s), len(at.names)
        try:
            store = PrefixStore(at.prefix, TCPStore(at.host, at.port, is_master=False, timeout=limit))
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                # Past its own limit NCCL's watchdog ends the process. `Pending.wait` comes first and raises an error.
                options._timeout = 2 * limit
                made: Any = dist.ProcessGroupNCCL(store, rank, size, options)
                meeting = BarrierOptions()
                meeting.device = device
                # NCCL makes the communicator here, for which it needs all members at once.
                Pending(made.barrier(meeting), "Another member", "join", timeout_s).wait("the group")
            else:
                made = dist.ProcessGroupGloo(store, rank, size, limit)
        except RuntimeError as error:
            raise WorkerError(f"{at.names[rank]} could not join the group of {size} at {at.host}: {error}.") from None
        group = cls(made, at.names, device, timeout_s)
        group._joined = True
        return group

    def send(self, memory: torch.Tensor, to: int, tag: int = 0) -> Pending:
        """Begin to send; `memory` must not change until that is finished."""
        return self._begin([Message(memory, to, tag)], [], "take")

    def receive(self, memory: torch.Tensor, source: int, tag: int = 0) -> Pending:
        return self._begin([], [Message(memory, source, tag)], "send")

    def together(self, sends: list[Message], receives: list[Message]) -> list[Pending]:
        """Start sends and receives as one operation, because NCCL runs single ones in order and could deadlock. Both
        ends list messages alike."""
        if self.device.type == "cpu":
            return [self.receive(*one) for one in receives] + [self.send(*one) for one in sends]
        return [self._begin(sends, receives, "exchange")] if sends or receives else []

    def _begin(self, sends: list[Message], receives: list[Message], verb: str) -> Pending:
        peers = ", ".join(self.names[peer] for peer in sorted({one.peer for one in (*sends, *receives)}))
        batched, work = self.device.type == "cuda", None
        try:
            # In a batch NCCL uses the group's communicator; for a message alone it would make one for the two members.
            if batched:
                self._group._start_coalescing()
            for one in receives:
                work = self._group.recv([one.memory], one.peer, one.tag)
            for one in sends:
                work = self._group.send([one.memory], one.peer, one.tag)
            if batched:
                work = self._group._end_coalescing()
            return Pending(work, peers, verb, self.timeout_s, (*sends, *receives))
        except RuntimeError as error:
            raise _left(peers, verb, "the next message", error) from None

    def send_number(self, number: int, to: int, tag: int) -> Pending:
        return self.send(torch.tensor([number], dtype=torch.int64, device=self.device), to, tag)

    def receive_number(self, source: int, tag: int, what: str) -> int:
        memory = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.receive(memory, source, tag).wait(what)
        return int(memory)

    def finish_copies(self) -> None:
        """Wait until data packed on a GPU is in send memory."""
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Leave the group; others that wait for this member fail at once. A group that was not joined here stays."""
        group, self._group = self._group, None
        if group is not None and self._joined:
            (group.abort if hasattr(group, "abort") else group.shutdown)()


class Pending:
    """A transfer under way."""

    def __init__(self, work: Any, peer: str, verb: str, timeout_s: float, kept: Sequence[Message] = ()) -> None:
        """`peer` and `verb`: the other member and its action, for errors. `kept` memory stays alive."""
        self._work, self._peer, self._verb, self._timeout_s, self._kept = work, peer, verb, timeout_s, kept

    def wait(self, what: str) -> None:
        """Wait until it is finished. Raises WaitTimeoutError or WorkerError naming the other member."""
        try:
            done = self._work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            if "imed out" not in str(error) and "imeout" not in str(error):
                raise _left(self._peer, self._verb, what, error) from None
            done = False
        if done is False:
            raise WaitTimeoutError(f"{self._peer} did not {self._verb} {what} in {self._timeout_s:.0f} s.")


def _left(name: str, verb: str, what: str, error: RuntimeError) -> PeerFailedError:
    text = str(error).strip().splitlines()[0]
    return PeerFailedError(f"{name} is gone or gave up: it did not {verb} {what} ({text}).")


class CollectiveSender:
    """Sends one rank's messages to the first receiver of a channel. Two buffers let packing and sending overlap."""

    def __init__(self, channel: Channel, rank: int, packer: Packer, *, device: torch.device, **_: object) -> None:
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
            self._leaving.clear()  # what is under way would keep the connections open
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


class CollectiveReceiver:
    """Receive rounds as messages. Receivers with the same needs pass finished rounds along a chain, so the sender sends
    once."""

    def __init__(self, connection: Connection, rounds: Rounds, name: str, device: torch.device) -> None:
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
            self._arriving, self._leaving = {}, {}  # what is under way would keep the connections open
            self.close()  # so that nobody waits for this end
            raise

    def _require_version(self, version: int) -> None:
        for rank in self.senders if self.before is None else [self.before]:
            found = self.group.receive_number(rank, self.tag, "the version")
            if found != version:
                raise VerificationError(
                    f"{self.names[rank]} sends version {found} of the weights; version {version} was expected."
                )
        if self.after is not None:
            self.group.send_number(version, self.after, self.tag).wait("the version")

    @property
    def _puts_together(self) -> bool:
        return self.before is None and self._changes is None

    def _expect(self, index: int) -> None:
        if index >= self._count:
            return
        if self._puts_together:
            memory = [(rank, self.images.message(sender, index)) for sender, rank in enumerate(self.senders)]
        else:
            ranks = self.senders if self.before is None else [self.before] * len(self.senders)
            memory = list(zip(ranks, self._parts(index), strict=False))
        self._arriving[index] = self.group.together(
            [], [Message(one, rank, self.tag) for rank, one in memory if len(one)]
        )

    def _parts(self, index: int) -> list[torch.Tensor]:
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
            self._leaving[index] = self.group.together(
                [Message(one, self.after, self.tag) for one in self._parts(index)], []
            )
        return self.images.image(index)

    def done(self, index: int) -> None:
        if not self._puts_together and index + 2 < self._count:
            self._left(index, f"round {index + 1}")
            self._expect(index + 2)

    def close(self) -> None:
        self.group.close()
