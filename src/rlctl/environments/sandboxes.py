"""Where the programs of an episode run: plain processes, bubblewrap, a container, or behind a command of the user.

A `Sandbox` belongs to one episode, in the episode's process. Its folder goes with the episode, its processes with the
episode's process, and its container with the client that holds the container's input.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import resource
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import psutil

from rlctl.errors import InputError, MachineError
from rlctl.processes.sandbox import Outcome
from rlctl.processes.supervision import descendants, kill_tree
from rlctl.settings.rewards import EnvironmentConfig

GIB = 1 << 30
PAGE = resource.getpagesize()
LOOK_S, DISK_LOOK_S = 0.25, 2.0
"""Seconds between two looks at memory and processes, and at the disk."""
MOST_OUTPUT = 8 << 20
"""Bytes that are read of a program's output: the last ones."""
START_S, CLOSE_S, TRIAL_S = 120.0, 20.0, 20.0
SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/run/systemd/resolve")
"""Folders of the machine that programs in bubblewrap read, next to Python's and the working directory."""
HAND_OUT = (
    "import os, socket, sys\n"
    "server = socket.create_server(('127.0.0.1', int(sys.argv[2])))\n"
    "with socket.socket(fileno=int(sys.argv[1])) as outside:\n"
    "    socket.send_fds(outside, [b'.'], [server.fileno()])\n"
    "try:\n"
    "    os.execvp(sys.argv[3], sys.argv[3:])\n"
    "except OSError as error:\n"
    "    sys.exit(f'{sys.argv[3]} cannot be started in the sandbox: {error.strerror}')\n"
)
"""A program without network listens on its own loopback, hands the socket out, and becomes the user's program. A socket
stays in the network where it was made, so connections arrive outside."""
FULL = "full"


class SandboxError(Exception):
    """A program broke a limit, or its sandbox failed. `reason` as in `EpisodeFailure`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class SandboxPlan:
    """The sandbox of a run's programs as plain data."""

    words: tuple[str, ...] = ()
    """`environment.sandbox`; empty: unset."""
    image: str | None = None
    network: str = FULL
    memory_gib: float = 4.0
    processes: int = 512
    disk_gib: float = 10.0

    @classmethod
    def of(cls, config: EnvironmentConfig) -> SandboxPlan:
        """Raises InputError for settings that do not go together."""
        try:
            words = tuple(shlex.split(config.sandbox or ""))
        except ValueError as error:
            raise InputError(f"environment.sandbox = {config.sandbox!r}: {error}.", "Close the quotation.") from error
        plan = cls(
            words, config.image, config.network, config.memory_gib, config.processes, config.disk_gib,
        )  # fmt: skip
        plan.kind.validate(plan)
        return plan

    @property
    def kind(self) -> type[Sandbox]:
        return KINDS.get(self.words[0] if self.words else "none", UserCommand)

    def of_containers(self) -> SandboxPlan:
        """Return the plan with docker, or podman where docker does not run, if unset. Raises MachineError without
        either, and InputError for another kind."""
        if issubclass(self.kind, Container):
            return self
        if self.words:
            raise InputError(
                f"environment.sandbox = {self.words[0]}: these tasks run in containers.", "Leave it unset."
            )
        problems = []
        for kind in (Docker, Podman):
            if not (problem := kind.problem()):
                plan = replace(self, words=(kind.client,))
                kind.validate(plan)
                return plan
            problems.append(problem)
        raise MachineError(
            f"These tasks run in containers, and this machine has no container runtime: {'; '.join(problems)}.",
            "Start Docker or install Podman on each machine with engines.",
        )

    def opened(self, folder: Path) -> Sandbox:
        """Return an episode's sandbox with a folder that does not exist yet."""
        return self.kind(self, folder)


