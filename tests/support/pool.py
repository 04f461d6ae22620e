"""A pool of processes, one policy rank each; cases are messages to them.

They are forked from a server that has imported torch and Megatron-Core once, and starting one costs very little.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import fields
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp
from torch.distributed import TCPStore

from rlctl.transport.process_group import ServedStore

START_TIMEOUT_S = 180.0
CASE_TIMEOUT_S = 240.0
"""After it the ranks print where they are, and end."""
OTHERS_TIMEOUT_S = 10.0
"""When one has failed: the others may wait for it."""
CASES_A_LIFE = 3
"""Megatron's groups cannot all be freed in a process that rebuilds them: a case leaves some fifty polling threads."""


class Pool:
    """`world_size` processes joined in one gloo group. `run(function, *args)` calls function(rank, *args) on all."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.connections: list[Connection] = []

    def _start(self) -> None:
        context = _forking_context()
        # Served from here: a port looked for and given back could be another's by the time rank 0 opens it.
        self._store = ServedStore("127.0.0.1", START_TIMEOUT_S)
        port, world_size = self._store.port, self.world_size
        self.cases = 0
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        self._collect(START_TIMEOUT_S)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returned; AssertionError with the traceback of the first rank that raised."""
        if self.connections and self.cases == CASES_A_LIFE:
            self.close()
        if not self.connections:
            self._start()
        self.cases += 1
        for connection in self.connections:
            connection.send((function, args))
        return self._collect(CASE_TIMEOUT_S + 30)

    def _collect(self, timeout_s: float) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {connection: rank for rank, connection in enumerate(self.connections)}
        while waiting and (ready := wait([*waiting], timeout_s)):
            for connection in [one for one in waiting if one in ready]:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    answers[rank] = (False, f"[rank {rank}] ended; its stderr may say where it was")
                if not answers[rank][0]:
                    timeout_s = OTHERS_TIMEOUT_S
        answers |= {rank: (False, f"[rank {rank}] did not answer") for rank in waiting.values()}
        failed = [answers[rank][1] for rank in sorted(answers) if not answers[rank][0]]
        if failed:
            self.connections = []  # the next case has other processes
            for process in self.processes:
                process.kill()
            raise AssertionError("a rank raised:\n" + "\n".join(failed))
        return [answers[rank][1] for rank in sorted(answers)]

    def close(self) -> None:
        """End the processes; `run` starts others."""
        for connection in self.connections:
            with contextlib.suppress(OSError):  # a rank ends at once when it sees that another has ended
                connection.send(None)
        for process in self.processes if self.connections else ():
            process.join(20)
            if process.is_alive():
                process.kill()
        self.connections = []


_pools: dict[int, Pool] = {}


def pool_of(world_size: int) -> Pool:
    """Return the pool of a size, and end those of other sizes: the polling threads of an idle rank take about 7% of a
    core."""
    for size, other in _pools.items():
        if size != world_size:
            other.close()
    return _pools.setdefault(world_size, Pool(world_size))


def close_pools() -> None:
    """End all ranks; the next case starts others in a tenth of a second."""
    for pool in _pools.values():
        pool.close()


def _forking_context() -> Any:
    """Processes of this context are forked from a server that has imported `support.forked`."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["support.forked"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), before]))
    try:
        forkserver.ensure_running()  # it looks for what it imports where PYTHONPATH says, and nowhere else
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _serve(rank: int, world_size: int, port: int, connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    from rlctl.backends.megatron import cpu

    cpu.install()
    torch.distributed.init_process_group(
        "gloo",
        store=TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=START_TIMEOUT_S)),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=CASE_TIMEOUT_S + 60),
    )
    connection.send((True, None))
    while (message := connection.recv()) is not None:
        function, args = message
        faulthandler.dump_traceback_later(CASE_TIMEOUT_S, exit=True)
        try:
            connection.send((True, function(rank, *args)))
        except BaseException:  # noqa: BLE001 - whatever it is, the test process reports it
            connection.send((False, f"[rank {rank}] {traceback.format_exc()}"))
        faulthandler.cancel_dump_traceback_later()
    # Without taking the group down, which may wait for the other ranks: the process ends with all its threads.


SLOW = pytest.mark.slow
Pools = Callable[[int], Pool]
Published = Callable[[str], Path]
"""From the name of a model to its directory."""


def covering(cases: dict[str, Any]) -> tuple[str, ...]:
    """Return names of few cases that have every setting of the table: each size, model and field that is not default.

    The cases of one table have the same backend and number of ranks, so each setting is met with both."""
    settings = {name: settings_of(case) for name, case in cases.items()}
    missing = set().union(*settings.values())
    chosen: list[str] = []
    while missing:
        chosen.append(max(settings, key=lambda name: len(settings[name] & missing)))
        missing -= settings[chosen[-1]]
    return tuple(chosen)


def settings_of(case: Any) -> set[tuple[str, str]]:
    """Return the fields of a dataclass, and of the one in its field `parallel`, that are not as by default."""
    plain, found = type(case)(), set()
    for field in fields(case):
        value = getattr(case, field.name)
        if field.name == "parallel":
            found |= {(f"parallel.{name}", "") for name, _ in settings_of(value)}
        elif value != getattr(plain, field.name):
            found.add((field.name, str(value)))
    return found or {("", "")}


def slowly(cases: dict[str, Any] | Iterable[Any], *quick: Any, guards: Any = ()) -> list[Any]:
    """Parameters of a test, of a table by their names; those that are not `quick` are slow tests, or guards."""
    named = cases if isinstance(cases, dict) else {name: name for name in cases}
    assert {*quick, *guards} <= set(named)
    marks = dict.fromkeys(named, (SLOW,)) | dict.fromkeys(guards, (SLOW, pytest.mark.guard)) | dict.fromkeys(quick, ())
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), id=name, marks=marks[name])
        for name, value in named.items()
    ]
