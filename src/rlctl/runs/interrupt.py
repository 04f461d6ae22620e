"""Signals as stop requests: before the first step one ends the run; later the first finishes the step and the second
ends it.

SIGINT comes from a person. SIGTERM, SIGUSR1 (Slurm) and SIGHUP (unless under `nohup`) come from programs that kill
later, so the step has a time limit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
ONE_REQUEST_S = 2.0
"""Signals of programs that come within this time are one request: `timeout` signals the run and then its group."""
CLEANUP_LIMIT_S = 300
"""Longest time from the interrupt to the end of the block: then a run that cannot end shows where it waits, and is
ended. Its processes end with it."""


class StopRequest:
    """In its block each of `SIGNALS` raises KeyboardInterrupt once, so cleanup continues. Inside `between_steps` the
    first only sets `requested`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.trouble: Callable[[], object] = lambda: None
        """Tells of something that is as good a reason to stop as a signal."""
        self.limit_s: float | None = None
        """Longest time that a step may go on once a program has asked to stop; None: any."""
        self.by: str | None = None
        """The signal that asked first, for messages."""
        self._say = say
        self._asked_at: float | None = None
        self._deferring = self._raised = False
        self._before: dict[int, Any] = {}
        self._unraisable: Callable[[Any], object] = sys.unraisablehook

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        if self._before[signal.SIGHUP] is signal.SIG_IGN:
            del self._before[signal.SIGHUP]
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._forget
        self.install()
        return self

    @property
    def requested(self) -> bool:
        return self._asked_at is not None or bool(self.trouble())

    def __exit__(self, *_: object) -> None:
        if self._raised:
            faulthandler.cancel_dump_traceback_later()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._unraisable

    def _forget(self, lost: Any) -> None:
        """Hide a KeyboardInterrupt where none can be raised, as in a finalizer: it is raised later."""
        if not (self._raised and isinstance(lost.exc_value, KeyboardInterrupt)):
            self._unraisable(lost)

    def install(self) -> None:
        """Install handlers (again, after libraries replaced them). Raises a KeyboardInterrupt lost meanwhile, for
        example in Cython imports."""
        for number in self._before:
            signal.signal(number, self._handle)
        self._raise_lost()

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Let signals set `requested`, checked after each step. Raises like `install`, and KeyboardInterrupt after
        `limit_s` once a program asked to stop."""
        self._raise_lost()
        self._deferring = True
        before = signal.signal(signal.SIGALRM, self._abandon)
        try:
            yield
        finally:
            self._deferring = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _raise_lost(self) -> None:
        if self._raised:  # only the clean-up follows
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name, now, asked_at = signal.Signals(number).name, time.monotonic(), self._asked_at
        self.by = self.by or ("Ctrl-C" if number == signal.SIGINT else name)
        # The kernel and the shell send a SIGHUP each for the same terminal, and `timeout` signals a run and its group.
        soon = asked_at is not None and number != signal.SIGINT and now - asked_at < ONE_REQUEST_S
        if number == signal.SIGHUP:
            self._say("The terminal was closed (SIGHUP).")
        if self._raised:
            self._say("Stopping; the processes are being ended.")
        elif asked_at is None and self._deferring:
            self._asked_at = now
            if number == signal.SIGINT:
                self._say("Stopping after this step. Press Ctrl-C again to stop at once without saving.")
            elif self.limit_s is None:
                self._say(f"Stopping after this step ({name}).")
            else:
                signal.setitimer(signal.ITIMER_REAL, self.limit_s)
                within = f"or in {self.limit_s:.0f} s without it (run.stop_within_s)"
                self._say(f"Stopping after this step ({name}), {within}.")
        elif not (soon or (asked_at is not None and number == signal.SIGHUP)):
            self._interrupt()

    def _abandon(self, number: int, frame: FrameType | None) -> None:
        if not self._raised:
            self._say(f"The step did not end within {self.limit_s:.0f} s (run.stop_within_s) and is abandoned.")
            self._interrupt()

    def _interrupt(self) -> NoReturn:
        self._raised = True
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # a notebook's stderr is no file
            faulthandler.dump_traceback_later(CLEANUP_LIMIT_S, exit=True)
        raise KeyboardInterrupt