class Sandbox(ABC):
    """The sandbox of one episode: `async with`, then `run`."""

    networks: tuple[str, ...] = (FULL,)
    """Values of `environment.network`; empty: any."""

    def __init__(self, plan: SandboxPlan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self._others = frozenset(descendants(os.getpid()))
        """What this process had started before, as a test's process has."""

    @classmethod
    def validate(cls, plan: SandboxPlan) -> None:
        """Raise InputError for settings that this kind does not take."""
        if cls.networks and plan.network not in cls.networks:
            name, known = plan.words[0] if plan.words else "none", ", ".join(cls.networks)
            raise InputError(
                f"environment.network = {plan.network!r}, and environment.sandbox={name} knows {known}.",
                "bubblewrap knows `model`; docker and podman know the names of their networks.",
            )

    @classmethod
    def require(cls, plan: SandboxPlan) -> None:
        """Raise MachineError if the machine lacks what the sandbox needs."""
        del plan

    def address(self, url: str) -> str:
        """Return the model's URL as programs in the sandbox reach it. Raises InputError if they cannot."""
        return url

    async def run(
        self,
        command: Sequence[str],
        given: bytes = b"",
        variables: Mapping[str, str] = {},
        limit_s: float | None = None,
    ) -> Outcome:
        """Run a command to its end, with `given` as its input. Raises SandboxError for a broken limit."""
        await self._start()
        with self._file() as source, self._file() as output, self._file() as errors:
            source.write(given)
            source.seek(0)
            process = await self._spawned(command, variables or {}, stdin=source, stdout=output, stderr=errors)
            try:
                code = await self._ended(process, limit_s, output, errors)
            finally:
                self._end(process)
                await process.wait()
            return Outcome(code, _text(output), _text(errors))

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End what runs in the sandbox. The episode's host removes the folder."""
        kill_tree(os.getpid(), root=False, spared=self._others)

    # For the kinds

    async def _start(self) -> None:
        """Make the folder, and start what all commands share."""
        self.folder.mkdir(exist_ok=True)

    @abstractmethod
    def _outside(self, command: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
        """Return the machine's command and environment variables that run a command in the sandbox."""

    async def _spawned(self, command: Sequence[str], variables: Mapping[str, str], **settings: Any) -> Process:
        words, environment = self._outside(command, variables)
        file_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._most_disk, file_limits[1]))  # the command inherits it
        try:
            return await asyncio.create_subprocess_exec(*words, env=environment, start_new_session=True, **settings)
        except OSError as error:
            raise SandboxError("raised", f"{words[0]} cannot be started: {error.strerror or error}") from error
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, file_limits)

    def _end(self, process: Process) -> None:
        """End all that a command has started: its process group in one call, which no fork bomb outruns."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        kill_tree(os.getpid(), root=False, spared=self._others)

    def _members(self) -> list[int]:
        """Return the processes that count for the limits."""
        return descendants(os.getpid(), self.plan.processes, self._others)

    async def _used_disk(self) -> int:
        return await asyncio.to_thread(_bytes_in, self.folder)

    @property
    def _most_disk(self) -> int:
        return int(self.plan.disk_gib * GIB)

    def _file(self) -> IO[bytes]:
        return tempfile.TemporaryFile(dir=self.folder)

    async def _ended(self, process: Process, limit_s: float | None, *printed: IO[bytes]) -> int | None:
        """Return the exit code; None: it took too long. Raises SandboxError for a broken limit."""
        loop, end = asyncio.get_running_loop(), asyncio.ensure_future(process.wait())
        begun = disk_looked = loop.time()
        while not (await asyncio.wait([end], timeout=LOOK_S))[0]:
            self._require_within_limits()
            if limit_s is not None and loop.time() - begun > limit_s:
                return None
            if loop.time() - disk_looked > DISK_LOOK_S:
                await self._require_disk(printed)
                disk_looked = loop.time()
        await self._require_disk(printed)
        if end.result() == -signal.SIGXFSZ:
            raise SandboxError("disk", f"a file is larger than environment.disk_gib = {self.plan.disk_gib:g}")
        return end.result()

    def _require_within_limits(self) -> None:
        members, most = self._members(), self.plan.memory_gib * GIB
        if len(members) > self.plan.processes:
            raise SandboxError("processes", f"it has more than environment.processes = {self.plan.processes} processes")
        # Forked processes share pages, which only the slower sum counts once.
        if sum(map(_memory, members)) > most and (used := sum(map(_shared_memory, members))) > most:
            raise SandboxError(
                "memory", f"it uses {used / GIB:.1f} GiB, more than environment.memory_gib = {self.plan.memory_gib:g}"
            )

    async def _require_disk(self, printed: Sequence[IO[bytes]]) -> None:
        used = await self._used_disk() + sum(os.fstat(file.fileno()).st_size for file in printed)
        if used >= self._most_disk:
            raise SandboxError(
                "disk", f"it has written {used / GIB:.1f} GiB, and environment.disk_gib is {self.plan.disk_gib:g}"
            )


class PlainProcesses(Sandbox):
    """`none`: processes of this machine, with rlctl's variables and working directory. TMPDIR is the folder."""

    def _outside(self, command: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
        return list(command), {**os.environ, "TMPDIR": str(self.folder), **variables}


class UserCommand(Sandbox):
    """A command of the user, to which the program's command is appended. `{command}` in it is the program's command as
    one quoted text, for ssh, and `{name}` a name of the episode. Variables are set by `env`, since many tools pass
    none on."""

    @classmethod
    def require(cls, plan: SandboxPlan) -> None:
        if shutil.which(plan.words[0]) is None:
            raise MachineError(
                f"environment.sandbox = {plan.words[0]}: there is no such command on this machine.",
                f"Install it, or choose {', '.join(KINDS)}.",
            )

    def _outside(self, command: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
        program = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
        name, variables = f"{self.folder.parent.name}-{self.folder.name}", {**os.environ, "TMPDIR": str(self.folder)}
        words = [word.replace("{name}", name) for word in self.plan.words]
        if not any("{command}" in word for word in words):
            return [*words, *program], variables
        return [word.replace("{command}", shlex.join(program)) for word in words], variables


class Bubblewrap(Sandbox):
    """Namespaces of `bwrap`: the system, Python and the working directory are read-only, /tmp is the folder and home,
    and no other process is in sight. `environment.network=model`: no network but the model."""

    networks = (FULL, "model")

    def __init__(self, plan: SandboxPlan, folder: Path) -> None:
        super().__init__(plan, folder)
        self._gateway: tuple[str, int] | None = None

    @classmethod
    def require(cls, plan: SandboxPlan) -> None:
        hint = "Install bubblewrap and allow user namespaces, or choose another environment.sandbox."
        if shutil.which("bwrap") is None:
            raise MachineError("environment.sandbox=bubblewrap: bwrap is not installed on this machine.", hint)
        trial = cls(plan, Path(tempfile.gettempdir()))
        words, environment = trial._outside(["true"], {})
        result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=TRIAL_S, check=False)
        if result.returncode:
            raise MachineError(f"environment.sandbox=bubblewrap: {_last(result.stderr)}.", hint)

    def address(self, url: str) -> str:
        if self.plan.network == FULL:
            return url
        parts = urlsplit(url)
        assert parts.hostname is not None  # the gateway's URL has a host and a port
        assert parts.port is not None
        self._gateway = (parts.hostname, parts.port)
        return parts._replace(netloc=f"127.0.0.1:{parts.port}").geturl()

    def _outside(self, command: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
        files = [Path(word) for word in command if word.startswith("/") and Path(word).is_file()]
        shown = [*SHOWN, sys.prefix, sys.base_prefix, os.getcwd(), *(str(file.parent) for file in files)]
        words = ["bwrap", "--die-with-parent", "--new-session", "--unshare-user-try", "--unshare-pid", "--unshare-ipc"]
        words += ["--unshare-uts", *(["--unshare-net"] if self.plan.network == "model" else [])]
        words += ["--bind", str(self.folder), "/tmp"]
        for folder in sorted(set(shown)):  # a folder before those in it
            words += ["--ro-bind-try", folder, folder]
        words += ["--proc", "/proc", "--dev", "/dev", "--chdir", os.getcwd(), *self.plan.words[1:], "--", *command]
        return words, {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "HOME": "/tmp", **variables}

    async def _spawned(self, command: Sequence[str], variables: Mapping[str, str], **settings: Any) -> Process:
        if self._gateway is None:
            return await super()._spawned(command, variables, **settings)
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                arguments = [str(theirs.fileno()), str(self._gateway[1]), *command]
                hand_out = [sys.executable, "-I", "-S", "-c", HAND_OUT, *arguments]
                settings["pass_fds"] = [theirs.fileno()]
                process = await super()._spawned(hand_out, variables, **settings)
            _, descriptors, *_ = await asyncio.to_thread(socket.recv_fds, ours, 1, 1)
        if descriptors:  # none: the program did not start, and its output says why
            connected = partial(_connected, *self._gateway)
            self._server = await asyncio.start_server(connected, sock=socket.socket(fileno=descriptors[0]))
        return process


class Container(Sandbox):
    """A container of `image`. Its first process reads the input of the client that started it and ends with that, so
    the container goes with the episode's process, however that ends. Programs run in it by `exec`."""

    networks = ()
    client = ""

    def __init__(self, plan: SandboxPlan, folder: Path) -> None:
        super().__init__(plan, folder)
        self.user: str | None = None
        self.workdir: str | None = None
        """User and working directory of commands; None: the image's."""
        self.run_arguments: list[str] = []
        """Further arguments of the container's start."""
        self._name = f"rlctl-{secrets.token_hex(8)}"
        self._life: Process | None = None

    @classmethod
    def validate(cls, plan: SandboxPlan) -> None:
        if plan.network == "model":
            raise InputError(
                f"environment.network=model: {cls.client} has no network with the model alone.",
                f"Make one without a way out, `{cls.client} network create --internal NAME`, and set "
                "environment.network=NAME and environment.listen=0.0.0.0.",
            )

    @classmethod
    def problem(cls) -> str:
        """Return why containers cannot run here; empty: they can."""
        if shutil.which(cls.client) is None:
            return f"{cls.client} is not installed"
        try:
            result = subprocess.run(
                [cls.client, "info", "--format", "json"], capture_output=True, text=True, timeout=TRIAL_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{cls.client} did not answer within {TRIAL_S:.0f} s"
        # Without its server, `docker info` of version 28 writes an error and exits with 0 in this format.
        unreached = result.returncode or "Cannot connect" in result.stderr + result.stdout
        return f"{cls.client} does not run: {_last(result.stderr or result.stdout)[:200]}" if unreached else ""

    @classmethod
    def require(cls, plan: SandboxPlan) -> None:
        if problem := cls.problem():
            raise MachineError(
                f"environment.sandbox={cls.client}: {problem}.",
                f"Install and start {cls.client} on each machine with engines, or choose another environment.sandbox.",
            )

    def address(self, url: str) -> str:
        if _is_loopback(urlsplit(url).hostname or "") and self.plan.network != "host":
            raise InputError(
                f"The model is at {url.partition('//')[2].partition('/')[0]}, a loopback address (environment.listen, "
                "environment.address), which programs in containers do not reach: set environment.listen=0.0.0.0 or an "
                "address of this machine, or environment.network=host."
            )
        return url

    async def _start(self) -> None:
        await super()._start()
        if self._life is not None:
            return
        plan = self.plan
        if plan.image is None:
            raise InputError(f"environment.sandbox={self.client} needs an image: set environment.image.")
        words = [
            self.client, "run", "--interactive", "--rm", "--name", self._name, "--label", "rlctl", "--memory",
            f"{int(plan.memory_gib * GIB)}b", "--memory-swap", f"{int(plan.memory_gib * GIB)}b", "--pids-limit",
            str(plan.processes), *([] if plan.network == FULL else ["--network", plan.network]),
            *self.run_arguments, *plan.words[1:], "--entrypoint", "cat", plan.image,
        ]  # fmt: skip
        self._said = self._file()
        self._life = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE, stderr=self._said)
        assert self._life.stdin is not None
        assert self._life.stdout is not None
        self._life.stdin.write(b"begun\n")  # `cat` writes it back once the container runs
        try:
            line = await asyncio.wait_for(self._life.stdout.readline(), START_S)
        except TimeoutError:
            line = b""
        if not line:
            raise SandboxError("sandbox", f"{self.client} started no container: {_last(_text(self._said))}")

    async def __aexit__(self, *_: object) -> None:
        if self._life is not None and self._life.stdin is not None:
            self._life.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._life.wait(), CLOSE_S)
            if self._life.returncode is None:
                await self.asked("rm", "--force", self._name)
        await super().__aexit__()

    async def asked(self, *words: str, given: IO[bytes] | None = None, limit_s: float = CLOSE_S) -> tuple[int, str]:
        """Run the client; return its exit code and its output. Raises SandboxError if it takes too long."""
        process = await asyncio.create_subprocess_exec(
            self.client, *words, stdin=given or DEVNULL, stdout=PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), limit_s)
        except TimeoutError:
            process.kill()
            raise SandboxError("timeout", f"{self.client} {words[0]} took longer than {limit_s:g} s") from None
        return process.returncode or 0, output.decode(errors="replace")

    async def built(self, folder: Path, tag: str, limit_s: float) -> None:
        """Build the image `tag` from a folder with a Dockerfile, unless it exists, and use it."""
        with (self.folder.parent / f"{tag}.lock").open("w") as lock:  # the episodes of a group need the same image
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            if (await self.asked("image", "inspect", tag))[0]:
                code, output = await self.asked("build", "--tag", tag, "--label", "rlctl", str(folder), limit_s=limit_s)
                if code:
                    raise SandboxError("sandbox", f"{self.client} built no image of {folder}: {_last(output)}")
        self.plan = replace(self.plan, image=tag)

    async def copy_in(self, source: Path, target: str) -> None:
        """Copy a file, or the contents of a folder, into a new or existing folder of the container."""
        await self._start()
        code, output = await self.asked("exec", "--user", "0", self._name, "mkdir", "-p", target)
        if not code:
            files = f"{source}/." if source.is_dir() else str(source)
            code, output = await self.asked("cp", files, f"{self._name}:{target}", limit_s=START_S)
        if code:
            raise SandboxError("sandbox", f"{self.client} copied no {source}: {_last(output)}")

    def _outside(self, command: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
        words = [self.client, "exec", "--interactive"]
        for name, value in variables.items():  # the client reads a value from its environment, which no `ps` shows
            words += ["--env", name if os.environ.get(name, value) == value else f"{name}={value}"]
        words += [*(["--user", self.user] if self.user else []), *(["--workdir", self.workdir] if self.workdir else [])]
        return [*words, self._name, *command], {**variables, **os.environ}

    def _end(self, process: Process) -> None:
        """End the client of a command that still runs. The command itself goes on until its container ends."""
        if process.returncode is None:
            process.kill()

    def _members(self) -> list[int]:
        """The container's cgroup has the limits of memory and processes. It ends if its first process does."""
        if self._life is not None and self._life.returncode is not None:
            raise SandboxError("died", f"its container ended: {_last(_text(self._said)) or 'something removed it'}")
        return []

    async def _used_disk(self) -> int:
        code, output = await self.asked("container", "inspect", "--size", "--format", "{{.SizeRw}}", self._name)
        return int(output) if not code and output.strip().isdigit() else 0


class Docker(Container):
    client = "docker"


class Podman(Container):
    client = "podman"


KINDS: dict[str, type[Sandbox]] = {
    "none": PlainProcesses, "bubblewrap": Bubblewrap, "docker": Docker, "podman": Podman,
}  # fmt: skip


async def _connected(host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect a program's connection with the gateway."""
    try:
        far_reader, far_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(_piped(reader, far_writer), _piped(far_reader, writer))
    except OSError:
        writer.close()


async def _piped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    writer.close()


def _memory(pid: int) -> int:
    """Return the bytes that belong to a process alone or to it and its forks; 0: it has ended."""
    with contextlib.suppress(OSError, ValueError):
        resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
        return (resident - shared) * PAGE
    return 0


def _shared_memory(pid: int) -> int:
    """Return the proportional set size in bytes; 0: it has ended, or is of another user."""
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_full_info().pss)
    return 0


def _bytes_in(folder: Path) -> int:
    size = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(root, name)).st_blocks * 512
    return size


def _text(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - MOST_OUTPUT))
    return file.read().decode(errors="replace")


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it wrote no error"])[-1].strip().rstrip(".")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
