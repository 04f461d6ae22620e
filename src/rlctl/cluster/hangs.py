"""Diagnosis of hung processes: their Python stacks go to their logs, and torch's record of collectives to a file beside
each log. Both are requested on the process's node."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ANSWER_S = 5.0
NODE_S = 30.0
"""Time limit of the look at the processes of another node."""
WRITE_S = 0.5
"""Wait after the signal, within which a process writes its stacks."""
RECORD = {"TORCH_FR_BUFFER_SIZE": "2000"}
"""Size of torch's flight recorder. torch reads it when it makes the first process group, and then keeps this many of
the newest collectives of each process."""
NCCL_RECORD = {**RECORD, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
TRACE_FILE = "TORCH_FR_DUMP_TEMP_FILE"
"""Path prefix to which torch's watchdog writes the record after a timeout of NCCL; torch appends the rank."""


@dataclass(frozen=True)
class Process:
    """A process to look at."""

    pid: int
    log: str


@dataclass(frozen=True)
class Collective:
    """A collective that a process has begun and not finished."""

    group: str
    """torch's name of the process group, the same in all ranks."""
    number: int
    what: str


@dataclass(frozen=True)
class Look:
    """The activity of a process: its innermost call and its collectives."""

    where: str = ""
    """The innermost frame of the worker's call, as `function` (file:line)."""
    open: tuple[Collective, ...] = ()
    last: Mapping[str, int] = field(default_factory=dict)
    """Number of the last collective that the process has begun, by group."""
    in_torch: bool = False
    """The innermost frame of some thread is in torch.distributed."""

    @property
    def waits(self) -> bool:
        return bool(self.open) or (self.in_torch and not self.last)


def answer_questions(log: Path) -> None:
    """Make this process answer requests for its record of collectives, before which it writes its stacks to standard
    error (its log). It also writes them after SIGUSR2: while C code holds the GIL, nothing answers."""
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    listening = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):
        listening.bind(_address(os.getpid()))
    listening.listen()
    threading.Thread(target=_answer, args=(listening, record_path(log)), name="hangs", daemon=True).start()


def record_path(log: Path) -> Path:
    return log.with_suffix(".collectives.json")


def _address(pid: int) -> str:
    # An abstract socket, which has no file, belongs to the network namespace. Containers may share the namespace and
    # have the same process numbers, so the name contains the PID namespace.
    return f"\0rlctl-hangs-{os.stat('/proc/self/ns/pid').st_ino}-{pid}"


def _answer(listening: socket.socket, path: Path) -> None:
    while True:
        with contextlib.suppress(Exception):  # a failed diagnosis must not disturb the process
            connection, _ = listening.accept()
            with connection:
                _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if user == os.getuid():
                    # Here, with the GIL: a signal's handler reads the stacks of other threads while they run, which
                    # ended a healthy rank with a segmentation fault.
                    faulthandler.dump_traceback(file=2, all_threads=True)
                    connection.sendall(json.dumps(_write_record(path)).encode())


def _write_record(path: Path) -> list[dict[str, Any]]:
    """Write torch's record of this process's collectives, and return its entries without stacks."""
    if "torch.distributed" not in sys.modules:
        return []
    from torch._C import _distributed_c10d as c10d

    entries = []
    # The first record is NCCL's, which builds without CUDA lack; the second is gloo's.
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if hasattr(c10d, name):
            entries += json.loads(getattr(c10d, name)(True, False)).get("entries", [])
    if entries:
        path.write_text(json.dumps({"entries": entries}))
    return entries


def look_here(processes: Sequence[Process]) -> list[Look]:
    """Request stacks and records from processes of this node, and return their activities."""
    ended = [_size(process.log) for process in processes]
    with ThreadPoolExecutor(max(1, len(processes))) as pool:
        records = list(pool.map(_asked, processes))
    silent = [process for process, record in zip(processes, records, strict=True) if record is None]
    for process in silent:
        if _catches(process.pid):  # SIGUSR2 would end a process without a handler
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGUSR2)
    time.sleep(WRITE_S if silent else 0.0)
    return [
        look_of(_text(process.log, size), record or ())
        for process, size, record in zip(processes, ended, records, strict=True)
    ]


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0


