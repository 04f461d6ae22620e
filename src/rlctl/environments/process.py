"""Episodes in processes beside an engine. A server imports the user's class once and forks a process for each episode.

An episode that hangs, dies, prints or uses memory costs only its own rollout. Everything that it started ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import resource
import secrets
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Awaitable, Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import psutil

from rlctl.environments.environment_plan import EnvironmentPlan, LoadedEnvironment
from rlctl.environments.running_episode import RunningEpisode
from rlctl.environments.sandboxes import SandboxError
from rlctl.errors import RlctlError, first_line
from rlctl.processes.child import Server
from rlctl.processes.owned_folder import REMOVE, OwnedFolder
from rlctl.processes.supervision import adopt_orphans, kill_tree

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
LOOK_S = 0.5
"""Seconds between checks for ended processes."""
LENGTH = struct.Struct("!Q")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
"""Variables of the processes, which have no GPU."""


class EpisodeFailedError(Exception):
    """An environment raised, hung or died. `reason` as in `EpisodeFailure`."""

    def __init__(self, message: str, reason: str = "raised") -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class EnvironmentHost:
    """Starts the processes of episodes for an engine."""

    def __init__(self, plan: EnvironmentPlan) -> None:
        self.plan, self._begun = plan, 0
        self._folder: OwnedFolder | None = None
        self._server = Server(serve, f"the environment {plan.label}")

    def start(self) -> None:
        """Start the server that forks episodes. Raises errors of importing the environment."""
        if self._folder is None:
            self._folder = OwnedFolder(Path(tempfile.gettempdir(), f"rlctl-episodes-{secrets.token_hex(8)}"))
        self._server.start((self.plan, self._folder.folder), {**self.plan.variables, **ENVIRONMENT})

    def begin(self) -> Session:
        ours, theirs = socket.socketpair()
        self._begun += 1
        with theirs:
            try:
                self._fork(theirs)
            except ConnectionError:  # the server died with all episodes, which begin again
                self._server.close()
                self.start()
                self._fork(theirs)
        ours.setblocking(False)
        return Session(self, self._begun, ours)

    def _fork(self, theirs: socket.socket) -> None:
        if (connection := self._server.connection) is not None:
            connection.send((EpisodeProcesses.begin, self._begun))
            reduction.send_handle(connection, theirs.fileno(), None)

    def end(self, episode: int) -> None:
        if (connection := self._server.connection) is not None:
            with contextlib.suppress(ConnectionError):
                connection.send((EpisodeProcesses.end, episode))

    def close(self) -> None:
        self._server.close()
        if self._folder is not None:
            self._folder.close()
            self._folder = None


class Session:
    """The connection to an episode's process. Raises EpisodeFailedError if the episode fails."""

    def __init__(self, host: EnvironmentHost, number: int, connection: socket.socket) -> None:
        self._host, self._number, self._socket = host, number, connection

    async def ask(self, method: Callable[[RunningEpisode, *Ts], Awaitable[R]], *arguments: *Ts, timeout_s: float) -> R:
        try:
            return await asyncio.wait_for(self._asked((method, arguments)), timeout_s)
        except TimeoutError:
            raise EpisodeFailedError(f"{method.__name__} took longer than {timeout_s:g} s", "timeout") from None
        except (EOFError, ConnectionError):
            raise EpisodeFailedError(f"its process died in {method.__name__}", "died") from None

    async def _asked(self, request: object) -> Any:
        await _send(self._socket, request)
        answer = await _receive(self._socket)
        if isinstance(answer, EpisodeFailedError):
            raise answer
        return answer

    def close(self) -> None:
        self._socket.close()
        self._host.end(self._number)


async def _send(connection: socket.socket, message: object) -> None:
    data = pickle.dumps(message)
    await asyncio.get_running_loop().sock_sendall(connection, LENGTH.pack(len(data)) + data)


async def _receive(connection: socket.socket) -> Any:
    (length,) = LENGTH.unpack(await _read(connection, LENGTH.size))
    return pickle.loads(await _read(connection, length))


async def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = await asyncio.get_running_loop().sock_recv(connection, min(length - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def serve(connection: Connection, plan_and_folder: tuple[EnvironmentPlan, Path]) -> None:
    """Fork the processes of episodes from this one, until the connection to the engine's worker ends."""
    plan, folder = plan_and_folder
    loaded = plan.load()
    adopt_orphans()
    processes = EpisodeProcesses(loaded, connection, folder)
    connection.send(None)
    while True:
        if connection.poll(LOOK_S):
            method, number = connection.recv()
            method(processes, number)
        processes.clear_up()


class EpisodeProcesses:
    """The processes of episodes, by the number of the episode. An episode's folder in `folder` goes with it."""

    def __init__(self, loaded: LoadedEnvironment, connection: Connection, folder: Path) -> None:
        self._loaded, self._connection, self._folder = loaded, connection, folder
        self._pids: dict[int, int] = {}
        self._kept = {child.pid for child in psutil.Process().children()}  # started by the environment's `prepare`

    def begin(self, number: int) -> None:
        """Fork the process of an episode. The handle of its connection is the next message."""
        handle = reduction.recv_handle(self._connection)
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            self._connection.close()
            _play(self._loaded, self._folder / str(number), socket.socket(fileno=handle))
        os.close(handle)
        self._pids[number] = pid

    def end(self, number: int) -> None:
        if (pid := self._pids.pop(number, None)) is not None:
            kill_tree(pid)
        if (folder := self._folder / str(number)).exists():
            self._kept.add(os.posix_spawnp("sh", ["sh", "-c", REMOVE, str(folder)], {"PATH": os.defpath}))

    def clear_up(self) -> None:
        """Reap ended processes, and end orphans of episodes."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._pids = {number: pid for number, pid in self._pids.items() if pid != ended[0]}
                self._kept.discard(ended[0])
                for child in psutil.Process().children():
                    if child.pid not in self._kept.union(self._pids.values()):
                        kill_tree(child.pid)


def _play(loaded: LoadedEnvironment, folder: Path, connection: socket.socket) -> None:
    os.setsid()
    adopt_orphans()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    limit = int(loaded.plan.memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # short of memory, the kernel ends it before the engine
    status = 1
    try:
        asyncio.run(_serve(RunningEpisode(loaded, folder), loaded.plan, connection))
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)  # skip the exit handlers and buffers of the server


async def _serve(episode: RunningEpisode, plan: EnvironmentPlan, connection: socket.socket) -> None:
    connection.setblocking(False)
    process = os.getpid()
    while True:
        try:
            method, arguments = await _receive(connection)
        except (EOFError, ConnectionError):
            return
        try:
            answer = await method(episode, *arguments)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
                raise
            reason = error.reason if isinstance(error, SandboxError) else "raised"
            answer = EpisodeFailedError(_message(plan, error, method.__name__), reason)
        if os.getpid() != process:
            os._exit(0)  # a method forked, and this is its copy
        await _send(connection, answer)
        if method is RunningEpisode.close:
            return


def _message(plan: EnvironmentPlan, error: BaseException, method: str) -> str:
    if isinstance(error, RlctlError):
        return error.message
    if isinstance(error, SandboxError):
        return str(error)
    codes = [*plan.tools, *([plan.code] if plan.code else [])]
    place = next((f"; {place}" for code in codes if (place := code.place(error))), "")
    message = f"{method} raised {type(error).__name__}: {first_line(error)}{place}"
    return message.encode(errors="replace").decode()
