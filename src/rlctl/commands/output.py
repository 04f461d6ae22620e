"""Output of commands: results to stdout, messages to stderr, and with --json exactly one object on stdout."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from rlctl.errors import RlctlError
from rlctl.telemetry.metrics import finite
from rlctl.telemetry.terminal import Verbosity, colored, discard

if TYPE_CHECKING:
    from rlctl.jobs.shown_run import DryRun


class JsonMode:
    """Whether the user asked for --json, and whether the object has been printed."""

    wanted = False
    printed = False


class OwnProcess:
    """Whether this process runs one command, and not a program that calls rlctl."""

    is_one = False


def examples(*lines: str) -> str:
    """Return a help epilogue with one example per line (the \\b keeps the renderer from joining them)."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def want_json(value: bool) -> bool:

    JsonMode.wanted = value
    return value


def print_json(value: Any, *, lines: bool = False) -> None:
    """Print one JSON object on stdout: indented, or on a single line for JSON Lines."""
    JsonMode.printed = True
    show(json.dumps(finite(value), indent=None if lines else 2, allow_nan=False))


def show(text: str) -> None:
    """Print a result on stdout. Raises RlctlError if stdout cannot be written. A closed pipe (`| head`) ends the
    command silently."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard(sys.stdout)
        raise SystemExit(1) from None
    except (OSError, ValueError) as error:
        discard(sys.stdout)
        reason = getattr(error, "strerror", None) or error
        raise RlctlError(f"the output cannot be written to stdout: {reason}.") from error


def show_dry_run(report: DryRun, json_: bool, explain: bool) -> None:
    """Print a dry run; `explain` adds the rules, which --json always includes."""
    print_json(report.to_json()) if json_ else show(report.text(explain))


def message(text: str) -> None:
    """Print a message on stderr, unless -q was given."""
    if not Verbosity.quiet:
        complain(text)


def shows_progress(json_: bool) -> bool:
    """Return whether to show progress: neither with --json nor with -q."""
    return not (json_ or Verbosity.quiet)


def complain(text: str) -> None:
    """Print a message on stderr, also with -q."""
    print(text, file=sys.stderr, flush=True)


def report_error(error: RlctlError) -> None:
    """Print an error and its hint; with --json also an object, unless one was printed already."""
    complain(f"{colored('rlctl:', 'fail', sys.stderr)} {error.message}")
    if error.hint:
        complain(f"  {error.hint}")
    if JsonMode.wanted and not JsonMode.printed:
        with contextlib.suppress(RlctlError):  # a stdout that cannot be written changes no exit code
            print_json(error_json(error))


def error_json(error: RlctlError) -> dict[str, Any]:
    """Return an error for --json."""
    detail = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"error": detail | {"exit_code": error.exit_code}}
