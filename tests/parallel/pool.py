"""A pool of processes that stay up for the test session, one policy rank each; cases are messages to them."""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp
from torch.distributed import TCPStore

START_TIMEOUT_S = 180.0
CASE_TIMEOUT_S = 120.0
CASES_A_LIFE = 12
"""Megatron's groups cannot all be freed in a process that rebuilds them, and each leaves polling threads behind."""


class Pool:
    """`world_size` processes joined in one gloo group. `run(function, *args)` calls function(rank, *args) on all."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        # Served from here: a port looked for and given back could be another's by the time rank 0 opens it.
        limit = datetime.timedelta(seconds=START_TIMEOUT_S)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        port, world_size = self._store.port, self.world_size
        self.cases = 0
        self.connections: list[Connection] = []
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
        if self.cases == CASES_A_LIFE:
            self.close()
            self._start()
        self.cases += 1
        for connection in self.connections:
            connection.send((function, args))
        return self._collect(CASE_TIMEOUT_S)

    def _collect(self, timeout_s: float) -> list[Any]:
        answers = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(timeout_s):
                raise AssertionError(f"rank {rank} did not answer in {timeout_s:.0f} s")
            answers.append(connection.recv())
        failed = [text for ok, text in answers if not ok]
        if failed:
            raise AssertionError("a rank raised:\n" + "\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        for connection in self.connections:
            connection.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()


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
        timeout=datetime.timedelta(seconds=CASE_TIMEOUT_S),
    )
    connection.send((True, None))
    while (message := connection.recv()) is not None:
        function, args = message
        try:
            connection.send((True, function(rank, *args)))
        except BaseException:  # noqa: BLE001 - whatever it is, the test process reports it
            connection.send((False, f"[rank {rank}] {traceback.format_exc()}"))
    torch.distributed.destroy_process_group()
