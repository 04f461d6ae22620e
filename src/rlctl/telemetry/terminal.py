"""Verbosity, colors, and streams that can disappear.

-q: results and errors; default: messages; -v: also `logging.getLogger(__name__).info(...)`. NO_COLOR or --no-color
turns colors off. A closed terminal, full disk or missing reader ends no run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Literal, TextIO

Severity = Literal["ok", "warn", "fail"]
COLORS: dict[Severity, str] = {"ok": "\x1b[32m", "warn": "\x1b[33m", "fail": "\x1b[31m"}
PLAIN = "\x1b[0m"


class Unbreakable:
    """A stream that drops failed writes; `lost` has the reason."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: str | None = None

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except UnicodeError:
            raise
        except RuntimeError:  # a signal came in the midst of another write
            pass
        except (OSError, ValueError) as error:
            self.lost = self.lost or (getattr(error, "strerror", None) or str(error))
            discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard(stream: TextIO) -> None:
    """Discard a stream's buffered and later output, which Python would fail to flush."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


class Verbosity:
    """The wish of the command line that this process runs."""

    quiet = False


class _Teller(logging.Handler):
    """Writes to the current stderr, which a progress display may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


_teller = _Teller()


def reset() -> None:
    """Reset settings of an earlier command line in this process."""
    Verbosity.quiet = False
    logger = logging.getLogger("rlctl")
    logger.removeHandler(_teller)
    logger.setLevel(logging.NOTSET)


def be_quiet(value: bool) -> None:
    Verbosity.quiet = Verbosity.quiet or value


def be_verbose(value: bool) -> None:
    if value:
        logger = logging.getLogger("rlctl")
        logger.setLevel(logging.INFO)
        logger.addHandler(_teller)


def without_color(value: bool) -> None:
    if value:
        os.environ["NO_COLOR"] = "1"


def shows_colors(stream: TextIO | None) -> bool:
    """Return whether `stream` is a terminal that may show colors."""
    refused = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not refused and stream is not None and stream.isatty()


def colored(text: str, status: Severity, stream: TextIO | None) -> str:
    return f"{COLORS[status]}{text}{PLAIN}" if shows_colors(stream) else text
