"""How much a command says: results and errors alone (-q), the usual messages, or also what it reads and starts (-v).

Code that reads a file, makes a choice or starts something says so with `logging.getLogger(__name__).info(...)`; nobody
sees that without -v. Colour is for terminals, and the environment variable NO_COLOR (or --no-color) takes it away.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal, TextIO

Severity = Literal["ok", "warn", "fail"]
COLOURS: dict[Severity, str] = {"ok": "\x1b[32m", "warn": "\x1b[33m", "fail": "\x1b[31m"}
PLAIN = "\x1b[0m"


class Verbosity:
    """The wish of the command line that this process runs."""

    quiet = False


class _Teller(logging.Handler):
    """Writes to the stderr of the moment, which a progress display may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


_teller = _Teller()


def reset() -> None:
    """Forget what an earlier command line of this process asked for."""
    Verbosity.quiet = False
    logger = logging.getLogger("rlctl")
    logger.removeHandler(_teller)
    logger.setLevel(logging.NOTSET)


def be_quiet(value: bool) -> None:
    """Callback of -q."""
    Verbosity.quiet = Verbosity.quiet or value


def be_verbose(value: bool) -> None:
    """Callback of -v."""
    if value:
        logger = logging.getLogger("rlctl")
        logger.setLevel(logging.INFO)
        logger.addHandler(_teller)


def without_colour(value: bool) -> None:
    """Callback of --no-color."""
    if value:
        os.environ["NO_COLOR"] = "1"


def coloured(text: str, status: Severity, stream: TextIO | None) -> str:
    """Return `text` in the colour of a status where `stream` is a terminal that may show colours."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or stream is None or not stream.isatty():
        return text
    return f"{COLOURS[status]}{text}{PLAIN}"
