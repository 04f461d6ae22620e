"""Supervisors of the scoring process: processes that reward functions start end with it.

A supervisor adopts orphans below it and kills all when the scoring process ends or the worker's connection closes.
There are two, because Ray kills a worker's direct children with it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from typing import NoReturn

import psutil

from rlctl.child import adopt_orphans, end_with_parent

CLEANUP_TIMEOUT_S = 10.0
LOOK_MS = 50
"""Milliseconds between two looks at the supervised process; the end of the worker is seen at once."""


def supervise(connection: int) -> None:
    """Return in a new process under two supervisors; the calling process ends with it. `connection`: descriptor of the
    worker's socket."""
    os.dup2(2, 1)  # what a user's function prints belongs in the log, not on a stdout that someone parses
    _fork(connection, signal.SIGTERM)  # the inner supervisor has to clear up after the outer one's death
    _fork(connection, signal.SIGKILL)


def _fork(connection: int, signal_of_death: signal.Signals) -> None:
    adopt_orphans()
    parent = os.getpid()
    child = os.fork()
    if child:
        _supervise(child, connection)
    end_with_parent(signal_of_death)
    if os.getppid() != parent:  # it had died before
        os._exit(1)


def _supervise(child: int, connection: int) -> NoReturn:
    """Wait for the end of `child` or of the worker, kill all that is below this process, and end as the child has."""
    status: int | None = None
    told_to_end = False

    def told(number: int, frame: object) -> None:
        nonlocal told_to_end
        told_to_end = True

    def reap() -> int | None:
        """Collect ended children; return the supervised one's status if among them."""
        found = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                found = ended[1] if ended[0] == child else found
        return found

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, told)
    poll = select.poll()
    poll.register(connection, 0)  # no event but the closing of the other end
    while status is None and not told_to_end and not poll.poll(LOOK_MS):
        status = reap()
    deadline = time.monotonic() + CLEANUP_TIMEOUT_S
    while (below := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in below:  # also those that are started meanwhile
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.005)
        reap()
    if status is not None and os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(0 if status is None else os.WEXITSTATUS(status))
