"""Measure this machine in under a minute: matmul, memory, local links, disk and host copies. Imports torch; used only
by `rlctl doctor --calibrate`."""

from __future__ import annotations

import multiprocessing as mp
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from rlctl.config.files import temporary_folder
from rlctl.errors import MachineError, first_line
from rlctl.planner.inputs.cluster import MachineProfile, device_reported

MIB = 1024**2
GROUP_TIMEOUT_S = 180.0
REPEATS = 10


def calibrate(directory: Path, tell: Callable[[str], None] = lambda _: None) -> MachineProfile:
    """Measure this machine and the disk of `directory`; `tell` is called before each part."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = device_reported(torch.cuda.get_device_name(0)).name if gpus else "cpu"
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    tell("matmul")
    size, dtype = (8192, torch.bfloat16) if gpus else (1536, torch.float32)  # the training dtype
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    matmul = rate(2.0 * size**3, lambda: torch.mm(a, b, out=out), device)
    tell("memory")
    count = 1024 * MIB if gpus else 256 * MIB  # no cache holds it
    source = torch.ones(count // 4, device=device)
    target = torch.empty_like(source)
    memory = rate(2.0 * count, lambda: target.copy_(source), device)
    tell("between the local devices" if gpus != 1 else "host copies")
    processes = gpus if gpus else min(2, len(os.sched_getaffinity(0)))
    reduce_, pair = group_rates(processes, bool(gpus)) if processes > 1 else (None, None)
    up = down = None
    if gpus:
        pinned = torch.empty(count // 4, pin_memory=True)
        up = rate(count, lambda: target.copy_(pinned, non_blocking=True), device)
        down = rate(count, lambda: pinned.copy_(target, non_blocking=True), device)
    tell("disk")
    write, read = disk_rates(directory)
    return MachineProfile(
        host=platform.node(),
        device=name,
        measured=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        devices=gpus or len(os.sched_getaffinity(0)),
        matmul=matmul,
        memory_bandwidth=memory,
        all_reduce=reduce_,
        point_to_point=pair,
        host_to_device=up,
        device_to_host=down,
        disk_read=read,
        disk_write=write,
    )


def rate(
    work: float, run: Callable[[], object], device: torch.device, meet: Callable[[], object] = lambda: None
) -> float:
    """Return `work` per second: best of `REPEATS` runs after a warm-up. `meet` synchronizes a group's ranks."""

    def seconds() -> float:
        meet()
        began = time.perf_counter()
        run()
        meet()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    seconds()
    return work / min(seconds() for _ in range(REPEATS))


def disk_rates(directory: Path, count: int = 512 * MIB) -> tuple[float | None, float | None]:
    """Return the bytes per second (written and synced, read back) in `directory`; None without room or permission."""
    place = next((p for p in (directory, *directory.parents) if p.is_dir()), None)
    if (
        place is None
        or not os.access(place, os.W_OK)
        or os.statvfs(place).f_bavail * os.statvfs(place).f_frsize < 2 * count
    ):
        return None, None
    block = os.urandom(16 * MIB)
    with tempfile.TemporaryFile(dir=place, buffering=0) as file:  # it has no name, and ends with the process
        began = time.perf_counter()
        for _ in range(count // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        written = count / (time.perf_counter() - began)
        os.posix_fadvise(file.fileno(), 0, count, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        file.seek(0)
        while file.read(16 * MIB):
            pass
        return written, count / (time.perf_counter() - began)


def group_rates(processes: int, cuda: bool) -> tuple[float, float]:
    """Return (all-reduce bus bandwidth, point-to-point bandwidth) between local processes, one per device. Bus
    bandwidth as in nccl-tests: bytes x 2 (n - 1) / n over the time. Raises MachineError after `GROUP_TIMEOUT_S`, or for
    a failed rank or wrong sum."""
    with temporary_folder("calibrate") as folder, mp.get_context("spawn").Pool(processes) as pool:
        store, deadline = str(folder / "store"), time.monotonic() + GROUP_TIMEOUT_S
        answers = pool.imap_unordered(partial(_member, processes, cuda, store), range(processes))
        try:
            rates = [answers.next(deadline - time.monotonic()) for _ in range(processes)]
        except mp.TimeoutError as error:
            raise MachineError(
                f"{processes} local processes did not finish an all-reduce within {GROUP_TIMEOUT_S:.0f} s.",
                "Run `rlctl doctor`, which checks NCCL or gloo between local ranks.",
            ) from error
        except (RuntimeError, OSError) as error:
            raise MachineError(f"A rank failed: {first_line(error)}") from error
    return rates[0]


def _member(processes: int, cuda: bool, store: str, rank: int) -> tuple[float, float]:
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=dist.FileStore(store, processes), rank=rank, world_size=processes
    )
    count = 256 * MIB if cuda else 32 * MIB
    tensor = torch.full((count // 4,), float(rank + 1), device=device)
    dist.all_reduce(tensor)
    if not (tensor == processes * (processes + 1) / 2).all():
        raise MachineError("A rank received a wrong sum.")
    tensor.zero_()

    def from_first_to_second() -> None:
        if rank == 0:
            dist.send(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)

    work = count * 2.0 * (processes - 1) / processes
    bus = rate(work, lambda: dist.all_reduce(tensor), device, dist.barrier)
    pair = rate(float(count), from_first_to_second, device, dist.barrier)
    dist.destroy_process_group()
    return bus, pair


def profile_text(profile: MachineProfile) -> str:
    unit = "cores" if profile.device == "cpu" else f"x {profile.device.upper()}"
    lines = [f"{profile.host}: {profile.devices} {unit}", f"  matmul          {profile.matmul / 1e12:9.3f} TFLOP/s"]
    rates = {
        "memory": profile.memory_bandwidth, "all-reduce": profile.all_reduce, "point to point": profile.point_to_point,
        "host to device": profile.host_to_device, "device to host": profile.device_to_host,
        "disk write": profile.disk_write, "disk read": profile.disk_read,
    }  # fmt: skip
    return "\n".join(lines + [f"  {name:<15} {value / 1e9:9.2f} GB/s" for name, value in rates.items() if value])
