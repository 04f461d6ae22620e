"""A start that stands still: stacks of the threads after a quiet minute, the end of the process after five.

A thread of this class may run while the main thread waits for a lock that it will never get, so it imports nothing,
prints through no stream that others lock, and ends the process without Python's own clearing up. Ray's processes and
child processes end with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self

import psutil

LOOK_S = 5.0
QUIET_S, LIMIT_S = 60.0, 300.0
LEAST_CPU_S, LEAST_BYTES = 0.2, 1 << 20
"""A process with less CPU time and fewer written bytes (a download writes) in QUIET_S is stalled. Ray's threads in an
idle driver use 0.04 s a minute."""
OF_RAY = ("gcs_server", "raylet")
WATCHERS = ("display", "_RefreshThread")
"""Threads that do not advance the start, by name or class; the second draws a terminal's line."""
PACKAGE = str(Path(__file__).parents[1])
SHOW_CURSOR = "\x1b[?25h"

_bounded_waits = 0


@contextlib.contextmanager
def bounded_wait() -> Iterator[None]:
    """Exempt a wait that has a separate limit, or names the process that it is for."""
    global _bounded_waits
    _bounded_waits += 1
    try:
        yield
    finally:
        _bounded_waits -= 1


class Use(NamedTuple):
    """What this process and its children, without Ray's, have used so far."""

    cpu_s: float
    written: int


class StartWatch:
    """Watches the start of a run in a `with` block, until `stop`."""

    def __init__(
        self,
        doing: Callable[[], str],
        log: Callable[[], Path | None],
        *,
        ends_process: bool,
        look_s: float = LOOK_S,
    ) -> None:
        """`doing` names the work under way. `log` is the log file for the stacks; None: there is none yet, and they go
        to a temporary file. `ends_process`: this process is a command, not a program that calls rlctl. `look_s`:
        seconds between two looks; shorter ones shorten and lower all limits likewise."""
        self._doing, self._log, self._ends_process, self._look_s = doing, log, ends_process, look_s
        self._stopped = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="start watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the watch, with the start or where each wait has a limit."""
        self._stopped.set()

    def _watch(self) -> None:
        looks, most = round(QUIET_S / LOOK_S), round(LIMIT_S / LOOK_S)
        recent, quiet = deque[Use](maxlen=looks + 1), 0
        # Looks are counted, because a process that was stopped for an hour did not stand still.
        while not self._stopped.wait(self._look_s):
            recent.append(used())
            is_quiet = len(recent) > looks and not _bounded_waits and self._is_little(recent[0], recent[-1])
            quiet = quiet + 1 if is_quiet else 0
            if quiet == 1:
                self._report("No CPU time was used for a minute")
            if quiet == most - looks and self._ends_process:
                self._report("The start stands still: no CPU time was used for five minutes", last=True)

    def _is_little(self, before: Use, now: Use) -> bool:
        share = self._look_s / LOOK_S
        return now.cpu_s - before.cpu_s < LEAST_CPU_S * share and now.written - before.written < LEAST_BYTES * share

    def _report(self, status: str, *, last: bool = False) -> None:
        path = self._log() or Path(tempfile.gettempdir()) / f"rlctl-stacks-{os.getpid()}.txt"
        where = place_of(sys._current_frames().get(self._main))
        line = f"{status} ({self._doing()}; the main thread is {where})"
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(file, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n".encode())
            faulthandler.dump_traceback(file, all_threads=True)
            os.close(file)
        message = f"{line}. The stacks of all threads are in {path}.\n"
        if last:
            message = f"{SHOW_CURSOR * sys.__stderr__.isatty() if sys.__stderr__ else ''}rlctl: {message}"
            message += "  Run the command again; if it stands still at the same place, report it with that file.\n"
        with contextlib.suppress(OSError):
            os.write(2, message.encode())
        if last:
            os._exit(1)


def used() -> Use:
    """Return the CPU time and the bytes written so far, without the calling thread and the display's threads."""
    children = sum(os.times()[2:4]) + sum(map(_cpu_below, _children(psutil.Process())))
    watchers = sum(
        _cpu_of_thread(thread.native_id)
        for thread in threading.enumerate()
        if thread.name in WATCHERS or type(thread).__name__ in WATCHERS
    )
    # Last and together: a look at the children takes milliseconds of this thread, more when there are many processes.
    return Use(time.process_time() - time.thread_time() - watchers + children, _written())


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [child for child in process.children() if child.name() not in OF_RAY]
    return []


def _cpu_below(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        return sum(process.cpu_times()[:4]) + sum(map(_cpu_below, _children(process)))
    return 0.0


def _cpu_of_thread(native_id: int | None) -> float:
    return float((_read(f"/proc/self/task/{native_id}/schedstat").split() or [0])[0]) / 1e9


def _written() -> int:
    words = _read("/proc/self/io").split()
    return int(words[words.index(b"wchar:") + 1]) if b"wchar:" in words else 0


def _read(path: str) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 4096)
    except OSError:
        return b""
    finally:
        os.close(file)


def place_of(frame: FrameType | None) -> str:
    """Return the innermost function of rlctl that a thread is in."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            file = os.path.relpath(frame.f_code.co_filename, os.path.dirname(PACKAGE))
            return f"in {frame.f_code.co_name}, {file}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside rlctl"
