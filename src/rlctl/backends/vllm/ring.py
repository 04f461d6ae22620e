"""Two staging buffers in shared memory that senders fill and receivers read in turn, handed over by counters.

Round k is in buffer k % 2. A sender fills it once every receiver has read round k - 2; a receiver reads it once every
sender has filled its part. Each side counts in a cell of its own, so no lock is needed and nothing is sent a round.
That a count is seen after the bytes it speaks of needs a processor that keeps stores and loads in order (x86-64 does).
Whoever fails says so in its cell, and whoever waits looks after the processes waited for, so that an end that broke is
an error at the other ends at once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from rlctl.backends.vllm.segment import Segment
from rlctl.errors import PeerFailedError, RlctlError, VerificationError, WaitTimeoutError, WorkerError

CELL = 128  # bytes: two cache lines, so that no two processes write to one (processors fetch them in pairs)
PAGE = 4096
LOOK_AFTER_S = 0.02
LONGEST_PAUSE_S = 0.001
_EPOCH = 1 << 32
# Words of a cell.
DONE, PROCESS, FAILED, VERSION = 0, 1, 2, 3


def ring_bytes(parties: int, buffers: int, capacity: int) -> int:
    """Size of the segment of a ring."""
    return _header(parties) + buffers * capacity


def _header(parties: int) -> int:
    return -(-parties * CELL // PAGE) * PAGE


class Ring:
    """One end. `senders` and `receivers` are names for messages; `me` counts senders first, then receivers."""

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
        """`memory`: buffers that are elsewhere (on a GPU), so that the segment holds the counters alone.

        Raises RlctlError where the segment is smaller than such a ring.
        """
        expected = ring_bytes(len(senders) + len(receivers), 0 if memory is not None else buffers, capacity)
        if segment.address.bytes < expected:
            name, held = segment.address.path, segment.address.bytes
            raise RlctlError(f"Shared memory {name} has {held} bytes; {expected} were expected.")
        self.segment, self.me, self.timeout_s = segment, me, timeout_s
        self.names = (*senders, *receivers)
        self._senders, self._receivers = range(len(senders)), range(len(senders), len(self.names))
        header = segment.buffer[: _header(len(self.names))].numpy().view(np.int64)
        self._cells = header[: len(self.names) * CELL // 8].reshape(-1, CELL // 8)
        first = _header(len(self.names))
        own = [segment.buffer[first + i * capacity : first + (i + 1) * capacity] for i in range(buffers)]
        self.buffers = memory if memory is not None else own
        self._epoch, self._version, self._deadline = 0, 0, 0.0
        self._cells[me, PROCESS] = os.getpid()

    def buffer(self, index: int) -> torch.Tensor:
        """The memory of round `index`."""
        return self.buffers[index % len(self.buffers)]

    @contextlib.contextmanager
    def refit(self, version: int, epoch: int) -> Iterator[None]:
        """Take part in attempt number `epoch` (rising from 1); whatever is raised inside is told to the other ends."""
        self._epoch, self._deadline = epoch, time.monotonic() + self.timeout_s
        self._version = self._cells[self.me, VERSION] = version
        self._count(0)
        try:
            yield
        except BaseException:
            self._cells[self.me, FAILED] = epoch
            raise

    def wait_free(self, index: int) -> torch.Tensor:
        """The buffer of round `index`, once every receiver has read what was in it."""
        self._wait(self._receivers, max(0, index - len(self.buffers) + 1), "load", index - len(self.buffers))
        return self.buffer(index)

    def filled(self, index: int) -> None:
        """This sender's part of round `index` is there."""
        self._count(index + 1)

    def wait_filled(self, index: int) -> torch.Tensor:
        """The buffer of round `index`, once every sender has filled its part."""
        self._wait(self._senders, index + 1, "pack", index)
        for sender in self._senders if index == 0 else ():
            if self._cells[sender, VERSION] != self._version:
                raise VerificationError(
                    f"{self.names[sender]} sends version {self._cells[sender, VERSION]} of the weights; "
                    f"{self.names[self.me]} was told to expect version {self._version}."
                )
        return self.buffer(index)

    def read(self, index: int) -> None:
        """This receiver needs the buffer of round `index` no more."""
        self._count(index + 1)

    def close(self) -> None:
        """Let go of the memory."""
        self._cells = self._cells[:0].copy()
        self.buffers = []
        self.segment.close()

    def _count(self, rounds: int) -> None:
        self._cells[self.me, DONE] = self._epoch * _EPOCH + rounds

    def _wait(self, peers: range, rounds: int, doing: str, index: int) -> None:
        for peer in peers:
            if self._cells[peer, DONE] < self._epoch * _EPOCH + rounds:
                self._wait_for(
                    peer, self._epoch * _EPOCH + rounds, f"{doing} round {index + 1}" if index >= 0 else "begin"
                )
            if self._cells[peer, DONE] >= (self._epoch + 1) * _EPOCH:
                raise WorkerError(f"This transfer was given up: {self.names[peer]} is at a later one.")

    def _wait_for(self, peer: int, count: int, doing: str) -> None:
        pause, look = 0.0, time.monotonic() + LOOK_AFTER_S
        while self._cells[peer, DONE] < count:
            if self._cells[peer, FAILED] == self._epoch:
                raise PeerFailedError(f"{self.names[peer]} failed before it could {doing}.")
            now = time.monotonic()
            if now > self._deadline:
                raise WaitTimeoutError(
                    f"{self.names[peer]} did not {doing} within {self.timeout_s:.0f} s of the start."
                )
            if now > look:
                self._look_after(peer, doing)
                look = now + LOOK_AFTER_S
            time.sleep(pause)
            pause = min(LONGEST_PAUSE_S, pause + 2e-5)

    def _look_after(self, peer: int, doing: str) -> None:
        process = int(self._cells[peer, PROCESS])
        if process and not is_alive(process):
            raise WorkerError(f"{self.names[peer]} (process {process}) died before it could {doing}.")


def is_alive(process: int) -> bool:
    """Whether a process of this machine runs; one that has ended and was not collected yet does not."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")
