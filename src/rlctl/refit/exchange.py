"""The exchange leg of a colocated refit: boxes that an engine worker needs from policy ranks of other nodes.

Shared memory does not reach across nodes. Such a rank sends its boxes of a round, one behind the other, to a rank on
the worker's node over the policy's own process group, and that rank puts them into the staging buffer with its own.
Rounds bound what is under way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rlctl.backends.vllm.channel import Rounds, message_bytes
from rlctl.backends.vllm.group import Group, Pending
from rlctl.backends.vllm.image import Images
from rlctl.errors import WorkerError
from rlctl.refit.packing import Packer, by_round, message_parts
from rlctl.weights.plan import TransferPlan


def agent(senders: Sequence[int], rank: int) -> int:
    """Which of the ranks beside the staging memory takes what `rank`, of another node, sends."""
    return senders[rank % len(senders)]


def policy_group(names: tuple[str, ...], rank: int, device: torch.device, timeout_s: float) -> Group:
    """The process group that the policy trains with, for messages between its ranks."""
    if not dist.is_initialized():
        raise WorkerError("Policy ranks on several nodes need a process group to exchange weights.")
    return Group.around(dist.group.WORLD, names, rank, device, timeout_s)


class Outgoing:
    """What this rank sends to the rank beside the staging memory of one channel."""

    def __init__(self, packer: Packer, group: Group, to: int, tag: int) -> None:
        self.packer, self.group, self.to, self.tag = packer, group, to, tag
        size = max(map(message_bytes, packer.parts), default=0)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=group.device) for _ in range(2)]
        self._leaving: dict[int, Pending] = {}

    def send(self, index: int) -> int:
        """Pack and begin to send round `index`; its bytes."""
        length = message_bytes(self.packer.parts[index])
        if not length:
            return 0
        self._finish(index - 2)
        buffer = self._buffers[index % 2]
        self.packer.pack(index, buffer)
        self._leaving[index] = self.group.send(buffer[:length], self.to, self.tag)
        return length

    def finish(self) -> None:
        for index in sorted(self._leaving):
            self._finish(index)

    def _finish(self, index: int) -> None:
        for one in [one for one in self._leaving if one <= index]:
            self._leaving.pop(one).wait(f"round {one + 1}")


class Incoming:
    """What ranks of other nodes send to this rank for one channel."""

    def __init__(
        self, plan: TransferPlan, rounds: Rounds, sources: Sequence[int], group: Group, device: torch.device, tag: int
    ) -> None:
        self.sources, self.group, self.tag, self.count = list(sources), group, tag, len(rounds)
        parts = [[message_parts(own) for own in by_round(plan.from_rank(source), rounds)] for source in sources]
        self._images = Images(rounds, parts, device, capacity=0)
        self._arriving: dict[int, list[tuple[int, Pending]]] = {}

    def expect(self, index: int) -> None:
        """Begin to receive round `index`."""
        if index >= self.count:
            return
        self._arriving[index] = [
            (sender, self.group.receive(message, source, self.tag))
            for sender, source in enumerate(self.sources)
            if len(message := self._images.message(sender, index))
        ]

    def put(self, index: int, buffer: torch.Tensor) -> None:
        """Wait for round `index` and put it into the staging buffer."""
        for sender, pending in self._arriving.pop(index):
            pending.wait(f"round {index + 1} of {self.count}")
            self._images.unpack(sender, index, buffer)
        self.expect(index + 2)

    def begin(self) -> None:
        self._arriving = {}
        for index in range(2):
            self.expect(index)
