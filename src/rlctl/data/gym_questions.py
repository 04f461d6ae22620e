"""Questions of a reasoning-gym task from a process whose hash seed is fixed.

Some tasks iterate over sets of texts (word_ladder, ransom_note and four more of reasoning-gym 0.1.25), so their
questions follow from PYTHONHASHSEED, which Python reads at its start and draws anew for each process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from rlctl.child import module_command
from rlctl.data.prompt_rows import GymTask
from rlctl.errors import RlctlError, first_line

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

HASH_SEED = "0"
KEPT = 256
"""Questions kept of those that were asked for last; a row type may look at the next hundred."""
IN_DIGEST = 8
"""First questions in the digest of a task's contents."""


class GymQuestions:
    """The questions of a task by index, and their number. The process ends with this object."""

    def __init__(self, task: GymTask, size: int) -> None:
        self._task, self._size, self._lock = task, size, threading.Lock()
        self._start()
        self._kept = lru_cache(KEPT)(self._ask)

    def _start(self) -> None:
        reading, writing = os.pipe()
        self._process = subprocess.Popen(
            module_command(__name__, writing),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # of what a task prints
            pass_fds=[writing],
            env={**os.environ, "PYTHONHASHSEED": HASH_SEED},
        )
        os.close(writing)
        self._answers = os.fdopen(reading, "rb")
        weakref.finalize(self, _end, self._process, self._answers)
        self._send(self._task)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self._lock:
            return self._kept(index)

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None  # it is a pipe
        try:
            pickle.dump(value, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # reading says why

    def _ask(self, index: int) -> dict[str, Any]:
        if self._process.poll() is not None:  # the end of a Ray session ends all processes of the driver
            self._start()
        self._send(index)
        try:
            question, error = pickle.load(self._answers)
        except EOFError:
            question, error = {}, "its process has ended"
        if error is not None:
            raise RlctlError(f"reasoning-gym task {self._task.name!r} made no question {index}: {error}.")
        return cast(dict[str, Any], question)


def _end(process: subprocess.Popen[bytes], answers: Any) -> None:
    assert process.stdin is not None  # it is a pipe
    process.kill()
    process.wait()
    with contextlib.suppress(BrokenPipeError):  # bytes that an ended process has not read
        process.stdin.close()
    answers.close()


def questions_of(task: GymTask, dataset: ProceduralDataset) -> ProceduralDataset | GymQuestions:
    """Return the questions of a task as a process with a fixed hash seed makes them."""
    return GymQuestions(task, len(dataset)) if sys.flags.hash_randomization else dataset


def contents_digest(questions: ProceduralDataset | GymQuestions) -> str:
    """Return a digest of a task's first questions and answers."""
    rows = [questions[index] for index in range(min(IN_DIGEST, len(questions)))]
    return hashlib.sha256(repr([(row["question"], str(row["answer"])) for row in rows]).encode()).hexdigest()


def main() -> None:
    """Make the questions whose numbers stdin holds, after the task; write (question, error) of each to the file with
    the descriptor `sys.argv[2]`."""
    from rlctl.data.prompts import build_task

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the caller's end ends this process
    with os.fdopen(int(sys.argv[2]), "wb") as stream:
        dataset = build_task(pickle.load(sys.stdin.buffer))
        while True:
            try:
                index = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            try:
                answer = pickle.dumps((dataset[index], None))
            except Exception as error:  # noqa: BLE001 - whatever a task raises is told to the caller
                answer = pickle.dumps(({}, f"{type(error).__name__}: {first_line(error)}"))
            stream.write(answer)
            stream.flush()
