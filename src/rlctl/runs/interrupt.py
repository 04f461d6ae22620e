"""Ctrl-C as a request: before the first step it ends the run; then the first finishes the step, the second ends it.

A terminal that is closed (SIGHUP) asks for the same, unless `nohup` has turned that off.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Within its block, each of `SIGNALS` raises KeyboardInterrupt once; later ones let the clean-up go on.

    Inside `between_steps` the first signal only sets `requested`.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.trouble: Callable[[], object] = lambda: None
        """Tells of something that is as good a reason to stop as a signal."""
        self._say = say
        self._asked = False
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
        """Whether the run is to end after this step."""
        return self._asked or bool(self.trouble())

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._unraisable

    def _forget(self, lost: Any) -> None:
        """Say nothing of a KeyboardInterrupt where none can be raised, as in a finalizer: it is raised later."""
        if not (self._raised and isinstance(lost.exc_value, KeyboardInterrupt)):
            self._unraisable(lost)

    def install(self) -> None:
        """Take the signals (again: libraries that start later bring handlers of their own).

        Raises the KeyboardInterrupt that was lost since (imports of Cython modules swallow any).
        """
        for number in self._before:
            signal.signal(number, self._handle)
        self._raise_lost()

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Let signals set `requested` only, which the block looks at after each step. Raises as `install` does."""
        self._raise_lost()
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def _raise_lost(self) -> None:
        if self._raised:  # nothing goes on after it but the clean-up
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._say("The terminal was closed (SIGHUP).")
        if self._raised:
            self._say("Stopping; the processes are being ended.")
        elif number == signal.SIGHUP and self._asked:
            pass  # the kernel and the shell send one each for the same terminal
        elif self._deferring and not self._asked:
            self._asked = True
            self._say("Stopping after this step. Press Ctrl-C again to stop at once without saving.")
        else:
            self._raised = True
            raise KeyboardInterrupt
