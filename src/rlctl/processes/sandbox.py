"""Run a model's Python program behind the available protection layers.

limits: seconds, memory, processes, open files, file size; empty environment and folder. user: another user, if rlctl is
root. namespaces: no network or other processes. landlock: reads only Python's and the system's folders, writes only its
own. seccomp: refuses sockets and system calls that reach other processes. This file is also the script that applies
them and becomes the program, so it imports nothing of rlctl.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import platform
import re
import resource
import signal
import site
import struct
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

LAYERS = ("limits", "user", "namespaces", "landlock", "seccomp")
NAMESPACES = (
    "unshare", "--user", "--map-current-user", "--net", "--ipc", "--mount", "--pid", "--fork", "--kill-child",
    "--mount-proc",
)  # fmt: skip
NOBODY = 65534
OPEN_FILES = 64
LOOK_S, MOST_WAITS, MOST_IDLE = 0.25, 10, 3
"""Seconds between looks at a program after its limit; the extra time in limits; idle looks in a row that end it."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
CAPABILITIES = 0x20080522
"""Version of the `capset` call that drops root's capabilities."""
LEAST_PID_MAX, PID_MAX_BY_NAMESPACE = 301, (6, 14)
"""Smallest process limit of a PID namespace, and the Linux version with one per namespace. It also limits root, unlike
RLIMIT_NPROC."""

# Numbers of landlock's system calls, the same on all processors, and its rights.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ_DIRECTORY = 1 << 3
READ = 1 << 0 | 1 << 2 | READ_DIRECTORY
"""Rights to run a file, read a file and read a directory."""
WRITE_FILE = 1 << 1
ALL = (1 << 13) - 1
"""All file rights of landlock's first version."""
TRUNCATE = 1 << 14
"""A right since version 3."""
CONNECTIONS, OUTSIDE = 3, 3
"""Rights to bind and connect with TCP, since version 4; sockets and signals to outside processes, since version 6."""
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")

