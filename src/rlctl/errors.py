"""Errors of rlctl, with exit codes, and helpers for messages. Raise an error where the cause is known: `message` names
the user's word (flag, file, tensor), `hint` the next step. The command line prints both without a traceback."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

EXIT_INTERRUPTED = 130

INSTALL_CPU = "`make venv` in a checkout of rlctl"
"""How to install everything that runs on CPUs."""


def install_extra(name: str) -> str:
    """Return the command that installs an extra. It is for a checkout, because rlctl has no release."""
    return f"`pip install -e '.[{name}]'` in a checkout of rlctl"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Join the first `most` names and count the rest."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


MOST_LINES = 20
LINE_CHARACTERS = 500


def lines_of(problems: Sequence[str]) -> str:
    """Return the first problems, one per line and shortened, and count the rest."""
    most, half = LINE_CHARACTERS, LINE_CHARACTERS // 2
    lines = [line if len(line) <= most else f"{line[:half]} ... {line[-half:]}" for line in problems[:MOST_LINES]]
    more = len(problems) - len(lines)
    return "\n".join([*lines, f"and {more:,} more problems."] if more else lines)


class RlctlError(Exception):
    """A failure at run time (exit code 1)."""

    exit_code = 1
    node: str | None = None
    """Address of the node that the failure comes from, where one is to blame."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message} {hint}")
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple:
        # Errors are pickled between processes; the default would pass the joined text as `message`.
        return (type(self), (self.message, self.hint))


def faulty_node(error: BaseException | None) -> str | None:
    """Return the node that an error, or one that led to it, blames."""
    while error is not None:
        if isinstance(error, RlctlError) and error.node is not None:
            return error.node
        error = error.__cause__ or error.__context__
    return None


class InputError(RlctlError, ValueError):
    """Wrong input: a flag, a key, an unknown model, a missing shard (exit code 2)."""

    exit_code = 2


class AbsentError(InputError):
    """A hub model or dataset is not on this machine, and the hub is out of reach (exit code 2)."""


class ConfigError(InputError):
    """A wrong configuration key or value (exit code 2)."""


class MachineError(RlctlError, OSError):
    """The machine lacks something that the command needs (exit code 3)."""

    exit_code = 3


class NoPlanError(RlctlError):
    """The request is valid, but no plan fits the machine (exit code 4)."""

    exit_code = 4
    rejected: tuple[tuple[str, str], ...] = ()
    """The closest layouts, each with the reason why it does not fit."""


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
    """A worker stopped because another one failed; that worker's error has the cause (exit code 1)."""


class WaitTimeoutError(RlctlError, TimeoutError):
    """A wait exceeded its limit; the message names the process (exit code 1)."""


class DivergenceError(RlctlError):
    """A run diverges numerically (exit code 1)."""


def missing_package(error: ModuleNotFoundError) -> RlctlError:
    """Return a MachineError for a package that is not installed; raise errors about rlctl or the standard library."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "rlctl") or package in sys.stdlib_module_names:
        raise error
    hint = f"Install the engines ({INSTALL_CPU}; {install_extra('cuda')} for GPUs), then run `rlctl doctor`."
    return MachineError(f"the Python package `{package}` is not installed.", hint)


def suggest(word: str, candidates: Iterable[str]) -> str | None:
    """Return `Did you mean ...?` for the nearest known words, or None."""
    near = difflib.get_close_matches(word, list(candidates), n=3, cutoff=0.55)
    return f"Did you mean {' or '.join(near)}?" if near else None


def suggest_file(path: Path, suffixes: Iterable[str]) -> str | None:
    """Return `Did you mean ...?` for files next to `path` with a similar name, ignoring the suffix."""
    if not path.parent.is_dir():
        return None
    siblings = {entry.stem: entry.name for entry in sorted(path.parent.iterdir()) if entry.suffix.lower() in suffixes}
    near = difflib.get_close_matches(path.stem, siblings, n=3, cutoff=0.55)
    return f"Did you mean {' or '.join(siblings[stem] for stem in near)}?" if near else None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