def _text(path: str, begin: int) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")
    return ""


def _catches(pid: int) -> bool:
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (signal.SIGUSR2 - 1) & 1)
    return False


def _asked(process: Process) -> list[dict[str, Any]] | None:
    """Return the record of a process that has written its stacks; None if its interpreter cannot answer, for example
    while C code holds the GIL."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(_address(process.pid))
        parts = []
        while part := connection.recv(1 << 20):
            parts.append(part)
        return json.loads(b"".join(parts))
    return None


FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
TORCH = "/torch/distributed/"
CALL = ("/rlctl/cluster/worker_host.py", "call")
"""File and function of the frame below a worker's call, which identify the thread that runs the call."""


def look_of(stacks: str, record: Sequence[Mapping[str, Any]]) -> Look:
    """Parse the stacks of faulthandler and the entries of torch's flight recorder (JSON)."""
    threads = [list(FRAME.finditer(part)) for part in re.split(r"^(?:Current t|T)hread 0x.*$", stacks, flags=re.M)]
    where = ""
    for frames in threads:
        if any(frame["function"] == CALL[1] and frame["file"].endswith(CALL[0]) for frame in frames):
            where = f"`{frames[0]['function']}` ({frames[0]['file']}:{frames[0]['line']})"
    last: dict[str, int] = {}
    begun = []
    for entry in record:
        if entry.get("is_p2p"):  # sends and receives have separate numbers per pair of ranks
            continue
        group, number = ":".join(entry["process_group"]), int(entry["collective_seq_id"])
        last[group] = max(last.get(group, 0), number)
        if not entry["retired"]:
            begun.append(Collective(group, number, entry["profiling_name"].rpartition(":")[2]))
    in_torch = any(frames and TORCH in frames[0]["file"] for frames in threads)
    return Look(where, tuple(begun), last, in_torch)


def look_at(processes: Mapping[int, tuple[str, Process]], here: str | None) -> dict[int, Look]:
    """Return the activities of ranks. `processes`: (Ray's node ID, process) by rank; `here`: this node's ID."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    by_node: dict[str, dict[int, Process]] = {}
    for rank, (node, process) in processes.items():
        by_node.setdefault(node, {})[rank] = process
    pending = {}
    for node, members in by_node.items():
        if node != here:
            place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            task = ray.remote(num_cpus=0, max_retries=0)(look_here).options(scheduling_strategy=place)
            pending[node] = task.remote(list(members.values()))
    looks = dict(zip(by_node[here], look_here(list(by_node[here].values())), strict=True)) if here in by_node else {}
    for node, ref in pending.items():
        with contextlib.suppress(Exception):  # skip a node without an answer; the caller raises an error anyway
            looks |= zip(by_node[node], ray.get(ref, timeout=NODE_S), strict=True)
    return looks


def behind(looks: Mapping[int, Look]) -> set[int]:
    """Return the ranks that the other ranks wait for."""
    latest: dict[str, int] = {}
    for look in looks.values():
        for operation in look.open:
            latest[operation.group] = max(latest.get(operation.group, 0), operation.number)
    # A rank that waits in an earlier collective of a group holds up the ranks in a later one.
    return {
        rank
        for rank, look in looks.items()
        if not look.waits or any(look.last.get(group, number) < number for group, number in latest.items())
    }


def diagnosis(looks: Mapping[int, Look]) -> str:
    """Return sentences that name the ranks that wait in a collective, and the ranks that they wait for."""
    late = behind(looks)
    waiting = [rank for rank in looks if rank not in late]
    parts = []
    if waiting:
        names = sorted({operation.what for rank in waiting for operation in looks[rank].open})
        parts.append(f"Rank {', '.join(map(str, waiting))} wait{'s' * (len(waiting) == 1)} for other ranks")
        parts[0] += f" in {', '.join(names)}." if names else "."
    for rank in sorted(late):
        state = "is behind" if looks[rank].waits else "does not wait"
        place = f", it is in {looks[rank].where}" if looks[rank].where else ""
        parts.append(f"Rank {rank} {state}{place}.")
    return " ".join(parts)
