"""The collective mover: policy ranks send their boxes to engine workers over a process group of both (gloo, NCCL)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlctl.backends.vllm.channel import encode_parts, message_bytes
from rlctl.backends.vllm.group import Group, Pending
from rlctl.backends.vllm.sparse import region_bytes
from rlctl.refit.packing import Packer
from rlctl.refit.records import Channel


class CollectiveOutlet:
    """One rank's messages to the first receiver of a channel; two buffers, so that packing and sending overlap."""

    def __init__(self, channel: Channel, packer: Packer, group: Group) -> None:
        link = channel.connection
        self.packer, self.group, self.tag = packer, group, channel.index
        self.to = group.names.index(link.receivers[0])
        size = max(map(message_bytes, packer.parts), default=0)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=group.device) for _ in range(2)]
        self._leaving: dict[int, Pending] = {}
        self._region = region_bytes(link.capacity, len(link.senders))
        self._regions: list[torch.Tensor] = []

    def introduce(self) -> None:
        """Tell the receiver which boxes come in which round, once."""
        self.group.send_bytes(encode_parts(self.packer.parts), self.to, self.tag)

    @contextmanager
    def begin(self, version: int, epoch: int) -> Iterator[None]:
        try:
            self._leaving = {}
            told = torch.tensor([version], dtype=torch.int64, device=self.group.device)
            self._leaving[-1] = self.group.send(told, self.to, self.tag)
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

    def done(self, index: int) -> None:
        if length := message_bytes(self.packer.parts[index]):
            if self.group.device.type != "cpu":
                torch.cuda.current_stream(self.group.device).synchronize()
            self._leaving[index] = self.group.send(self._buffers[index % 2][:length], self.to, self.tag)

    def wait_changes(self, index: int) -> torch.Tensor:
        if index - 2 in self._leaving:
            self._leaving.pop(index - 2).wait(f"round {index - 1}")
        if not self._regions:
            self._regions = [torch.empty(self._region, dtype=torch.uint8, device=self.group.device) for _ in range(2)]
        return self._regions[index % 2]

    def done_changes(self, index: int, length: int) -> None:
        if self.group.device.type != "cpu":
            torch.cuda.current_stream(self.group.device).synchronize()
        self._leaving[index] = self.group.send(self._regions[index % 2][:length], self.to, self.tag)

    def close(self) -> None:
        self.group.close()
