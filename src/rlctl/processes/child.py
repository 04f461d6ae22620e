"""Child processes: a new interpreter runs one function, and a connection to it carries the messages.

`call_in_child` runs a function once, for torch, memory or threads. A `Server` answers requests until it is closed. It
runs user code, which may start processes and ignore signals, so it is supervised (`processes/supervision.py`). Programs
that a model writes run in `processes/sandbox.py`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rlctl.errors import EXIT_INTERRUPTED, KilledError, RlctlError, WaitTimeoutError, WorkerError, first_line
from rlctl.processes.supervision import end_with_parent, supervise

T = TypeVar("T")

PACKAGES = str(Path(__file__).parents[2])
MAIN = "import sys; sys.path.append(sys.argv[1]); from rlctl.processes.child import main; main()"
LOOK_S = 0.1
"""Seconds between two looks at whether a process without an answer still runs."""
START_TIMEOUT_S = 180.0
"""To import reasoning-gym or a user's file; seconds from a local disk."""
CLEARING_S = 30.0
"""Seconds for an interrupted child to remove its files."""
CLOSE_TIMEOUT_S = 20.0
LOCAL_VARIABLES = re.compile(
    r"_|(?:OLD)?PWD|PATH|HOME|USER|LOGNAME|MAIL|SHELL|SHLVL|HOSTNAME|TE?MP|TMPDIR|VIRTUAL_ENV|DISPLAY|TERM|PYTHON\w*|"
    r"(?:LD|CONDA|XDG|SSH|DBUS|SLURM|SBATCH|SRUN|PMIX?|PBS|LSB|OMPI|KUBERNETES|RAY|RLCTL|CUDA|NVIDIA|NCCL|GLOO|OMP|MKL|"
    r"OPENBLAS|KMP|VLLM|TORCH|PYTORCH|TRITON|UCX|FI)_\w*"
)
"""Variables that describe a machine, a login or a job, or that rlctl sets for each process."""


class EndedError(Exception):
    """A process has ended without an answer; the text is its exit code or signal."""


def call_in_child(doing: str, function: Callable[[], T], *, limit_s: float | None = None, quiet: bool = False) -> T:
    """Return the result of `function` (a module function or a `partial`) from a child process. Output goes to stderr,
    or nowhere if `quiet`. `doing` is a phrase for messages. Raises the function's RlctlError, WaitTimeoutError after
    `limit_s`, KilledError after a signal, RlctlError for other failures."""
    work = doing[:1].upper() + doing[1:]
    answer = None
    process, connection = _start("call", stderr=subprocess.DEVNULL if quiet else None)
    with connection:
        try:
            with contextlib.suppress(ConnectionError):  # the exit code says why
                connection.send_bytes(pickle.dumps(partial(_call, function)))
            with contextlib.suppress(EOFError, ConnectionError):
                answer = _receive(process, connection, limit_s)
            code = process.wait(limit_s)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            process.kill()
            raise WaitTimeoutError(f"{work} took longer than {limit_s:g} s.") from error
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(CLEARING_S)
                process.kill()
                process.wait()
    if code < 0:
        message = f"{work} was killed by signal {-code}."
        raise KilledError(message, "If the host ran out of memory (see `dmesg`), free some and run the command again.")
    if code == EXIT_INTERRUPTED:
        raise RlctlError(f"{work} was stopped by a signal.", "Run the command again.")
    if answer is None:
        raise RlctlError(f"{work} ended with exit code {code}.", "Its output is above.")
    value, error = answer
    if isinstance(error, RlctlError):
        raise error
    if error is not None:
        raise RlctlError(f"{work} failed unexpectedly: {error}.")
    return value


