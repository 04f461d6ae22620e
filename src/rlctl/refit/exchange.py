"""The exchange between policy ranks, for boxes of ranks that do not reach an engine worker's staging memory.

Shared memory does not reach across nodes, nor a buffer on a device to another device. Such a rank sends its boxes of a
round, one behind the other, to a rank that reaches the staging memory (its *agent*), over the policy's own process
group. The agent puts them into the staging buffer with its own. Rounds bound how much is under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from rlctl.errors import WorkerError
from rlctl.refit.records import SenderSetup
from rlctl.transport.collective import Group, Message, Pending
from rlctl.transport.movers import sends_messages
from rlctl.transport.round_buffers import Images, Packer, by_round, message_parts
from rlctl.transport.rounds import Rounds, message_bytes
from rlctl.weights.transfer_plan import TransferPlan

CHANNELS = 1 << 10  # most channels whose messages are told apart


def agent(senders: Sequence[int], rank: int) -> int:
    """The one of `senders`, who reach the staging memory, that takes what `rank` sends, who does not."""
    return senders[rank % len(senders)]


def needs_exchange(setup: SenderSetup) -> bool:
    """Whether some rank does not reach the staging memory of some channel. Every rank finds the same."""
    if sends_messages(setup.channels[0].connection.mover):
        return False
    return any(len(channel.senders) < len(setup.places) for channel in setup.channels)


class Outgoing:
    """Packs what this rank sends to its agent for one channel."""

    def __init__(self, packer: Packer, to: int, device: torch.device) -> None:
        self.packer, self.to = packer, to
        size = max(map(message_bytes, packer.parts), default=0)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]

    def message(self, index: int) -> torch.Tensor:
        """Pack round `index` and return it; it is empty where there is nothing to send."""
        length = message_bytes(self.packer.parts[index]) if index < len(self.packer.parts) else 0
        if length:
            self.packer.pack(index, self._buffers[index % 2])
        return self._buffers[index % 2][:length]


class Incoming:
    """Takes what other ranks send to this rank for one channel."""

    def __init__(self, plan: TransferPlan, rounds: Rounds, sources: Sequence[int], device: torch.device) -> None:
        self.sources, self.count = list(sources), len(rounds)
        parts = [[message_parts(own) for own in by_round(plan.from_rank(source), rounds)] for source in sources]
        self._images = Images(rounds, parts, device, capacity=0)

    def messages(self, index: int) -> list[tuple[int, torch.Tensor]]:
        """(source, memory for its message) for each source that sends something in round `index`."""
        if index >= self.count:
            return []
        memory = [(source, self._images.message(sender, index)) for sender, source in enumerate(self.sources)]
        return [(source, message) for source, message in memory if len(message)]

    def put(self, index: int, buffer: torch.Tensor) -> None:
        """Put the messages of round `index`, which have arrived, into the staging buffer."""
        for sender in range(len(self.sources)):
            self._images.unpack(sender, index, buffer)


class Exchange:
    """This rank's part in the exchange of all channels. Round `index + 1` is under way while `index` is used."""

    def __init__(self, names: tuple[str, ...], rank: int, device: torch.device, timeout_s: float) -> None:
        """Use the process group that the policy trains with. Collective over the policy's ranks."""
        if not dist.is_initialized():
            raise WorkerError("Policy ranks that do not share memory need a process group to exchange weights.")
        self.group = Group.around(dist.group.WORLD, names, rank, device, timeout_s)
        dist.barrier()  # NCCL makes its communicator with all ranks, and not all of them send in each round
        self.outgoing: dict[int, Outgoing] = {}  # by channel
        self.incoming: dict[int, Incoming] = {}
        self.bytes = 0
        """Bytes sent since `start`."""
        self._under_way: dict[int, list[Pending]] = {}

    def start(self, attempt: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Begin attempt number `attempt`. Messages of an attempt that was given up are not mixed with its own."""
        self._attempt, self._under_way, self.bytes = attempt, {}, 0
        for away in self.outgoing.values():
            away.packer.look(parameters)
        self._begin(0)

    def round(self, index: int) -> None:
        """Begin the next round, then wait for what this rank sends and receives in round `index`."""
        self._begin(index + 1)
        for pending in self._under_way.pop(index):
            pending.wait(f"round {index + 1}")

    def _begin(self, index: int) -> None:
        """Begin to send and receive all messages of a round; both ends take channels in the same order."""
        sends = [
            Message(away.message(index), away.to, self._tag(channel)) for channel, away in sorted(self.outgoing.items())
        ]
        receives = [
            Message(memory, source, self._tag(channel))
            for channel, incoming in sorted(self.incoming.items())
            for source, memory in incoming.messages(index)
        ]
        sends = [message for message in sends if len(message.memory)]
        self.bytes += sum(len(message.memory) for message in sends)
        self._under_way[index] = self.group.together(sends, receives)

    def _tag(self, channel: int) -> int:
        return (self._attempt * CHANNELS + channel) & 0x7FFFFFFF
