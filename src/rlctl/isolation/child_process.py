"""A child process for user code: started with a plan, under supervisors that end whatever it starts. rlctl's own
functions do not need supervisors and run in `rlctl.child.call_in_child`."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from rlctl.child import module_command
from rlctl.errors import RlctlError, WaitTimeoutError, WorkerError
from rlctl.isolation.supervisor import supervise

T = TypeVar("T")
START_TIMEOUT_S = 180.0
"""To import reasoning-gym or a user's file; seconds from a local disk."""
CLOSE_TIMEOUT_S = 20.0
OF_A_MACHINE = re.compile(
    r"_|(?:OLD)?PWD|PATH|HOME|USER|LOGNAME|MAIL|SHELL|SHLVL|HOSTNAME|TE?MP|TMPDIR|VIRTUAL_ENV|DISPLAY|TERM|PYTHON\w*|"
    r"(?:LD|CONDA|XDG|SSH|DBUS|SLURM|SBATCH|SRUN|PMIX?|PBS|LSB|OMPI|KUBERNETES|RAY|RLCTL|CUDA|NVIDIA|NCCL|GLOO|OMP|MKL|"
    r"OPENBLAS|KMP|VLLM|TORCH|PYTORCH|TRITON|UCX|FI)_\w*"
)
"""Variables that describe a machine, a login or a job, or that rlctl sets for each process."""


class ChildProcess:
    """A process that runs `main` of a module. It is given a plan, and answers with None once it can work."""

    def __init__(self, module: str, what: str) -> None:
        """Messages name its work by `what`, such as `the scorers (exact-match)`."""
        self._module, self._what = module, what
        self._process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None
        """None: it does not run."""

    def start(self, plan: object, environment: Mapping[str, str] | None = None) -> Connection:
        """Start it and wait until it can work. Raises what building the plan raised."""
        ours, theirs = Pipe()
        command = module_command(self._module, theirs.fileno())
        # A session of its own: Ctrl-C in the terminal is for the run, which ends this process itself.
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        theirs.close()
        self.connection = ours
        try:
            ours.send(plan)
            if not ours.poll(START_TIMEOUT_S):
                raise WaitTimeoutError(f"The process of {self._what} was not ready within {START_TIMEOUT_S:.0f} s.")
            if (error := ours.recv()) is not None:
                raise error
        except (EOFError, ConnectionError) as error:
            raise WorkerError(
                f"The process of {self._what} died at its start ({self.ending()}).",
                "Its output is above, or in the log of the worker.",
            ) from error
        except BaseException:
            self.close()
            raise
        return ours

    def ending(self) -> str:
        process = self._process
        assert process is not None  # it has just ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        code = process.returncode
        self.close()
        return "still running" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the child and everything it started; may be repeated."""
        if self.connection is not None:
            self.connection.close()  # its supervisors end everything then
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_TIMEOUT_S)
            self._process.kill()  # does nothing where it has ended
            self._process.wait()
        self.connection = self._process = None


def shell_variables() -> dict[str, str]:
    """Return this process's variables that user code gets on every machine of a run, such as keys and addresses. A
    running Ray cluster starts processes with the variables of `ray start`."""
    return {name: value for name, value in os.environ.items() if not OF_A_MACHINE.fullmatch(name)}


def begun(build: Callable[[Any], T]) -> tuple[Connection, Any, T]:
    """Start in the child under supervisors: receive the plan and return connection, plan and `build`'s result. User
    errors are reported to the parent."""
    number = int(sys.argv[2])
    supervise(number)
    connection = Connection(number)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue] - it is a TextIOWrapper
    os.set_inheritable(number, False)
    os.environ.pop("PYTHONSAFEPATH", None)  # a script that user code starts may have neighbors of its own
    plan = connection.recv()
    try:
        built = build(plan)
    except RlctlError as error:
        connection.send(error)
        sys.exit(0)
    connection.send(None)
    return connection, plan, built
