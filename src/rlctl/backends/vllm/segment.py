"""Shared memory that a sender fills and a receiver reads: one file in /dev/shm, mapped by both.

It is created with its pages reserved, so that a full /dev/shm is an error here and not a bus error in the middle of a
copy, and unlinked once both sides have it mapped, so that nothing is left behind however the processes end.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.errors import MachineError, WorkerError

if TYPE_CHECKING:
    import torch

DIRECTORY = Path("/dev/shm")


def this_node() -> str:
    """A name that is the same for all processes that can share memory with this one.

    Containers of one machine have its boot id in common, but each a /dev/shm (and so a device number) of its own.
    RLCTL_NODE replaces it: tests put processes of one machine into pretend nodes.
    """
    if name := os.environ.get("RLCTL_NODE"):
        return name
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{DIRECTORY.stat().st_dev}"
    return os.uname().nodename


@dataclass(frozen=True)
class SegmentAddress:
    """How another process of the same node finds a segment."""

    path: str
    bytes: int
    node: str


class Segment:
    """A mapped segment; `buffer` is its memory as a tensor of bytes."""

    def __init__(self, address: SegmentAddress, *, create: bool = False) -> None:
        if address.node != this_node():
            raise WorkerError(
                f"Shared memory {address.path} is on node {address.node}, this process is on {this_node()}.",
                "Engines on other nodes than the trainer need the collective or the disk mover.",
            )
        self.address, self.created = address, create
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            fd = os.open(address.path, flags, 0o600)
        except FileNotFoundError:
            raise WorkerError(f"Shared memory {address.path} is gone: the process that made it ended.") from None
        try:
            if create:
                _reserve(fd, address)
            # Page tables are filled here, once, and not in the first refit.
            self._map = mmap.mmap(fd, address.bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            if create:
                self.unlink()
            raise
        finally:
            os.close(fd)
        import torch

        self.buffer: torch.Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, size: int) -> Segment:
        """A new segment of `size` bytes, filled with zeros. Raises MachineError when /dev/shm has no room for it."""
        path = DIRECTORY / f"rlctl-{os.getpid()}-{secrets.token_hex(4)}"
        return cls(SegmentAddress(str(path), max(size, 1), this_node()), create=True)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor at byte `offset`."""
        count = 1
        for length in shape:
            count *= length
        return self.buffer[offset : offset + count * dtype.itemsize].view(dtype).view(shape)

    def unlink(self) -> None:
        """Take the name away; the memory lives until the last process that has it mapped lets go."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.address.path)

    def close(self) -> None:
        """Let go of the memory (once no tensor refers to it); its creator takes the name away too."""
        if self.created:
            self.unlink()
        self.buffer = self.buffer[:0].clone()
        with contextlib.suppress(BufferError):  # a view still lives; its owner's end unmaps
            self._map.close()


def _reserve(fd: int, address: SegmentAddress) -> None:
    try:
        os.posix_fallocate(fd, 0, address.bytes)
    except OSError as error:
        os.unlink(address.path)
        free = os.statvfs(DIRECTORY)
        raise MachineError(
            f"Refit needs {address.bytes / 1e9:.2f} GB of shared memory; {DIRECTORY} has "
            f"{free.f_bavail * free.f_frsize / 1e9:.2f} GB free ({error.strerror}).",
            "Enlarge it (containers: --shm-size), or use --mover disk.",
        ) from None
