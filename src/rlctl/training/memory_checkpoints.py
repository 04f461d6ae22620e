"""Checkpoints in the memory of hosts: written beside training after each step, and loaded where the policy is lost."""

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
"""Steps in a row without a folder after which no more checkpoints are taken."""
LOOK_S = 0.1
"""Between two looks at whether a checkpoint is written."""


class Hosts(Protocol):
    """The memory of the policy's hosts."""

    def renew(self) -> None:
        """Go on with today's hosts of the policy."""

    def make(self, step: int) -> Path:
        """Make the folder of a step, of one name on each host."""
        ...

    def spread(self, step: int) -> str | None:
        """Copy what each host has written of a step to the next host; return why there is no room for another one."""
        ...

    def gather(self, step: int) -> Path | None:
        """Return a folder in which each of today's hosts has all files of a step; None: some are lost."""
        ...

    def keep(self, step: int | None) -> None:
        """Remove all but the files of one step."""


class MemoryCheckpoints:
    """Takes at most one checkpoint at a time; where one is still being written, a step goes without."""

    def __init__(
        self, policy: PolicyClient, hosts: Hosts, every: int, limit_s: float, tell: Callable[[str], None]
    ) -> None:
        self._policy, self._hosts, self._every, self._limit_s, self._tell = policy, hosts, every, limit_s, tell
        self.step: int | None = None
        """The step after which the newest complete one was begun."""
        self._digests = dict[str, str]()
        self._under_way: Future[None] | None = None
        self._failures = 0

    def begin(self, step: int) -> None:
        """Take a snapshot after `step` and start writing it, unless another one is being written."""
        if not self._every or step % self._every or not self._ended():
            return
        try:
            folder = self._hosts.make(step)
        except LOSSES as error:  # the policy may be lost too, which it tells itself
            self._failures += 1
            if self._failures == MOST_FAILURES:
                self._end(first_line(error))
            return
        self._failures = 0
        self._policy.save_begin(folder, True)
        done = self._under_way = Future()
        threading.Thread(target=self._complete, args=(step, done), name="memory checkpoint", daemon=True).start()

    def _ended(self) -> bool:
        """Whether none is being written. An error of the last one ends them all."""
        if self._under_way is not None and self._under_way.done():
            under_way, self._under_way = self._under_way, None
            if error := under_way.exception():
                self._end(first_line(error))
        return self._under_way is None and self._every > 0

    def _end(self, why: str) -> None:
        self._every = 0
        self._tell(f"no more checkpoints are taken to memory: {why}")

    def _complete(self, step: int, done: Future[None]) -> None:
        try:
            deadline = time.monotonic() + self._limit_s
            while not self._policy.save_written(True):
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(f"that of step {step} was not written in {self._limit_s:.0f} s.")
                time.sleep(LOOK_S)
            digests = self._policy.save_finish(True)
            short = self._hosts.spread(step)
            self.step, self._digests = step, digests
            self._hosts.keep(step)
            if short is not None:
                self._end(short)
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 - the next step says it
            done.set_exception(error)

    def lose(self) -> None:
        """Give up the one being written, the policy's processes being ended."""
        if self._under_way is not None:
            self._under_way.exception()
            self._under_way = None

    def renew(self) -> None:
        """Go on on the hosts where the policy is now."""
        try:
            self._hosts.renew()
        except LOSSES as error:
            self._end(first_line(error))

    def newest(self, least: int, most: int) -> tuple[int, Path] | None:
        """Return the step of the newest one, between two steps, and its folder; None: there is none."""
        if self.step is None or not least <= self.step <= most:
            return None
        try:
            self._hosts.keep(self.step)
            found, problems = self._hosts.gather(self.step), ["some of its files were lost with their hosts"]
            if found is not None:
                problems = self._policy.damaged_files(found, self._digests)
        except LOSSES as error:
            found, problems = None, [first_line(error)]
        if found is None or problems:
            self._tell(f"the checkpoint of step {self.step} in memory cannot be used: {problems[0]}")
            self.step = None
            return None
        return self.step, found
