"""Staging memory that policy ranks write and engine workers of their node read: two buffers, handed over by counters.

The memory is one file in /dev/shm (`Segment`), with reserved pages (a full /dev/shm is an error, not a bus error),
unlinked once both sides have mapped it. Counters (`Ring`) hand over the buffers: round k uses buffer k % 2; a sender
fills it after every receiver read round k - 2, a receiver reads it after every sender filled it. Each side counts in
its own cell, without locks or messages. Counts must follow their bytes: x86-64 keeps the order, and `keep_order` does
on ARM. Failures are noted in the cell, and waiting ends check that the others live.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rlctl.cluster.session_files import note_shared_memory
from rlctl.errors import MachineError, PeerFailedError, VerificationError, WaitTimeoutError, WorkerError
from rlctl.transport.rounds import Channel, Connection, Rounds, SegmentAddress, cut_rounds

DIRECTORY = Path("/dev/shm")
CELL = 128  # bytes: two cache lines, so that no two processes write to one (processors fetch them in pairs)
PAGE = 4096
LOOK_AFTER_S = 0.02
LONGEST_PAUSE_S = 0.001
KEEPS_ORDER = platform.machine() == "x86_64"
MEMBARRIER = (4, 2)  # linux/membarrier.h: register for the expedited barrier of all processes, and have one
_LIBC = ctypes.CDLL(None, use_errno=True)
_ROUNDS_AN_ATTEMPT = 1 << 32  # counters of later attempts exceed all earlier ones
# Words of a cell.
DONE, PROCESS, FAILED, VERSION = 0, 1, 2, 3


def this_node() -> str:
    """Return a name shared by processes that can share memory (RLCTL_NODE in tests). Containers share a boot id but
    have different /dev/shm devices."""
    if name := os.environ.get("RLCTL_NODE"):
        return name
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{DIRECTORY.stat().st_dev}"
    return os.uname().nodename


def keep_order() -> None:
    """Order this process's memory accesses for all processes. Raises MachineError if the system refuses."""
    if KEEPS_ORDER:
        return
    number = {"x86_64": 324, "aarch64": 283}.get(platform.machine())  # membarrier(2) has no function in glibc
    if number is None or any(_LIBC.syscall(number, command, 0, 0) for command in MEMBARRIER):
        raise MachineError(
            f"Shared memory on {platform.machine()} needs membarrier: {os.strerror(ctypes.get_errno())}.",
            "Allow that system call in the container, or use --mover disk.",
        )


