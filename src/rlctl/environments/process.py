"""The process of a run's environments, next to an engine, and the processes of single episodes that are forked from it.

    engine worker -- supervisors -- process of the environments -- one process an episode -- what the episode starts

The process of the environments imports the user's class once and runs none of its episodes. An episode that hangs,
dies, prints or takes memory has a process to itself, so that it costs its own rollout. When an episode is over, all
that it has started is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pickle
import random
import resource
import signal
import socket
import struct
import sys
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from rlctl.environments.plan import EnvironmentPlan, LoadedEnvironment, Reply
from rlctl.errors import RlctlError, first_line
from rlctl.isolation.child_process import ChildProcess, begun
from rlctl.isolation.supervisor import PR_SET_CHILD_SUBREAPER

LOOK_S = 0.5
"""Seconds between two looks for processes that have ended."""
LENGTH = struct.Struct("!Q")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
"""Variables of the processes: they have no device."""


class EpisodeFailedError(Exception):
    """An environment failed: what it raised, or that it hung or died."""


class EnvironmentHost:
    """The engine's side: begins episodes, each in a process of its own."""

    def __init__(self, plan: EnvironmentPlan) -> None:
        self.plan, self._begun = plan, 0
        self._child = ChildProcess(__name__, f"the environment {plan.label}")

    def start(self) -> None:
        """Start the process that the episodes are forked from. Raises what importing the environment raised."""
        self._child.start(self.plan, ENVIRONMENT)

    def begin(self) -> Session:
        """Begin an episode."""
        ours, theirs = socket.socketpair()
        self._begun += 1
        with theirs:
            try:
                self._tell("begin", theirs)
            except ConnectionError:  # the process died, and all episodes with it: they begin again
                self._child.close()
                self.start()
                self._tell("begin", theirs)
        ours.setblocking(False)
        return Session(self, self._begun, ours)

    def _tell(self, command: str, handle: socket.socket | None = None, episode: int | None = None) -> None:
        connection = self._child.connection
        if connection is None:
            return
        connection.send((command, episode or self._begun))
        if handle is not None:
            reduction.send_handle(connection, handle.fileno(), None)

    def end(self, episode: int) -> None:
        """End the process of an episode, and what it has started."""
        with contextlib.suppress(ConnectionError):
            self._tell("end", episode=episode)

    def close(self) -> None:
        """End all processes."""
        self._child.close()


class Session:
    """One episode in its process. Raises EpisodeFailedError where it fails."""

    def __init__(self, host: EnvironmentHost, number: int, connection: socket.socket) -> None:
        self._host, self._number, self._socket = host, number, connection

    async def ask(self, command: str, *arguments: Any, timeout_s: float) -> Reply:
        """Return the reply to `reset`, `step` or `close`."""
        try:
            return await asyncio.wait_for(self._asked((command, arguments)), timeout_s)
        except TimeoutError:
            raise EpisodeFailedError(f"{command} took longer than {timeout_s:g} s") from None
        except (EOFError, ConnectionError):
            raise EpisodeFailedError(f"its process died in {command}") from None

    async def _asked(self, request: Any) -> Reply:
        loop, data = asyncio.get_running_loop(), pickle.dumps(request)
        await loop.sock_sendall(self._socket, LENGTH.pack(len(data)) + data)
        (length,) = LENGTH.unpack(await self._received(LENGTH.size))
        found = pickle.loads(await self._received(length))
        if isinstance(found, str):
            raise EpisodeFailedError(found)
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
        """End the episode's process."""
        self._socket.close()
        self._host.end(self._number)


def main() -> None:
    """The process that episodes are forked from. It ends with the connection to the engine's worker."""
    connection, _, loaded = begun(EnvironmentPlan.load)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    episodes: dict[int, int] = {}
    """Number of an episode -> its process."""
    kept = {one.pid for one in psutil.Process().children()}  # what `prepare` of the environment has started
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            if connection.poll(LOOK_S):
                command, number = connection.recv()
                if command == "begin":
                    handle = reduction.recv_handle(connection)
                    sys.stdout.flush()
                    if (process := os.fork()) == 0:
                        connection.close()
                        _play(loaded, Connection(handle))
                    os.close(handle)
                    episodes[number] = process
                else:
                    _end(episodes.pop(number, None))
            _clear_up(episodes, kept)


def _end(process: int | None) -> None:
    if process is None:
        return
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(process)
        for one in (found, *found.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                one.kill()


def _clear_up(episodes: dict[int, int], kept: set[int]) -> None:
    """Reap what has ended, and end what episodes have left behind, which comes to this process when they end."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            for number in [one for one, process in episodes.items() if process == ended[0]]:
                del episodes[number]
            for left in psutil.Process().children():
                if left.pid not in kept.union(episodes.values()):
                    _end(left.pid)


def _play(loaded: LoadedEnvironment, connection: Connection) -> None:
    """The process of one episode: answer until the connection ends."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
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
    episode = None
    process = os.getpid()
    while True:
        try:
            command, arguments = pickle.loads(await asyncio.to_thread(_read, connection.fileno()))
        except EOFError:
            return
        try:
            if command == "reset":
                random.seed(arguments[-1])
            episode = episode or loaded.begin()
            found = await getattr(episode, command)(*arguments)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
                raise
            found = _told(loaded.plan, error, command)
        if os.getpid() != process:
            os._exit(0)  # a method has forked, and its copy has come back from it too
        data = pickle.dumps(found)
        _write(connection.fileno(), LENGTH.pack(len(data)) + data)
        if command == "close":
            return


def _told(plan: EnvironmentPlan, error: BaseException, command: str) -> str:
    """Return what to say of an error in a method of the environment."""
    if isinstance(error, RlctlError):
        return error.message
    codes = [*plan.tools, *([plan.code] if plan.code else [])]
    place = next((f"; {place}" for code in codes if (place := code.place(error))), "")
    told = f"{command} raised {type(error).__name__}: {first_line(error)}{place}"
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
