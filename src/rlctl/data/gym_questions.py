"""Questions of a reasoning-gym task from a process whose hash seed is fixed.

Some tasks iterate over sets of texts (word_ladder, ransom_note and four more of reasoning-gym 0.1.25), so their
questions follow from PYTHONHASHSEED, which Python reads at its start and draws anew for each process.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import weakref
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from rlctl.data.prompt_rows import GymTask
from rlctl.errors import RlctlError, first_line
from rlctl.processes.child import EndedError, Server

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

HASH_SEED = "0"
KEPT = 256
"""Questions kept after use; a row type may look at the next hundred."""
IN_DIGEST = 8
"""First questions in the digest of a task's contents."""


class GymProcess:
    """The process that makes the questions of all tasks. It ends with this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.server = Server(serve, "the questions of reasoning-gym")
        weakref.finalize(self, self.server.close)

    def ask(self, task: GymTask, index: int) -> tuple[dict[str, Any], str | None]:
        """Return a question, and the error of a task that made none."""
        with self._lock:
            if not self.server.runs:  # the end of a Ray session ends all processes of the driver
                self.server.close()
                self.server.start(None, {"PYTHONHASHSEED": HASH_SEED})
            assert self.server.connection is not None  # it has just been started
            try:
                self.server.connection.send((task, index))
                return self.server.receive()
            except (EndedError, ConnectionError):
                return {}, "its process has ended"


_processes: weakref.WeakValueDictionary[str, GymProcess] = weakref.WeakValueDictionary()


def gym_process() -> GymProcess:
    """Return the `GymProcess` that all tasks share: its start imports reasoning-gym, which takes a second or two."""
    return _processes.setdefault("gym", _processes.get("gym") or GymProcess())


class GymQuestions:
    """The questions of a task by index, and their number."""

    def __init__(self, task: GymTask, size: int) -> None:
        self._task, self._size, self._process = task, size, gym_process()
        self._kept = lru_cache(KEPT)(self._ask)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._kept(index)

    def _ask(self, index: int) -> dict[str, Any]:
        question, error = self._process.ask(self._task, index)
        if error is not None:
            raise RlctlError(f"reasoning-gym task {self._task.name!r} made no question {index}: {error}.")
        return question


def questions_of(task: GymTask, dataset: ProceduralDataset) -> ProceduralDataset | GymQuestions:
    """Return the questions of a task as a process with a fixed hash seed makes them."""
    return GymQuestions(task, len(dataset)) if sys.flags.hash_randomization else dataset


def contents_digest(questions: ProceduralDataset | GymQuestions) -> str:
    """Return a digest of a task's first questions and answers."""
    rows = [questions[index] for index in range(min(IN_DIGEST, len(questions)))]
    return hashlib.sha256(repr([(row["question"], str(row["answer"])) for row in rows]).encode()).hexdigest()


def serve(connection: Connection, _: None) -> None:
    """Answer each task and index with (question, error)."""
    from rlctl.data.gym_tasks import build_task

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of a task
    datasets: dict[str, ProceduralDataset] = {}
    connection.send(None)
    while True:
        task, index = connection.recv()
        try:
            if (name := repr(task)) not in datasets:
                datasets[name] = build_task(task)
            answer = (datasets[name][index], None)
        except Exception as error:  # noqa: BLE001 - the caller reports whatever a task raises
            answer = ({}, f"{type(error).__name__}: {first_line(error)}")
        connection.send(answer)