class Segment:
    """A mapped segment; `buffer` is its memory as a tensor of bytes."""

    def __init__(self, address: SegmentAddress, *, create: bool = False) -> None:
        if address.node != this_node():
            raise WorkerError(
                f"Shared memory {address.path} is on node {address.node}, but this process is on {this_node()}.",
                "Engines on other nodes than the trainer need the collective or the disk mover.",
            )
        self.address, self.created = address, create
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            fd = os.open(address.path, flags, 0o600)
        except FileNotFoundError:
            raise WorkerError(f"Shared memory {address.path} is gone: the process that made it has ended.") from None
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
        self.buffer = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, size: int) -> Segment:
        """A new segment of `size` bytes, filled with zeros. Raises MachineError when /dev/shm has no room for it."""
        path = DIRECTORY / f"rlctl-{os.getpid()}-{secrets.token_hex(4)}"
        note_shared_memory([path])  # of a process that is killed before it can unlink it
        return cls(SegmentAddress(str(path), max(size, 1), this_node()), create=True)

    def unlink(self) -> None:
        """Remove the name; the memory lives as long as a process has it mapped."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.address.path)

    def close(self) -> None:
        """Let go of the memory (once no tensor refers to it); its creator removes the name too."""
        if self.created:
            self.unlink()
        self.buffer = self.buffer[:0].clone()
        with contextlib.suppress(BufferError):  # a view still lives; the memory is unmapped with its owner
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


def ring_bytes(parties: int, buffers: int, capacity: int) -> int:
    """Size of the segment of a ring in bytes."""
    return _header(parties) + buffers * capacity


def _header(parties: int) -> int:
    return -(-parties * CELL // PAGE) * PAGE


class Ring:
    """One end of a ring. `senders` and `receivers` are names for messages; `me` counts senders first."""

    def __init__(
        self,
        segment: Segment,
        senders: tuple[str, ...],
        receivers: tuple[str, ...],
        me: int,
        *,
        capacity: int,
        buffers: int,
        timeout_s: float,
        memory: list[torch.Tensor] | None = None,
    ) -> None:
        """`memory`: buffers elsewhere (GPU); the segment then has only counters."""
        self.segment, self.me, self.timeout_s = segment, me, timeout_s
        self.names = (*senders, *receivers)
        self._senders, self._receivers = range(len(senders)), range(len(senders), len(self.names))
        first = _header(len(self.names))
        self._cells = segment.buffer[:first].numpy().view(np.int64).reshape(-1, CELL // 8)
        regions = [segment.buffer[first + i * capacity : first + (i + 1) * capacity] for i in range(buffers)]
        self.buffers = memory if memory is not None else regions
        self._attempt, self._version, self._deadline = 0, 0, 0.0
        self._cells[me, PROCESS] = os.getpid()

    def buffer(self, index: int) -> torch.Tensor:
        return self.buffers[index % len(self.buffers)]

    @contextlib.contextmanager
    def refit(self, version: int, attempt: int) -> Iterator[None]:
        """Take part in attempt `attempt` (rising from 1); exceptions inside reach the other ends."""
        self._attempt, self._deadline = attempt, time.monotonic() + self.timeout_s
        self._version = self._cells[self.me, VERSION] = version
        self._count(0)
        try:
            yield
        except BaseException:
            self._cells[self.me, FAILED] = attempt
            raise

    def wait_free(self, index: int) -> torch.Tensor:
        """Return round `index`'s buffer after every receiver has read its previous content."""
        self._wait(self._receivers, max(0, index - len(self.buffers) + 1), "load", index - len(self.buffers))
        return self.buffer(index)

    def filled(self, index: int) -> None:
        """Say that this sender's part of round `index` is there."""
        self._count(index + 1)

    def wait_filled(self, index: int) -> torch.Tensor:
        """The buffer of round `index`, once every sender has filled its part."""
        self._wait(self._senders, index + 1, "pack", index)
        for sender in self._senders if index == 0 else ():
            if self._cells[sender, VERSION] != self._version:
                raise VerificationError(
                    f"{self.names[sender]} sends version {self._cells[sender, VERSION]} of the weights; "
                    f"{self.names[self.me]} expects version {self._version}."
                )
        return self.buffer(index)

    def read(self, index: int) -> None:
        """Say that this receiver no longer needs the buffer of round `index`."""
        self._count(index + 1)

    def close(self) -> None:
        self._cells = self._cells[:0].copy()
        self.buffers = []
        self.segment.close()

    def _count(self, rounds: int) -> None:
        keep_order()
        self._cells[self.me, DONE] = self._attempt * _ROUNDS_AN_ATTEMPT + rounds

    def _wait(self, peers: range, rounds: int, doing: str, index: int) -> None:
        count = self._attempt * _ROUNDS_AN_ATTEMPT + rounds
        for peer in peers:
            if self._cells[peer, DONE] < count:
                self._wait_for(peer, count, f"{doing} round {index + 1}" if index >= 0 else "begin")
            if self._cells[peer, DONE] >= (self._attempt + 1) * _ROUNDS_AN_ATTEMPT:
                raise WorkerError(f"This transfer was given up: {self.names[peer]} has begun a later one.")
        keep_order()

    def _wait_for(self, peer: int, count: int, doing: str) -> None:
        name, pause, look = self.names[peer], 0.0, time.monotonic() + LOOK_AFTER_S
        while self._cells[peer, DONE] < count:
            if self._cells[peer, FAILED] == self._attempt:
                raise PeerFailedError(f"{name} failed before it could {doing}.")
            now = time.monotonic()
            if now > self._deadline:
                raise WaitTimeoutError(f"{name} did not {doing} within {self.timeout_s:.0f} s of the start.")
            if now > look:
                process, look = int(self._cells[peer, PROCESS]), now + LOOK_AFTER_S
                if process and not is_alive(process):
                    raise WorkerError(f"{name} (process {process}) died before it could {doing}.")
            time.sleep(pause)
            pause = min(LONGEST_PAUSE_S, pause + 2e-5)


def is_alive(process: int) -> bool:
    """Whether a process of this machine runs. A zombie does not."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


@dataclass
class Staging:
    """A channel's staging memory on its creating rank."""

    segment: Segment
    """The counters; the two buffers too, unless they are on a device."""
    buffers: list[torch.Tensor] | None = None
    """The two buffers on a device."""
    handles: tuple[tuple, ...] = ()
    """Handles by which another process opens `buffers`."""


def host_staging(channel: Channel) -> Staging:
    link, rounds = channel.connection, cut_rounds(channel.layout, channel.connection.capacity)
    parties = len(link.senders) + len(link.receivers)
    return Staging(Segment.create(ring_bytes(parties, min(2, len(rounds)), link.capacity)))


def ring_of(
    link: Connection, rounds: Rounds, me: int, memory: list[torch.Tensor] | None, segment: Segment | None = None
) -> Ring:
    assert link.address is not None
    return Ring(
        segment or Segment(link.address),
        link.senders,
        link.receivers,
        me,
        capacity=link.capacity,
        buffers=0 if memory else min(2, len(rounds)),
        timeout_s=link.timeout_s,
        memory=memory,
    )
