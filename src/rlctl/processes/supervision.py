"""Supervisors of a process, which end its descendants with it, and end it with the process that started it.

A supervisor adopts orphans below it, and kills all its descendants when the supervised process ends or the connection
closes. There are two, because Ray kills a worker's direct children with the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

import psutil

CLEANUP_TIMEOUT_S = 10.0
LOOK_MS = 50
"""Milliseconds between two looks at the supervised process. The end of the connection is seen at once."""


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(1, number, 0, 0, 0)  # PR_SET_PDEATHSIG of <linux/prctl.h>


def adopt_orphans(on: bool = True) -> None:
    """Make orphaned descendants children of this process."""
    ctypes.CDLL(None).prctl(36, int(on), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>


def descendants(pid: int, most: int | None = None, spared: Collection[int] = ()) -> list[int]:
    """Return the processes below a process, at most about `most`, without the spared ones and those below them."""
    descendants, waiting = [], [pid]
    while waiting and (most is None or len(descendants) <= most):
        children = [child for child in _children(waiting.pop()) if child not in spared]
        descendants += children
        waiting += children
    return descendants


def _children(pid: int) -> list[int]:
    """Read only the entries of a process in /proc, where the kernel has them."""
    children = list[int]()
    if not Path("/proc/thread-self/children").exists():  # without CONFIG_PROC_CHILDREN
        with contextlib.suppress(psutil.Error):
            children += [child.pid for child in psutil.Process(pid).children()]
        return children
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children += map(int, file.read().split())
    return children


def kill_tree(pid: int, *, root: bool = True, spared: Collection[int] = ()) -> bool:
    """Kill a process (unless `root` is False) and its descendants but the spared ones and those below them; return
    whether there were any. They are stopped first, so that none starts another meanwhile, and process groups in one
    call, which a fork bomb does not outrun."""
    stopped: set[int] = {pid} if root else set()
    if root:
        _signal(pid, signal.SIGSTOP)
    while fresh := set(descendants(pid, spared=spared)) - stopped:
        for member in fresh:
            _signal(member, signal.SIGSTOP)
        stopped |= fresh
    for member in stopped:
        _signal(member, signal.SIGKILL)
    return bool(stopped)


def _signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, and to its group if it leads one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        os.kill(pid, number)


def supervise(descriptor: int) -> None:
    """Return in a new process under two supervisors; the calling process ends with it. `descriptor`: of the
    connection."""
    _fork(descriptor, signal.SIGTERM)  # the inner supervisor has to clear up after the outer one's death
    _fork(descriptor, signal.SIGKILL)


def _fork(descriptor: int, signal_of_death: signal.Signals) -> None:
    adopt_orphans()
    parent = os.getpid()
    child = os.fork()
    if child:
        _supervise(child, descriptor)
    end_with_parent(signal_of_death)
    if os.getppid() != parent:  # the parent ended before `end_with_parent` took effect
        os._exit(1)


def _supervise(child: int, descriptor: int) -> NoReturn:
    """Wait for the end of `child` or of the connection, kill all below this process, and end as the child has."""
    status: int | None = None
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True

    def reap() -> int | None:
        """Collect ended children; return the supervised one's status if among them."""
        status = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == child else status
        return status

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    poll = select.poll()
    poll.register(descriptor, 0)  # no event but the closing of the other end
    while status is None and not stopped and not poll.poll(LOOK_MS):
        status = reap()
    deadline = time.monotonic() + CLEANUP_TIMEOUT_S
    while kill_tree(os.getpid(), root=False) and time.monotonic() < deadline:  # also processes started meanwhile
        time.sleep(0.005)
        reap()
    if status is not None and os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(0 if status is None else os.WEXITSTATUS(status))
