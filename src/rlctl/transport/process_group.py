"""Process groups of policy ranks and engine workers (gloo, NCCL): where they meet, and messages between members.

Each channel has a group built from its own store and the backend's class, so default groups of trainers and vLLM stay
unchanged, and it can be rebuilt when engines come or go.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BarrierOptions
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] - not in __all__

from rlctl.errors import PeerFailedError, WaitTimeoutError, WorkerError
from rlctl.transport.rounds import Rendezvous


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
        """Make a group with the other members of the meeting. Closing it ends it for all."""
        limit, size = timedelta(seconds=timeout_s), len(at.names)
        try:
            store = PrefixStore(at.prefix, TCPStore(at.host, at.port, is_master=False, timeout=limit))
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                # NCCL's watchdog ends the process after its limit. `Pending.wait` comes first and raises an error.
                options._timeout = 2 * limit
                made: Any = dist.ProcessGroupNCCL(store, rank, size, options)
                meeting = BarrierOptions()
                meeting.device = device
                # NCCL makes the communicator here, and needs all members at once.
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
            return [self.receive(*receive) for receive in receives] + [self.send(*send) for send in sends]
        return [self._begin(sends, receives, "exchange")] if sends or receives else []

    def _begin(self, sends: list[Message], receives: list[Message], verb: str) -> Pending:
        peers = ", ".join(self.names[peer] for peer in sorted({message.peer for message in (*sends, *receives)}))
        batched, work = self.device.type == "cuda", None
        try:
            # In a batch NCCL uses the group's communicator; for a message alone it would make one for the two members.
            if batched:
                self._group._start_coalescing()
            for receive in receives:
                work = self._group.recv([receive.memory], receive.peer, receive.tag)
            for receive in sends:
                work = self._group.send([receive.memory], receive.peer, receive.tag)
            if batched:
                work = self._group._end_coalescing()
            return Pending(work, peers, verb, self.timeout_s, (*sends, *receives))
        except RuntimeError as error:
            raise _left(peers, verb, "the next message", error) from None

    def send_number(self, number: int, to: int, tag: int) -> Pending:
        return self.send(torch.tensor([number], dtype=torch.int64, device=self.device), to, tag)

    def receive_number(self, source: int, tag: int, description: str) -> int:
        memory = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.receive(memory, source, tag).wait(description)
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

    def wait(self, activity: str) -> None:
        """Wait until it is finished. Raises WaitTimeoutError or WorkerError naming the other member."""
        try:
            done = self._work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            if "imed out" not in str(error) and "imeout" not in str(error):
                raise _left(self._peer, self._verb, activity, error) from None
            done = False
        if done is False:
            raise WaitTimeoutError(f"{self._peer} did not {self._verb} {activity} in {self._timeout_s:.0f} s.")


def _left(name: str, verb: str, activity: str, error: RuntimeError) -> PeerFailedError:
    text = str(error).strip().splitlines()[0]
    return PeerFailedError(f"{name} is gone or gave up: it did not {verb} {activity} ({text}).")
