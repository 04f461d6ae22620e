"""The environments' process next to an engine, and a process forked for each episode.

The process imports the user's class once and runs no episode, so an episode that hangs, dies, prints or uses memory
costs only its own rollout. Everything an episode started ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import psutil

from rlctl.child import adopt_orphans
from rlctl.environments.environment_plan import EnvironmentPlan, LoadedEnvironment
from rlctl.environments.running_episode import RunningEpisode
from rlctl.errors import RlctlError, first_line
from rlctl.isolation.child_process import ChildProcess, begun

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
LOOK_S = 0.5
"""Seconds between checks for ended processes."""
LENGTH = struct.Struct("!Q")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
"""Variables of the processes: they have no device."""


class EpisodeFailedError(Exception):
    """An environment raised, hung or died."""


class EnvironmentHost:
    """The engine's side: starts each episode in a process."""

    def __init__(self, plan: EnvironmentPlan) -> None:
        self.plan, self._begun = plan, 0
        self._child = ChildProcess(__name__, f"the environment {plan.label}")

    def start(self) -> None:
        """Start the process that the episodes are forked from. Raises what importing the environment raised."""
        self._child.start(self.plan, {**self.plan.variables, **ENVIRONMENT})

    def begin(self) -> Session:
        ours, theirs = socket.socketpair()
        self._begun += 1
        with theirs:
            try:
                self._fork(theirs)
            except ConnectionError:  # the process died, and all episodes with it: they begin again
                self._child.close()
                self.start()
                self._fork(theirs)
        ours.setblocking(False)
        return Session(self, self._begun, ours)

    def _fork(self, theirs: socket.socket) -> None:
        if (connection := self._child.connection) is not None:
            connection.send((EpisodeProcesses.begin, self._begun))
            reduction.send_handle(connection, theirs.fileno(), None)

    def end(self, episode: int) -> None:
        if (connection := self._child.connection) is not None:
            with contextlib.suppress(ConnectionError):
                connection.send((EpisodeProcesses.end, episode))

    def close(self) -> None:
        self._child.close()


class Session:
    """One episode in its process. Raises EpisodeFailedError where it fails."""

    def __init__(self, host: EnvironmentHost, number: int, connection: socket.socket) -> None:
        self._host, self._number, self._socket = host, number, connection

    async def ask(self, method: Callable[[RunningEpisode, *Ts], Awaitable[R]], *arguments: *Ts, timeout_s: float) -> R:
        try:
            return await asyncio.wait_for(self._asked((method, arguments)), timeout_s)
        except TimeoutError:
            raise EpisodeFailedError(f"{method.__name__} took longer than {timeout_s:g} s") from None
        except (EOFError, ConnectionError):
            raise EpisodeFailedError(f"its process died in {method.__name__}") from None

    async def _asked(self, request: Any) -> Any:
        loop, data = asyncio.get_running_loop(), pickle.dumps(request)
        await loop.sock_sendall(self._socket, LENGTH.pack(len(data)) + data)
        (length,) = LENGTH.unpack(await self._received(LENGTH.size))
        found = pickle.loads(await self._received(length))
        if isinstance(found, EpisodeFailedError):
            raise found
        return found

    async def _received(self, length: int) -> bytes:
        parts, left = [], length
        while left:
            part = await asyncio.get_running_loop().sock_recv(self._socket, min(left, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self._socket.close()
        self._host.end(self._number)


def main() -> None:
    """The process that episodes are forked from. It ends with the connection to the engine's worker."""
    connection, _, loaded = begun(EnvironmentPlan.load)
    adopt_orphans()
    processes = EpisodeProcesses(loaded, connection)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            if connection.poll(LOOK_S):
                method, number = connection.recv()
                method(processes, number)
            processes.clear_up()


class EpisodeProcesses:
    """The processes of single episodes, by the number of the episode."""

    def __init__(self, loaded: LoadedEnvironment, connection: Connection) -> None:
        self._loaded, self._connection = loaded, connection
        self._pids: dict[int, int] = {}
        self._kept = {one.pid for one in psutil.Process().children()}  # what `prepare` of the environment has started

    def begin(self, number: int) -> None:
        """Fork the process of an episode; the handle of its connection follows."""
        handle = reduction.recv_handle(self._connection)
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            self._connection.close()
            _play(self._loaded, Connection(handle))
        os.close(handle)
        self._pids[number] = pid

    def end(self, number: int) -> None:
        if (pid := self._pids.pop(number, None)) is not None:
            _kill_tree(pid)

    def clear_up(self) -> None:
        """Reap ended processes, and end orphans of episodes."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._pids = {number: pid for number, pid in self._pids.items() if pid != ended[0]}
                for left in psutil.Process().children():
                    if left.pid not in self._kept.union(self._pids.values()):
                        _kill_tree(left.pid)


def _kill_tree(pid: int) -> None:
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(pid)
        for one in (found, *found.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                one.kill()


def _play(loaded: LoadedEnvironment, connection: Connection) -> None:
    os.setsid()
    adopt_orphans()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    limit = int(loaded.plan.memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory is short, it goes before the engine
    status = 1
    try:
        asyncio.run(_serve(loaded, connection))
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)  # nothing of the process that it was forked from is run again


async def _serve(loaded: LoadedEnvironment, connection: Connection) -> None:
    episode, process = RunningEpisode(loaded), os.getpid()
    while True:
        try:
            method, arguments = pickle.loads(await asyncio.to_thread(_read, connection.fileno()))
        except EOFError:
            return
        try:
            found = await method(episode, *arguments)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
                raise
            found = EpisodeFailedError(_told(loaded.plan, error, method.__name__))
        if os.getpid() != process:
            os._exit(0)  # a method has forked, and its copy has come back from it too
        data = pickle.dumps(found)
        _write(connection.fileno(), LENGTH.pack(len(data)) + data)
        if method is RunningEpisode.close:
            return


def _told(plan: EnvironmentPlan, error: BaseException, method: str) -> str:
    if isinstance(error, RlctlError):
        return error.message
    codes = [*plan.tools, *([plan.code] if plan.code else [])]
    place = next((f"; {place}" for code in codes if (place := code.place(error))), "")
    told = f"{method} raised {type(error).__name__}: {first_line(error)}{place}"
    return told.encode(errors="replace").decode()


def _read(descriptor: int) -> bytes:
    (length,) = LENGTH.unpack(_read_exactly(descriptor, LENGTH.size))
    return _read_exactly(descriptor, length)


def _read_exactly(descriptor: int, length: int) -> bytes:
    parts, left = [], length
    while left:
        if not (part := os.read(descriptor, min(left, 1 << 20))):
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
