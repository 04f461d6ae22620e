"""The process group of the collective mover: policy ranks and engine workers, beside every group they already have.

It is made from a store of its own and the backend's own class, so that the default groups of the trainers and of vLLM
are not touched, and it can be made again, without either, when an engine leaves or joins.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rlctl.backends.vllm.channel import Rendezvous
from rlctl.errors import PeerFailedError, WaitTimeoutError, WorkerError


def serve_store(host: str, timeout_s: float) -> dist.TCPStore:
    """A store at a free port of this process; it lives as long as the object."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


class Message(NamedTuple):
    """Memory to send or to receive into, with whom, and what tells it from others."""

    memory: torch.Tensor
    peer: int
    tag: int


class Group:
    """This process's membership: sends and receives of bytes, in order between each two members."""

    def __init__(self, at: Rendezvous, rank: int, device: torch.device, timeout_s: float) -> None:
        self.names, self.rank, self.device, self.timeout_s = at.names, rank, device, timeout_s
        self._own = True
        limit = timedelta(seconds=timeout_s)
        try:
            store = dist.PrefixStore(at.prefix, dist.TCPStore(at.host, at.port, is_master=False, timeout=limit))
            self._group: Any = _backend(store, rank, len(at.names), device, limit)
        except RuntimeError as error:
            members = f"the group of {len(at.names)} at {at.host}"
            raise WorkerError(f"{at.names[rank]} could not join {members}: {error}.") from None

    @classmethod
    def around(cls, existing: Any, names: tuple[str, ...], rank: int, device: torch.device, timeout_s: float) -> Group:
        """Messages over a group that is there already, and stays when this object is closed."""
        group = cls.__new__(cls)
        group.names, group.rank, group.device, group.timeout_s = names, rank, device, timeout_s
        group._group, group._own = existing, False
        return group

    def send(self, memory: torch.Tensor, to: int, tag: int = 0) -> Pending:
        """Begin to send; `memory` must stay as it is until that is finished."""
        return self._begin(self._group.send, memory, to, tag, "take")

    def receive(self, memory: torch.Tensor, source: int, tag: int = 0) -> Pending:
        """Begin to receive into `memory`."""
        return self._begin(self._group.recv, memory, source, tag, "send")

    def _begin(self, begin: Any, memory: torch.Tensor, peer: int, tag: int, verb: str) -> Pending:
        """Raises PeerFailedError where the other member has left already."""
        try:
            return Pending(begin([memory], peer, tag), self.names[peer], verb, self.timeout_s)
        except RuntimeError as error:
            raise _left(self.names[peer], verb, "the next message", error) from None

    def together(self, sends: list[Message], receives: list[Message]) -> list[Pending]:
        """Begin to send and to receive several messages of which none waits for another.

        NCCL takes what is begun one by one in its order: two ranks that each begin with receiving from the other would
        wait for ever. As one operation they are independent. It knows no tags: between two members, messages of one
        direction must stand in the same order at both.
        """
        if self.device.type == "cpu":
            return [self.receive(*one) for one in receives] + [self.send(*one) for one in sends]
        if not sends and not receives:
            return []
        operations = [dist.P2POp(dist.irecv, one.memory, one.peer, self._group, one.tag) for one in receives]
        operations += [dist.P2POp(dist.isend, one.memory, one.peer, self._group, one.tag) for one in sends]
        peers = ", ".join(self.names[peer] for peer in sorted({one.peer for one in (*sends, *receives)}))
        works = dist.batch_isend_irecv(operations)
        return [Pending(work, peers, "exchange", self.timeout_s) for work in works]

    def send_bytes(self, text: bytes, to: int, tag: int = 0) -> None:
        """A message of any length, whole."""
        length = torch.tensor([len(text)], dtype=torch.int64, device=self.device)
        body = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        for memory in (length, body):
            self.send(memory, to, tag).wait("its list of boxes")

    def receive_bytes(self, source: int, tag: int = 0) -> bytes:
        """What `send_bytes` sent."""
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.receive(length, source, tag).wait("its list of boxes")
        body = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        self.receive(body, source, tag).wait("its list of boxes")
        return bytes(body.cpu().numpy())

    def close(self) -> None:
        """Leave: others that wait for this member fail at once."""
        group, self._group = self._group, None
        for method in ("abort", "shutdown"):
            if group is not None and self._own and hasattr(group, method):
                getattr(group, method)()
                break


class Pending:
    """A transfer under way."""

    def __init__(self, work: Any, peer: str, verb: str, timeout_s: float) -> None:
        """`peer` and `verb`, for messages: who does not do what is waited for."""
        self._work, self._peer, self._verb, self._timeout_s = work, peer, verb, timeout_s

    def wait(self, what: str) -> None:
        """Until it is finished. Raises WaitTimeoutError or WorkerError naming the other member."""
        name, limit = self._peer, self._timeout_s
        try:
            done = self._work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            if "imed out" in str(error) or "imeout" in str(error):
                raise WaitTimeoutError(f"{name} did not {self._verb} {what} in {limit:.0f} s.") from None
            raise _left(name, self._verb, what, error) from None
        if done is False:
            raise WaitTimeoutError(f"{name} did not {self._verb} {what} in {limit:.0f} s.")


def _left(name: str, verb: str, what: str, error: RuntimeError) -> PeerFailedError:
    text = str(error).strip().splitlines()[0]
    return PeerFailedError(f"{name} is gone or broke off: it did not {verb} {what} ({text}).")


def _backend(store: dist.Store, rank: int, size: int, device: torch.device, limit: timedelta) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        # Past its own limit NCCL's watchdog ends the process. `Pending.wait` comes first and raises an error instead.
        options._timeout = 2 * limit
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, limit)
