"""Call a function in a child process, for torch, memory, threads or user code. The child ends with its caller.

Two other launchers differ for a reason. User code that answers many requests runs under supervisors
(`isolation/child_process.py`), because it may start processes and ignore signals. Probes of the machine are commands
with logs that users read (`doctor/deep.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rlctl.errors import EXIT_INTERRUPTED, KilledError, RlctlError, WaitTimeoutError, first_line

T = TypeVar("T")

PACKAGES = str(Path(__file__).parents[1])
MAIN = "import sys; sys.path.append(sys.argv[1]); from {module} import main; main()"
CLEARING_S = 30.0
"""Seconds for an interrupted child to remove its files."""


def call_in_child(doing: str, function: Callable[[], T], *, limit_s: float | None = None, quiet: bool = False) -> T:
    """Return the result of `function` (a module function or a `partial`) from a child process. Output goes to stderr,
    or nowhere if `quiet`. `doing` is a phrase for messages. Raises the function's RlctlError, WaitTimeoutError after
    `limit_s`, KilledError after a signal, RlctlError for other failures."""
    with tempfile.TemporaryFile() as answer:
        command = module_command(__name__, answer.fileno())
        errors_to = subprocess.DEVNULL if quiet else None
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors_to, pass_fds=[answer.fileno()])
        try:
            process.communicate(pickle.dumps(function), limit_s)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise WaitTimeoutError(f"{_capital(doing)} took longer than {limit_s:g} s.") from error
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(CLEARING_S)
                process.kill()
                process.wait()
        answer.seek(0)
        return _result(doing, process.returncode, answer.read())


def module_command(module: str, descriptor: int) -> list[str]:
    """Return the command that calls `main` of a module in a new interpreter, where `sys.argv[2]` is the open file
    `descriptor`."""
    # -P: no module of the directory that the user works in replaces one of Python's. Not -m: pickle would look the
    # child's classes up in __main__. The path is for an rlctl found by a relative sys.path.
    return [sys.executable, "-P", "-c", MAIN.format(module=module), PACKAGES, str(descriptor)]


def _result(doing: str, code: int, answer: bytes) -> Any:
    if code < 0:
        why = f"{_capital(doing)} was killed by signal {-code}."
        raise KilledError(why, "If the host ran out of memory (see `dmesg`), free some and run the command again.")
    if code == EXIT_INTERRUPTED:
        raise RlctlError(f"{_capital(doing)} was stopped by a signal.", "Run the command again.")
    if not answer:
        raise RlctlError(f"{_capital(doing)} ended with exit code {code}.", "Its output is above.")
    value, error = pickle.loads(answer)
    if isinstance(error, RlctlError):
        raise error
    if error is not None:
        raise RlctlError(f"{_capital(doing)} failed unexpectedly: {error}.")
    return value


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(1, number, 0, 0, 0)  # PR_SET_PDEATHSIG of <linux/prctl.h>


def adopt_orphans(on: bool = True) -> None:
    """Make orphaned descendants children of this process."""
    ctypes.CDLL(None).prctl(36, int(on), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>


def main() -> None:
    """Call the function that stdin holds, and write (result, error) to the file with the descriptor `sys.argv[2]`."""
    answer, interrupted = int(sys.argv[2]), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not interrupted:  # later signals let the function clean up
            interrupted = True
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as it is under nohup
            signal.signal(number, interrupt)
    end_with_parent(signal.SIGTERM)
    os.set_inheritable(answer, False)
    os.dup2(2, 1)
    value: Any = None
    error: RlctlError | str | None = None
    try:
        value = pickle.load(sys.stdin.buffer)()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except RlctlError as raised:
        error = raised
    except Exception as raised:  # noqa: BLE001 - whatever a library raises is told to the caller
        traceback.print_exc()
        error = f"{type(raised).__name__}: {first_line(raised)}"
    with os.fdopen(answer, "wb") as stream:
        stream.write(pickle.dumps((value, error)))
