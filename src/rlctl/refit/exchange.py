"""Exchange between policy ranks, for ranks that cannot reach an engine worker's staging memory (other nodes, or
devices).

Such a rank sends its boxes of a round to a rank that can (its *relay*) over the policy's process group; the relay
copies them into the staging buffer. Rounds limit data in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlctl.refit.records import SenderSetup
from rlctl.transport.available import transport_facts
from rlctl.transport.process_group import Message, Pending, TransferGroup
from rlctl.transport.round_buffers import Images, Packer, by_round, empty, message_parts, refill
from rlctl.transport.rounds import Rounds
from rlctl.weights.transfer_plan import TransferPlan

CHANNELS = 1 << 10  # the maximum of channels with distinct messages


def relay(senders: Sequence[int], rank: int) -> int:
    """Return the one of `senders` with staging memory that relays `rank`'s boxes."""
    return senders[rank % len(senders)]


def needs_exchange(setup: SenderSetup) -> bool:
    """Whether some rank does not reach the staging memory of some channel. Every rank finds the same."""
    if not transport_facts(setup.channels[0].connection.mover).shares:
        return False
    return any(len(channel.senders) < len(setup.places) for channel in setup.channels)


class Exchange:
    """This rank's part in the exchange of all channels. Round `index + 1` is under way while `index` is used."""

    def __init__(self, names: tuple[str, ...], device: torch.device, timeout_s: float) -> None:
        """Use the process group that the policy trains with. Collective over the policy's ranks."""
        world: Any = dist.group.WORLD
        self.group = TransferGroup(world._get_backend(device), names, device, timeout_s)
        self.device = device
        dist.barrier()  # NCCL makes its communicator with all ranks, and some do not send in each round
        self._outgoing: dict[int, tuple[Packer, int]] = {}
        """By channel: what packs this rank's messages, the same where these are, and its relay."""
        self._buffers: dict[int, list[torch.Tensor]] = {}
        """By the identity of a packer: its two buffers, which are empty between `finish` and `start`."""
        self._incoming: dict[int, tuple[list[int], Images]] = {}
        """By channel: the ranks that this one is the relay of, and what puts their messages in place."""
        self.bytes = 0
        """Bytes sent since `start`."""
        self._under_way: dict[int, list[Pending]] = {}

    def send_through(self, channel: int, packer: Packer, to: int) -> None:
        """Have this rank's boxes of a channel sent by the rank `to`."""
        same = (outgoing for outgoing, _ in self._outgoing.values() if outgoing.copies == packer.copies)
        self._outgoing[channel] = next(same, packer), to

    def send_for(self, channel: int, plan: TransferPlan, rounds: Rounds, sources: list[int]) -> None:
        """Have this rank send the boxes that `sources` hold of a channel."""
        parts = [[message_parts(copies) for copies in by_round(plan.from_rank(source), rounds)] for source in sources]
        self._incoming[channel] = sources, Images(rounds, parts, self.device, capacity=0)
        self._incoming[channel][1].let_go()

    def start(self, attempt: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Begin attempt number `attempt`. Messages of abandoned attempts stay apart."""
        self._attempt, self._under_way, self.bytes = attempt, {}, 0
        for packer, _ in self._outgoing.values():
            packer.look(parameters)
            if id(packer) in self._buffers:
                refill(self._buffers[id(packer)])
            else:
                size = max(packer.lengths, default=0)
                made = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
                self._buffers[id(packer)] = made
        for _, images in self._incoming.values():
            images.hold()
        self._begin(0)

    def finish(self, *, forget: bool = False) -> None:
        """Release the memory of all buffers until the next refit. Their views stay (15 to 30 microseconds of host time
        a box to make), and with `forget` not the views of parameters. After a failed attempt, messages may be in
        flight, so buffers stay."""
        for buffers in self._buffers.values():
            empty(buffers)
        for packer, _ in self._outgoing.values() if forget else ():
            packer.look({})
        for _, images in self._incoming.values():
            images.let_go()

    def round(self, index: int) -> None:
        """Begin the next round, then wait for what this rank sends and receives in round `index`."""
        self._begin(index + 1)
        for pending in self._under_way.pop(index):
            pending.wait(f"round {index + 1}")

    def put(self, channel: int, index: int, buffer: torch.Tensor) -> None:
        if channel in self._incoming:
            sources, images = self._incoming[channel]
            for sender in range(len(sources)):
                images.unpack(sender, index, buffer)

    def _begin(self, index: int) -> None:
        sends, receives, packed = [], [], set[int]()
        for channel, (packer, to) in sorted(self._outgoing.items()):
            if index < len(packer.lengths) and (length := packer.lengths[index]):
                buffer = self._buffers[id(packer)][index % 2]
                if id(packer) not in packed:
                    packer.pack(index, buffer)
                    packed.add(id(packer))
                sends.append(Message(buffer[:length], to, self._tag(channel)))
                self.bytes += length
        for channel, (sources, images) in sorted(self._incoming.items()):
            for sender, source in enumerate(sources) if index < len(images.rounds) else ():
                if len(memory := images.message(sender, index)):
                    receives.append(Message(memory, source, self._tag(channel)))
        self._under_way[index] = self.group.together(sends, receives)

    def _tag(self, channel: int) -> int:
        return (self._attempt * CHANNELS + channel) & 0x7FFFFFFF
