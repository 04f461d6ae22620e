"""The errors that rlctl raises on purpose, and parts of their messages. Each class carries the exit code of the
process.

Raise them where the cause is known, name the user's own word for the thing (the flag, the file, the tensor) in
`message`, and say what to do next in `hint`. The command line prints both without a traceback.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

EXIT_INTERRUPTED = 130


def listed(names: Sequence[str], most: int = 4) -> str:
    """Join the first `most` names, and say how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


MOST_LINES = 20
LINE_CHARACTERS = 500


def lines_of(problems: Sequence[str]) -> str:
    """Return the first problems, a line each and cut where a value makes it long, and how many more there are."""
    most, half = LINE_CHARACTERS, LINE_CHARACTERS // 2
    lines = [line if len(line) <= most else f"{line[:half]} ... {line[-half:]}" for line in problems[:MOST_LINES]]
    more = len(problems) - len(lines)
    return "\n".join([*lines, f"and {more:,} more problems."] if more else lines)


class RlctlError(Exception):
    """A failure at run time (exit code 1)."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message} {hint}")
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple:
        # Errors cross process boundaries pickled; the default would pass the joined text as `message`.
        return (type(self), (self.message, self.hint))


class InputError(RlctlError, ValueError):
    """The input is wrong: a flag, a key, an unknown model, a missing shard (exit code 2)."""

    exit_code = 2


class AbsentError(InputError):
    """A model or dataset of the hub is not on this machine, and the hub cannot be reached (exit code 2)."""


class ConfigError(InputError):
    """A configuration key or value is wrong (exit code 2)."""


class MachineError(RlctlError, OSError):
    """The machine lacks what was asked for (exit code 3)."""

    exit_code = 3


class NoPlanError(RlctlError):
    """The request is valid, but no plan fits the machine (exit code 4)."""

    exit_code = 4
    rejected: tuple[tuple[str, str], ...] = ()
    """The layouts that came closest, each with the reason why it does not fit."""


class InterruptionError(RlctlError):
    """Ctrl-C or a signal stopped the command before it had a result (exit code 130)."""

    exit_code = EXIT_INTERRUPTED


class VerificationError(RlctlError):
    """A check of converted or transferred data failed (exit code 5)."""

    exit_code = 5


class ClusterError(RlctlError):
    """A process of Ray itself died (exit code 1)."""


class WorkerError(RlctlError):
    """A worker process died or raised (exit code 1)."""


class KilledError(RlctlError):
    """A process that rlctl started was killed by a signal (exit code 1)."""


class PeerFailedError(WorkerError):
    """A worker stopped because another one did, whose own error says why (exit code 1)."""


class WaitTimeoutError(RlctlError, TimeoutError):
    """A wait outlasted its limit; the message names who was waited for (exit code 1)."""


class DivergenceError(RlctlError):
    """A run is diverging for numerical reasons (exit code 1)."""


def missing_package(error: ModuleNotFoundError) -> RlctlError:
    """An engine that is not installed is the machine's lack; any other missing module is a defect and raised again."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "rlctl") or package in sys.stdlib_module_names:
        raise error
    hint = (
        "Install the engines: `make venv` in a checkout, or the extra rlctl[cpu] or rlctl[cuda]; then `rlctl doctor`."
    )
    return MachineError(f"the Python package `{package}` is not installed.", hint)


def suggest(word: str, known: Iterable[str]) -> str | None:
    """Return `Did you mean ...?` for the nearest of `known`, or None when none is near."""
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.55)
    return f"Did you mean {' or '.join(near)}?" if near else None


def suggest_file(path: Path, suffixes: Iterable[str]) -> str | None:
    """Return `Did you mean ...?` for files next to `path` with a like name; the suffix counts for nothing."""
    if not path.parent.is_dir():
        return None
    siblings = {entry.stem: entry.name for entry in sorted(path.parent.iterdir()) if entry.suffix.lower() in suffixes}
    near = difflib.get_close_matches(path.stem, siblings, n=3, cutoff=0.55)
    return f"Did you mean {' or '.join(siblings[stem] for stem in near)}?" if near else None


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
