"""The disk mover: policy ranks write their boxes to files, engines read them once a version is complete.

For debugging, and for engines that share nothing with the trainers but a file system.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlctl.backends.vllm.channel import encode_parts, message_bytes
from rlctl.backends.vllm.weight_files import WriteFile
from rlctl.errors import WorkerError
from rlctl.refit.packing import Packer
from rlctl.refit.records import Channel


class DiskOutlet:
    """One rank's file of a channel."""

    def __init__(self, channel: Channel, rank: int, packer: Packer) -> None:
        self.channel, self.packer = channel, packer
        self.name = channel.connection.senders[channel.senders.index(rank)]
        self._header = encode_parts(packer.parts)
        self._buffer = torch.empty(max(map(message_bytes, packer.parts), default=0), dtype=torch.uint8)

    @contextmanager
    def begin(self, version: int, epoch: int) -> Iterator[None]:
        link = self.channel.connection
        self._file = WriteFile(link.directory, version, self.channel.index, self.name, self._header)
        with self._file.file:
            yield
            self._file.finish()

    def wait(self, index: int) -> torch.Tensor:
        return self._buffer

    def done(self, index: int) -> None:
        self._file.write(self._buffer[: message_bytes(self.packer.parts[index])])

    def wait_changes(self, index: int) -> torch.Tensor:
        raise WorkerError("The disk mover sends whole boxes.")

    def done_changes(self, index: int, length: int) -> None:
        raise WorkerError("The disk mover sends whole boxes.")

    def close(self) -> None:
        pass
