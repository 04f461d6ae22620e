"""Runs a Python program that a model wrote, behind the layers of protection that the machine has.

    limits      seconds, memory, size of a file, open files, processes; no variables of the environment
    namespaces  no network, no sight of other processes, and what the program started ends with it
    landlock    files are read in Python's own folders alone, and written in the program's own folder alone
    seccomp     calls of the kernel that no such program needs are refused (with pyseccomp)

This file is also the script that puts itself behind the layers and then becomes the program; so it needs Python alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO

LAYERS = ("limits", "namespaces", "landlock", "seccomp")
NAMESPACES = (
    *("unshare", "--user", "--map-current-user", "--net", "--ipc", "--mount", "--pid", "--mount-proc"),
    *("--fork", "--kill-child"),
)
OPEN_FILES = 64
SHOWN_BYTES = 1 << 20
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of landlock's calls, the same on all processors."""
RUN_OR_READ, READ_FOLDER = 1 << 0 | 1 << 2, 1 << 3
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""How many rights of files landlock knows, by its version; later ones know 16."""
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, CAPABILITIES = 24, 38, 64
LEAST_PIDS, PIDS_BY_NAMESPACE = 301, (6, 14)
"""The smallest limit of processes that the kernel takes for a namespace, and the version from which it has one."""
REFUSED = (
    *("socket", "ptrace", "process_vm_readv", "process_vm_writev", "open_by_handle_at", "userfaultfd", "bpf"),
    *("mount", "umount2", "move_mount", "open_tree", "pivot_root", "chroot", "unshare", "setns", "io_uring_setup"),
    *("keyctl", "add_key", "request_key", "perf_event_open", "kexec_load", "init_module", "finit_module"),
)
"""Calls of the kernel that are refused with `Operation not permitted`."""


@dataclass(frozen=True)
class Limits:
    """The resources that a program may take."""

    seconds: float = 5.0
    """Longest time by the clock, and of the processor."""
    memory_mib: int = 512
    file_mib: int = 1
    """Size of one file, and of what it prints."""
    processes: int = 64
    """As root, 301 where there are namespaces and Linux is 6.14 or later, else any number."""


@dataclass(frozen=True)
class Outcome:
    """The end of a program."""

    code: int | None
    """Its exit code, negative for a signal; None: it took too long."""
    output: str
    errors: str
    seconds: float


@functools.cache
def layers() -> tuple[str, ...]:
    """Return the layers that this machine has: those behind which an empty program ends well."""
    return tuple(layer for layer in LAYERS if run("", behind=(layer,)).code == 0)


def run(program: str, stdin: str = "", limits: Limits | None = None, behind: Sequence[str] | None = None) -> Outcome:
    """Run a program in a folder of its own. `behind`: the layers, by default all that the machine has."""
    behind, limits = layers() if behind is None else behind, limits or Limits()
    with (
        tempfile.TemporaryDirectory(prefix="rlctl-program-") as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        Path(folder, "program.py").write_text(program, errors="replace")
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        script = [sys.executable, "-I", __file__, ",".join(behind), *map(str, astuple(limits))]
        command = [*(NAMESPACES if "namespaces" in behind else ()), *script]
        begun, code = time.monotonic(), None
        try:
            process = subprocess.Popen(
                command, cwd=folder, env={"OMP_NUM_THREADS": "1"}, stdin=given, stdout=output, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:  # there is no `unshare`
            return Outcome(127, "", f"{command[0]} is not installed", 0.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limits.seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return Outcome(code, _beginning(output), _beginning(errors), time.monotonic() - begun)


def _beginning(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(SHOWN_BYTES).decode(errors="replace")


def _become_program(behind: Sequence[str], limits: Limits) -> None:
    """Put this process behind the layers, and run the program in its folder instead."""
    libc = ctypes.CDLL(None, use_errno=True)
    if "namespaces" in behind:
        _limit_root(libc)
    if "limits" in behind:
        _set_limits(limits)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if "seccomp" in behind:
        import pyseccomp  # pyright: ignore[reportMissingImports]

        calls = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
        for name in REFUSED:
            calls.add_rule(pyseccomp.ERRNO(errno.EPERM), name)
        calls.load()
    if "landlock" in behind:
        _set_landlock(libc)
    os.execv(sys.executable, [sys.executable, "-I", "program.py"])


def _limit_root(libc: ctypes.CDLL) -> None:
    """Take from root what it has in a namespace of its own, where no limit of processes holds for it."""
    version = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if os.getuid() == 0 and version >= PIDS_BY_NAMESPACE:  # before that version it is the whole machine's
        with contextlib.suppress(OSError):
            Path("/proc/sys/kernel/pid_max").write_text(str(LEAST_PIDS))
    for capability in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def _set_limits(limits: Limits) -> None:
    seconds, memory, file = math.ceil(limits.seconds), limits.memory_mib << 20, limits.file_mib << 20
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _set_landlock(libc: ctypes.CDLL) -> None:
    """Allow reading in Python's folders and all in this one. Raises OSError where the kernel has no landlock."""
    version = _called(libc, CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    every = (1 << RIGHTS.get(version, 16)) - 1
    # Files; from version 4 on TCP's bind and connect; from 6 on sockets without a file, and signals to others.
    handled = struct.pack("3Q", every, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = _called(libc, CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    read = dict.fromkeys((*READABLE, sys.prefix, sys.base_prefix), RUN_OR_READ | READ_FOLDER)
    for path, rights in {**read, os.getcwd(): every}.items():
        if os.path.exists(path):
            descriptor = os.open(path, os.O_PATH)
            rights &= every if os.path.isdir(path) else RUN_OR_READ
            _called(libc, ADD_RULE, rules, 1, struct.pack("=Qi", rights, descriptor), 0)
            os.close(descriptor)
    _called(libc, RESTRICT_SELF, rules, 0)
    os.close(rules)


def _called(libc: ctypes.CDLL, number: int, *arguments: object) -> int:
    if (found := libc.syscall(number, *arguments)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


if __name__ == "__main__":
    _, names, *numbers = sys.argv
    seconds, memory, file, processes = numbers
    _become_program(names.split(","), Limits(float(seconds), int(memory), int(file), int(processes)))
