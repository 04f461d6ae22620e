"""CPU seconds of this process and of all processes that it has started, directly or not.

`os.times` misses children that are alive, and those that nobody waits for: Ray's raylet ignores SIGCHLD, and the kernel
then forgets how long its workers ran.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LOOK_EVERY_S = 0.5
REFERENCE_LOOP_S = 0.0235
"""CPU seconds of `loop_s` on the processor for which the limits of `durations` are stated."""


@dataclass(frozen=True)
class ProcessTimes:
    """A process at one moment; `reaped` are the ticks of the children that it has waited for."""

    parent: int
    started: int
    used: int
    reaped: int


def process_times(pid: int) -> ProcessTimes | None:
    """Return the times of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return ProcessTimes(
        parent=int(fields[1]), started=int(fields[19]), used=int(fields[11]) + int(fields[12]),
        reaped=int(fields[13]) + int(fields[14]),
    )  # fmt: skip


class CpuClock:
    """Sums the CPU time of a tree of processes, in which processes come and go."""

    def __init__(self) -> None:
        self._tree: dict[int, ProcessTimes] = {}
        self._ticks = 0
        self._lock = threading.Lock()
        self._add({os.getpid(): times for times in [process_times(os.getpid())] if times})
        threading.Thread(target=self._look_for_processes, name="cpu-clock", daemon=True).start()

    def seconds(self) -> float:
        """Return the CPU seconds up to now. Processes that started within the last half second may be missing."""
        with self._lock:
            self._add({pid: times for pid in self._tree if (times := process_times(pid))})
            return self._ticks / TICKS_PER_S

    def _look_for_processes(self) -> None:
        others: set[int] = set()  # of no process of the tree; nor will they be
        while True:
            time.sleep(LOOK_EVERY_S)
            with self._lock:
                pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
                processes = {pid: times for pid in pids - others if (times := process_times(pid))}
                members = self._members(processes)
                others = (others & pids) | (processes.keys() - members.keys())
                self._add(members)

    def _members(self, processes: dict[int, ProcessTimes]) -> dict[int, ProcessTimes]:
        """Return the processes of the tree. One whose parent has ended stays in it, whoever is its parent now."""
        children: dict[int, list[int]] = {}
        for pid, times in processes.items():
            children.setdefault(times.parent, []).append(pid)
        pending = [pid for pid, times in processes.items() if self._is_known(pid, times)]
        members: set[int] = set()
        while pending:
            pid = pending.pop()
            if pid not in members:
                members.add(pid)
                pending += children.get(pid, [])
        return {pid: processes[pid] for pid in members}

    def _is_known(self, pid: int, times: ProcessTimes) -> bool:
        return pid in self._tree and self._tree[pid].started == times.started

    def _add(self, now: dict[int, ProcessTimes]) -> None:
        """Count what the processes used since the last time. A process that has ended was counted until then; if its
        parent waited for it, the parent's own count has all of it, of which only the rest is new."""
        now = {pid: times for pid, times in now.items() if pid not in self._tree or self._is_known(pid, times)}
        counted: dict[int, int] = {}
        for pid, times in self._tree.items():
            if pid not in now:
                parent = times.parent
                while parent in self._tree and parent not in now:
                    parent = self._tree[parent].parent
                counted[parent] = counted.get(parent, 0) + times.used + times.reaped
        for pid, times in now.items():
            before = self._tree.get(pid, ProcessTimes(0, 0, 0, 0))
            self._ticks += times.used - before.used + max(0, times.reaped - before.reaped - counted.get(pid, 0))
        self._tree = now


def slowness() -> float:
    """Return how many times slower than the reference this processor runs Python; at least 1."""
    return max(1.0, min(loop_s() for _ in range(5)) / REFERENCE_LOOP_S)


def loop_s() -> float:
    start, total = time.thread_time(), 0
    for number in range(300_000):
        total += number * number % 7
    return time.thread_time() - start
