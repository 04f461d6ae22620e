"""Supervisors of the process that scores: what reward functions start ends with it, however it ends.

    reward worker -- supervisor -- supervisor -- scoring process -- what the reward functions start

A supervisor adopts every process below it whose own parent has ended, and kills them all as soon as the scoring process
ends or the worker's end of the connection is closed, which the kernel does for a worker that is killed. There are two,
because either may be killed itself: Ray kills the direct children of a worker together with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from typing import NoReturn

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
OUTPUT_LIMIT_BYTES = 1 << 20
OUTPUT_TAIL_BYTES = 1 << 16
GRACE_S = 3.0
CLEANUP_TIMEOUT_S = 10.0
CHUNK_BYTES = 1 << 16


def supervise(connection: int) -> None:
    """Return in a new process with two supervisors above it; its stdout and stderr go to this process's stderr, up to
    a limit. The calling process becomes the outer supervisor and ends with the exit code or signal of the new one.

    `connection` is the descriptor of a socket whose other end the worker holds.
    """
    _fork(connection, None, signal.SIGTERM)  # the inner supervisor has to clear up after the outer one's death
    output, printed = os.pipe()
    _fork(connection, output, signal.SIGKILL)
    os.close(output)
    # What a user's function prints belongs in the log, not on a stdout that someone parses.
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(printed)


def _fork(connection: int, output: int | None, signal_of_death: signal.Signals) -> None:
    """Fork, return in the child, and supervise it in the parent."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    parent = os.getpid()
    child = os.fork()
    if child:
        Supervisor(child, connection, output).run()
    prctl(PR_SET_PDEATHSIG, signal_of_death, 0, 0, 0)
    if os.getppid() != parent:  # it had died before
        os._exit(1)


class Supervisor:
    """Waits for the end of `child` or of the worker, and kills all that is below this process then."""

    def __init__(self, child: int, connection: int, output: int | None) -> None:
        self._child, self._status, self._told_to_end = child, None, False
        self._output = output
        self._log = CappedLog()
        self._poll = select.poll()
        self._connection = connection
        self._poll.register(connection, 0)  # no event but the closing of the other end
        self._wake, wakes = os.pipe()
        for end in (self._wake, wakes):
            os.set_blocking(end, False)
        self._poll.register(self._wake, select.POLLIN)
        signal.set_wakeup_fd(wakes)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._signalled)
        if output is not None:
            os.set_blocking(output, False)
            self._poll.register(output, select.POLLIN)

    def _signalled(self, number: int, frame: object) -> None:
        self._told_to_end |= number != signal.SIGCHLD

    def run(self) -> NoReturn:
        while self._reap() and not self._told_to_end:
            ready = dict(self._poll.poll())
            if self._connection in ready:
                break
            self._read_events(ready)
        if self._output is None:
            self._wait_for_the_inner_supervisor()
        status = self._status  # None where this supervisor ends the child
        self._kill_all()
        if self._output is not None:
            self._relay()
            self._log.close()
        _exit(status)

    def _read_events(self, ready: dict[int, int]) -> None:
        if self._wake in ready:
            os.read(self._wake, CHUNK_BYTES)
        if self._output in ready:
            self._relay()

    def _relay(self) -> None:
        """Pass on what the child and its own children have printed."""
        assert self._output is not None  # it was given one
        with contextlib.suppress(BlockingIOError):
            for _ in range(OUTPUT_LIMIT_BYTES // CHUNK_BYTES):  # and look for the end of the worker in between
                chunk = os.read(self._output, CHUNK_BYTES)
                if not chunk:  # nobody can write any more
                    with contextlib.suppress(KeyError):
                        self._poll.unregister(self._output)
                    return
                self._log.write(chunk)

    def _reap(self) -> bool:
        """Bury children that have ended; return whether the supervised one is still running."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._child:
                    self._status = ended[1]
        return self._status is None

    def _wait_for_the_inner_supervisor(self) -> None:
        """Let it write what it holds of the output; it sees the same end as this one."""
        deadline = time.monotonic() + GRACE_S
        while self._reap() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _kill_all(self) -> None:
        """Kill every process below this one, also those that are started meanwhile."""
        deadline = time.monotonic() + CLEANUP_TIMEOUT_S
        while (below := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
            for process in below:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.005)
            self._reap()


def _exit(status: int | None) -> NoReturn:
    """End as the child has ended."""
    if status is not None and os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(0 if status is None else os.WEXITSTATUS(status))


class CappedLog:
    """Writes the first `OUTPUT_LIMIT_BYTES` to stderr as they come, and of the rest the last `OUTPUT_TAIL_BYTES`."""

    def __init__(self) -> None:
        self._room, self._dropped, self._tail = OUTPUT_LIMIT_BYTES, 0, b""

    def write(self, chunk: bytes) -> None:
        now, later = chunk[: self._room], chunk[self._room :]
        self._room -= len(now)
        _write(now)
        if not later:
            return
        if not self._dropped:
            _write(
                f"\nrlctl: the reward functions have printed more than {OUTPUT_LIMIT_BYTES:,} bytes; of the rest only "
                f"the last {OUTPUT_TAIL_BYTES:,} are kept, and written when their process ends\n".encode()
            )
        self._dropped += len(later)
        self._tail = (self._tail + later)[-OUTPUT_TAIL_BYTES:]

    def close(self) -> None:
        if self._dropped > len(self._tail):
            _write(f"\nrlctl: {self._dropped - len(self._tail):,} bytes of output were dropped here\n".encode())
        _write(self._tail)


def _write(data: bytes) -> None:
    """Write to stderr. A full disk or a closed terminal loses the output and nothing else."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
