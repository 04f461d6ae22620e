"""Ctrl-C as a request: before the first step it ends the run; then the first finishes the step, the second ends it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Within its block, SIGINT and SIGTERM raise KeyboardInterrupt once; later ones let the clean-up go on.

    Inside `between_steps` the first signal only sets `requested`.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say
        self._deferring = self._raised = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Take the signals (again: libraries that start later bring handlers of their own).

        Raises the KeyboardInterrupt that was lost since (imports of Cython modules swallow any).
        """
        for number in SIGNALS:
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
        if self._raised:
            self._say("Stopping; the processes are being ended.")
        elif self._deferring and not self.requested:
            self.requested = True
            self._say("Stopping after this step, then saving. Press Ctrl-C again to stop at once without saving.")
        else:
            self._raised = True
            raise KeyboardInterrupt
