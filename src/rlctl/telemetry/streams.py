"""Streams that are not needed: a terminal that was closed, a full disk or a reader that is gone ends no run."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO


class Unbreakable:
    """A stream that drops what it cannot write; `lost` then says why. All else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: str | None = None

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except RuntimeError:  # a signal came in the midst of another write
            return 0
        except (OSError, ValueError) as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except RuntimeError:
            return
        except (OSError, ValueError) as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        if isinstance(error, UnicodeError):
            raise error
        self.lost = self.lost or (getattr(error, "strerror", None) or str(error))
        discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard(stream: TextIO) -> None:
    """Send what the stream still holds, and all that follows, to nowhere: Python would fail to flush it at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def open_closed_ones() -> None:
    """Open the standard streams that this process was started without (`2>&-`), to nowhere: a file that is opened later
    would get their number, and what libraries print."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