class Server:
    """A supervised process that answers requests. It may be started again after its end."""

    def __init__(self, serve: Callable[[Connection, Any], None], description: str) -> None:
        """`serve` gets the connection and a plan. It sends its first message once it can work, then answers requests
        until `EOFError`. The parent receives an RlctlError that it raises. `description` names the process in messages,
        such as `the scorers (exact-match)`."""
        self._serve, self._description = serve, description
        self.process: subprocess.Popen[Any] | None = None
        self.connection: Connection | None = None
        """None: the process does not run."""

    def start(self, plan: object, variables: Mapping[str, str] | None = None) -> Any:
        """Start the process with environment `variables` and return its first message. Raises the RlctlError that
        `serve` raised before."""
        # A new session, so that Ctrl-C in the terminal reaches only the run, which ends this process itself.
        self.process, self.connection = _start("serve", start_new_session=True, env={**os.environ, **(variables or {})})
        try:
            with contextlib.suppress(ConnectionError):  # `receive` raises with the exit code
                self.connection.send(partial(_answer, self._serve, plan))
            ready = self.receive(START_TIMEOUT_S)
        except TimeoutError as error:
            self.close()
            raise WaitTimeoutError(
                f"The process of {self._description} was not ready within {START_TIMEOUT_S:.0f} s."
            ) from error
        except EndedError as error:
            raise WorkerError(
                f"The process of {self._description} died at its start ({error}).",
                "Its output is above, or in the log of the worker.",
            ) from error
        except BaseException:
            self.close()
            raise
        if isinstance(ready, RlctlError):
            self.close()
            raise ready
        return ready

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def receive(self, limit_s: float | None = None) -> Any:
        """Return the next message. Raises TimeoutError, or EndedError where the process has ended."""
        assert self.process is not None  # it was started
        assert self.connection is not None
        try:
            return _receive(self.process, self.connection, limit_s)
        except (EOFError, ConnectionError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
            code = self.process.returncode
            self.close()
            how = "still running" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
            raise EndedError(how) from error

    def close(self) -> None:
        """End the process and everything it started; may be repeated."""
        if self.connection is not None:
            self.connection.close()  # the supervisors then end the process and its descendants
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(CLOSE_TIMEOUT_S)
            self.process.kill()  # no effect on an ended process
            self.process.wait()
        self.connection = self.process = None


def shell_variables() -> dict[str, str]:
    """Return this process's variables that user code gets on every machine of a run, such as keys and addresses. A
    running Ray cluster starts processes with the variables of `ray start`."""
    return {name: value for name, value in os.environ.items() if not LOCAL_VARIABLES.fullmatch(name)}


def _start(kind: str, **settings: Any) -> tuple[subprocess.Popen[Any], Connection]:
    ours, theirs = Pipe()
    # -P: no module of the directory that the user works in replaces one of Python's. Not -m: pickle would look the
    # child's classes up in __main__. The path is for an rlctl found by a relative sys.path.
    command = [sys.executable, "-P", "-c", MAIN, PACKAGES, str(theirs.fileno()), kind]
    with theirs:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], **settings), ours


def _receive(process: subprocess.Popen[Any], connection: Connection, limit_s: float | None) -> Any:
    """Return the next message. Raises TimeoutError after `limit_s`, EOFError if the process has ended without one."""
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while not connection.poll(LOOK_S if deadline is None else max(0.0, min(LOOK_S, deadline - time.monotonic()))):
        # A process that the ended one has forked may keep the connection open.
        if process.poll() is not None and not connection.poll():
            raise EOFError
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError
    return connection.recv()


def main() -> None:
    """Receive a function over the connection with descriptor `sys.argv[2]`, and call it with the connection."""
    descriptor, kind = int(sys.argv[2]), sys.argv[3]
    os.dup2(2, 1)  # output goes to the log, since a program may parse stdout
    if kind == "serve":
        supervise(descriptor)
    else:
        _end_on_signals()
    os.set_inheritable(descriptor, False)
    try:
        with Connection(descriptor) as connection:
            connection.recv()(connection)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _end_on_signals() -> None:
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not interrupted:  # later signals let the function clean up
            interrupted = True
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, interrupt)
    end_with_parent(signal.SIGTERM)


def _call(function: Callable[[], object], connection: Connection) -> None:
    value: Any = None
    error: RlctlError | str | None = None
    try:
        value = function()
    except RlctlError as raised:
        error = raised
    except Exception as raised:  # noqa: BLE001 - the caller reports whatever a library raises
        traceback.print_exc()
        error = f"{type(raised).__name__}: {first_line(raised)}"
    # Not `send`: torch registers reducers that share a tensor's memory, and this process ends.
    connection.send_bytes(pickle.dumps((value, error)))


def _answer(serve: Callable[[Connection, Any], None], plan: object, connection: Connection) -> None:
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue] - it is a TextIOWrapper
    os.environ.pop("PYTHONSAFEPATH", None)  # a script that user code starts may have its own neighbors
    try:
        serve(connection, plan)
    except RlctlError as error:
        connection.send(error)
    except (EOFError, ConnectionError):  # the parent is gone
        pass