ERROR_1, ALLOW = 0x00050001, 0x7FFF0000
"""Answers of seccomp's filter: fail with EPERM, or allow."""
PROCESSORS = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""seccomp's number of a processor, and its column in REFUSED."""
REFUSED = {
    "socket": (41, 198), "ptrace": (101, 117), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "unshare": (272, 97), "setns": (308, 268), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "open_by_handle_at": (304, 265),
    "kexec_load": (246, 104), "init_module": (175, 105), "finit_module": (313, 273),
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    seconds: float = 5.0
    """Limit of processor time, and of wall-clock time unless the program waits for a processor."""
    memory_mib: int = 512
    file_mib: int = 1
    """Size limit of a file and of output."""
    processes: int = 64
    """Root without the `user` layer has no limit, or with namespaces 301 since Linux 6.14."""


@dataclass(frozen=True)
class Outcome:
    """The end of a program."""

    code: int | None
    """Exit code, negative for a signal; None: it took too long."""
    output: str
    errors: str


@functools.cache
def layers() -> tuple[str, ...]:
    """Return this machine's protection layers, each tested."""
    working = ["limits"]
    for layer in LAYERS[1:]:
        if layer == "user" and os.geteuid() != 0:
            continue
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if run("print('works')", limits=Limits(seconds=20.0), behind=(*working, layer)).output == "works\n":
                working.append(layer)
    return tuple(working)


def run(program: str, stdin: str = "", limits: Limits = Limits(), behind: Sequence[str] | None = None) -> Outcome:
    """Run a program in a new folder behind layers, by default all."""
    behind = layers() if behind is None else behind
    with (
        tempfile.TemporaryDirectory(prefix="rlctl-program-", ignore_cleanup_errors=True) as folder,
        Path(folder, ".stdin").open("w+b") as source,  # in the folder, so that the program may open /dev/stdin
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        path = Path(folder, "program.py")
        path.write_text(program, encoding="utf-8", errors="replace")
        source.write(stdin.encode(errors="replace"))
        source.seek(0)
        other = {"user": NOBODY, "group": NOBODY, "extra_groups": ()} if "user" in behind else {}
        if other:
            for file in (folder, path, source.name):
                os.chown(file, NOBODY, NOBODY)
        numbers = (limits.seconds, limits.memory_mib, limits.file_mib, limits.processes)
        script = [sys.executable, "-I", "-S", __file__, ",".join(behind), sysconfig.get_paths()["purelib"]]
        process = subprocess.Popen(
            [*(NAMESPACES if "namespaces" in behind else ()), *script, *map(str, numbers)],
            cwd=folder, env=ENVIRONMENT, stdin=source, stdout=output, stderr=errors, start_new_session=True, **other,
        )  # fmt: skip
        code = _ended(process, limits.seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return Outcome(code, _text(output, limits), _text(errors, limits))


def _ended(process: subprocess.Popen[Any], seconds: float) -> int | None:
    """Return the exit code; None: it took too long. On a busy machine, a program may take longer to get its seconds."""
    idle = 0
    for limit_s in (seconds, *[LOOK_S] * int(MOST_WAITS * seconds / LOOK_S)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(limit_s)
        waits = _waits_for_processor(process.pid, seconds)
        if waits is None or (idle := 0 if waits else idle + 1) == MOST_IDLE:
            return None
    return None


def _waits_for_processor(pid: int, seconds: float) -> bool | None:
    """Return whether a program is busy; None: it used up its processor time."""
    import psutil  # not for the script, which runs without packages

    used, runs = 0.0, False
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True) or [psutil.Process(pid)]:
            used += sum(process.cpu_times()[:2])
            runs |= process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
    return runs if used < seconds else None


def _text(file: IO[bytes], limits: Limits) -> str:
    file.seek(0)
    return file.read(limits.file_mib << 20).decode(errors="replace")


def main() -> None:
    """The script: apply the layers and become the program."""
    behind, packages, seconds, *rest = sys.argv[1:]
    source = Path("program.py").read_text(encoding="utf-8")
    sys.path.append(packages)
    memory_mib, file_mib, processes = map(int, rest)
    libc = ctypes.CDLL(None, use_errno=True)
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if "namespaces" in behind and os.getuid() == 0 and version >= PID_MAX_BY_NAMESPACE:
        Path("/proc/sys/kernel/pid_max").write_text(str(max(LEAST_PID_MAX, processes)))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.capset(struct.pack("=Ii", CAPABILITIES, 0), bytes(24))
    if "landlock" in behind:
        _set_landlock(libc, (*READABLE, sys.base_prefix, packages))
    if "seccomp" in behind:
        _set_seccomp(libc)
    for limit, most in (
        (resource.RLIMIT_CPU, math.ceil(float(seconds)) + 1),
        (resource.RLIMIT_AS, memory_mib << 20),
        (resource.RLIMIT_FSIZE, file_mib << 20),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    for give in (site.setquit, site.setcopyright, site.sethelper):  # names that `-S` omits, such as `exit`
        give()
    sys.set_int_max_str_digits(0)  # time and memory are limited
    sys.argv[:] = ["program.py"]
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    program.__file__ = os.path.abspath("program.py")
    exec(compile(source, "program.py", "exec"), program.__dict__)


def _set_landlock(libc: ctypes.CDLL, readable: Sequence[str]) -> None:
    version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    handled = ALL | (TRUNCATE if version >= 3 else 0)
    parts = [handled, *([CONNECTIONS] if version >= 4 else []), *([OUTSIDE] if version >= 6 else [])]
    rules = struct.pack(f"={len(parts)}Q", *parts)
    ruleset = libc.syscall(CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0)
    rights = dict.fromkeys(readable, READ) | {"/dev/null": READ | WRITE_FILE, os.getcwd(): handled}
    for path, right in rights.items():
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_PATH)
            if not os.path.isdir(path):
                right &= ~READ_DIRECTORY
            libc.syscall(ADD_RULE, ruleset, 1, struct.pack("=QI", right, descriptor), 0)
            os.close(descriptor)
    if version < 1 or libc.syscall(RESTRICT_SELF, ruleset, 0):
        sys.exit("landlock is not available")


def _set_seccomp(libc: ctypes.CDLL) -> None:
    """Refuse system calls with a filter of 8-byte instructions that compare the number of the call."""
    number, column = PROCESSORS.get(platform.machine()) or sys.exit("seccomp's numbers for this processor are unknown")
    load, equal, least, back = 0x20, 0x15, 0x35, 0x06
    calls = [numbers[column] for numbers in REFUSED.values()]
    code = [(load, 0, 0, 4), (equal, 1, 0, number), (back, 0, 0, ERROR_1), (load, 0, 0, 0)]
    code += [(least, len(calls) + 1, 0, 0x40000000)]  # calls of x86-64's other numbering
    code += [(equal, len(calls) - i, 0, call) for i, call in enumerate(calls)]
    code += [(back, 0, 0, ALLOW), (back, 0, 0, ERROR_1)]
    data = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(data)))
    if libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0):
        sys.exit("seccomp is not available")


if __name__ == "__main__":
    main()
