"""Checks of processors, GPUs and memory."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlctl.doctor.check import GIB, Check, gib

# Two engines and Ray with the laptop preset's model hold about 6 GiB.
LEAST_MEMORY = 6 * GIB
# Ray's smallest object store plus the weights of a small model on their way to the engine.
LEAST_SHARED_MEMORY = 1 * GIB
# Weights, gradients and both Adam moments in float32, and the generation engine's copy of the weights.
TRAINING_BYTES_PER_PARAMETER = 20
FEW_OPEN_FILES = 4096


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it."""

    name: str
    memory_bytes: int
    driver: str


def list_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine as nvidia-smi lists them; none where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return ()
    if done.returncode:
        return ()
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]
    return tuple(Gpu(name, int(memory) * 1024**2, driver) for name, memory, driver in rows if memory.isdigit())


def check_cpu(flags: frozenset[str] | None = None, cores: int | None = None) -> Check:
    """A processor with AVX2, which the CPU build of vLLM is compiled for, and more than one core."""
    flags = cpu_flags() if flags is None else flags
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    widest = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX2"
    detail = f"{cores} core(s), {widest}"
    if "avx2" not in flags:
        return Check("cpu", "fail", detail, "vLLM needs a processor with AVX2 (2013 or later).")
    if cores < 2:
        return Check("cpu", "warn", detail, "Training and generation share one core; give the machine two or more.")
    return Check("cpu", "ok", detail)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    if not cpuinfo.exists():
        return frozenset()
    lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").partition(":")[2].split())


def check_gpus(wanted: int = 0, kind: str = "auto", gpus: tuple[Gpu, ...] | None = None) -> Check:
    """As many GPUs on this node as are wanted (0: none needed), of the wanted kind where one is named."""
    from rlctl.planner.cluster import match_device

    gpus = list_gpus() if gpus is None else gpus
    names = sorted({gpu.name for gpu in gpus})
    detail = f"{len(gpus)} x {', '.join(names)}, driver {gpus[0].driver}" if gpus else "no NVIDIA GPU"
    if len(gpus) < wanted:
        fix = "Use `--preset laptop` or `--gpu cpu`, or run on a node with GPUs and a working nvidia-smi."
        return Check("gpus", "fail", f"{detail}; {wanted} on each node asked for", fix)
    kinds = {match_device(name) for name in names}
    if wanted and kind not in ("auto", "cpu") and kinds != {kind}:
        return Check("gpus", "fail", f"{detail}; {kind} asked for", "Pass --gpu auto to plan for what is there.")
    if len(names) > 1:
        return Check("gpus", "warn", detail, "Plans assume equal GPUs: choose some with CUDA_VISIBLE_DEVICES.")
    return Check("gpus", "ok", detail if gpus else f"{detail}: everything runs on the CPU")


def check_memory(
    parameters: int = 0, gpus: int = 0, available: float | None = None, total: float | None = None
) -> Check:
    """Enough free memory: for a small model, or (on a CPU) for training a model of `parameters`."""
    total, free = memory_bytes() if available is None else (total or available, available)
    needed = max(LEAST_MEMORY, 0 if gpus else parameters * TRAINING_BYTES_PER_PARAMETER)
    detail = f"{gib(free)} free of {gib(total)}, about {gib(needed)} needed"
    if free < needed:
        return Check("memory", "fail", detail, "Close other programs, take a smaller model, or a larger machine.")
    return Check("memory", "ok", detail)


def memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[float, float]:
    """(total, free) bytes that this process may use: the machine's, or its control group's where that grants less."""
    memory = psutil.virtual_memory()
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        granted = int(text)
        # Page cache counts as used, and the kernel gives it back when it is wanted.
        reclaimable = cgroup_statistic(cgroup / "memory.stat", "inactive_file")
        free = granted - int(used.read_text()) + reclaimable
        return min(memory.total, granted), min(memory.available, free)
    return memory.total, memory.available


def cgroup_statistic(file: Path, key: str) -> int:
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)


def check_shared_memory(weights_bytes: int = 0, directory: Path = Path("/dev/shm"), free: int | None = None) -> Check:
    """Room in shared memory for Ray's object store and one copy of the weights on their way to the engine."""
    if not directory.is_dir():
        return Check("shared-memory", "fail", f"{directory} is missing", "Mount a tmpfs there.")
    usage = psutil.disk_usage(str(directory))
    free = usage.free if free is None else free
    needed = LEAST_SHARED_MEMORY + weights_bytes
    detail = f"{gib(free)} free in {directory}, about {gib(needed)} needed"
    if free < needed:
        return Check(
            "shared-memory", "fail", detail, "In a container: --shm-size or --ipc=host; else remove old files there."
        )
    return Check("shared-memory", "ok", detail)


def check_open_files(limit: int | None = None) -> Check:
    """Room for the sockets and pipes of Ray and its workers."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if limit is None else limit
    shown = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    if limit != resource.RLIM_INFINITY and limit < FEW_OPEN_FILES:
        return Check("open-files", "warn", f"at most {shown} open files", "Raise it with `ulimit -n 65536`.")
    return Check("open-files", "ok", f"at most {shown} open files")
