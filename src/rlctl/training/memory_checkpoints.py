"""Checkpoints in the memory of hosts: written in the background during training, and loaded after a loss of the
policy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from rlctl.backends.clients import PolicyClient
from rlctl.errors import WaitTimeoutError, WorkerError, first_line

LOSSES = (WorkerError, WaitTimeoutError)
MOST_FAILURES = 3
"""Number of consecutive failures to make a folder after which memory checkpoints stop."""
LOOK_S = 0.1
"""Interval between two checks whether a checkpoint is written."""


class Hosts(Protocol):
    """The memory of the policy's hosts."""

    def renew(self) -> None:
        """Switch to the policy's current hosts."""

    def make(self, step: int) -> Path:
        """Make the folder of a step, with the same path on each host."""
        ...

    def spread(self, step: int) -> str | None:
        """Copy each host's files of a step to the next host. Return a reason if there is no memory for another step;
        None: there is."""
        ...

    def gather(self, step: int) -> Path | None:
        """Give each current host all files of a step, and return their folder; None: some files are lost."""
        ...

    def keep(self, step: int | None) -> None:
        """Remove all files, except the files of `step`."""


class MemoryCheckpoints:
    """Writes one checkpoint at a time; skips a step while the previous checkpoint is unfinished."""

    def __init__(
        self, policy: PolicyClient, hosts: Hosts, every: int, limit_s: float, tell: Callable[[str], None]
    ) -> None:
        self._policy, self._hosts, self._every, self._limit_s, self._tell = policy, hosts, every, limit_s, tell
        self.step: int | None = None
        """Step of the newest complete checkpoint; None: there is none."""
        self._digests = dict[str, str]()
        self._under_way: Future[None] | None = None
        self._failures = 0

    def begin(self, step: int) -> None:
        """Take a snapshot after `step` and write it in the background, unless the previous one is unfinished."""
        if not self._every or step % self._every or not self._ended():
            return
        try:
            folder = self._hosts.make(step)
        except LOSSES as error:  # if the policy is lost too, its next call raises
            self._failures += 1
            if self._failures == MOST_FAILURES:
                self._end(first_line(error))
            return
        self._failures = 0
        self._policy.save_begin(folder, True)
        done = self._under_way = Future()
        threading.Thread(target=self._complete, args=(step, done), name="memory checkpoint", daemon=True).start()

    def _ended(self) -> bool:
        """Return whether a new checkpoint may begin. An error of the last checkpoint stops memory checkpoints."""
        if self._under_way is not None and self._under_way.done():
            under_way, self._under_way = self._under_way, None
            if error := under_way.exception():
                self._end(first_line(error))
        return self._under_way is None and self._every > 0

    def _end(self, reason: str) -> None:
        self._every = 0
        self._tell(f"checkpoints in memory stop: {reason}")

    def _complete(self, step: int, done: Future[None]) -> None:
        try:
            deadline = time.monotonic() + self._limit_s
            while not self._policy.save_written(True):
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(f"the checkpoint of step {step} was not written in {self._limit_s:.0f} s.")
                time.sleep(LOOK_S)
            digests = self._policy.save_finish(True)
            short = self._hosts.spread(step)
            self.step, self._digests = step, digests
            self._hosts.keep(step)
            if short is not None:
                self._end(short)
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 - `_ended` reports it in the next step
            done.set_exception(error)

    def lose(self) -> None:
        """Drop an unfinished checkpoint after the end of the policy's processes."""
        if self._under_way is not None:
            self._under_way.exception()  # wait for its thread
            self._under_way = None

    def renew(self) -> None:
        """Switch to the policy's current hosts."""
        try:
            self._hosts.renew()
        except LOSSES as error:
            self._end(first_line(error))

    def newest(self, least: int, most: int) -> tuple[int, Path] | None:
        """Return (step, folder) of the newest intact checkpoint in memory with `least` <= step <= `most`, or None."""
        if self.step is None or not least <= self.step <= most:
            return None
        try:
            self._hosts.keep(self.step)  # first, to free memory for the copies
            folder, problems = self._hosts.gather(self.step), ["some of its files were lost with their hosts"]
            if folder is not None:
                problems = self._policy.damaged_files(folder, self._digests)
        except LOSSES as error:
            folder, problems = None, [first_line(error)]
        if folder is None or problems:
            self._tell(f"the checkpoint of step {self.step} in memory cannot be used: {problems[0]}")
            self.step = None
            return None
        return self.step, folder
