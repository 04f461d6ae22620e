"""Checks of one machine: processor, memory, system limits, leftovers of killed runs, writable directories and space."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from rlctl.checkpoints.locations import converted_directory, nearest_existing, write_problem
from rlctl.cluster.ray_session import MOST_BASE_BYTES, session_base
from rlctl.config.files import user_path
from rlctl.doctor.finding import GIB, Check, gib
from rlctl.planner.inputs.cluster import granted_memory
from rlctl.processes import sandbox

# Two engines and Ray with the laptop preset's model hold about 6 GiB.
LEAST_MEMORY = 6 * GIB
# Ray's smallest object store plus the weights of a small model on their way to the engine.
LEAST_SHARED_MEMORY = 1 * GIB
# Weights, gradients and both Adam moments in float32, and the generation engine's copy of the weights.
TRAINING_BYTES_PER_PARAMETER = 20
LEAST_LOCKED = 64 << 20
LEFT_OVER_AGE_S = 600.0
LEAST_SPACE = 2 * GIB
# Sizes on a CPU, the largest case. A run's checkpoint: weights, the optimizer's copy and two moments of Adam, all in
# float32. A converted model: float32.
CHECKPOINT_BYTES_PER_PARAMETER = 16
CONVERTED_BYTES_PER_PARAMETER = 4


def check_cpu(gpus: int = 0, flags: frozenset[str] | None = None, cores: int | None = None) -> Check:
    """Check for more than one core, and without GPUs for AVX2, which the CPU build of vLLM needs."""
    flags = cpu_flags() if flags is None else flags
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    if gpus:
        return Check("cpu", "ok", f"{cores} core(s)")
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


def check_memory(
    parameters: int = 0,
    gpus: int = 0,
    available: float | None = None,
    total: float | None = None,
    planned: float = 0.0,
) -> Check:
    """Check free memory: for a small model, to train `parameters` on a CPU, or for a plan's bytes per node."""
    total, free = memory_bytes() if available is None else (total or available, available)
    needed = max(LEAST_MEMORY, planned or (0 if gpus else parameters * TRAINING_BYTES_PER_PARAMETER))
    detail = f"{gib(free)} free of {gib(total)}, about {gib(needed)} needed"
    if free < needed:
        return Check("memory", "fail", detail, "Close other programs, take a smaller model, or a larger machine.")
    return Check("memory", "ok", detail)


def memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[float, float]:
    """Return the (total, free) bytes that this process may use; a control group may grant less than the machine has."""
    memory, granted = psutil.virtual_memory(), granted_memory(cgroup)
    used = cgroup / "memory.current"
    if used.exists() and granted < memory.total:
        # Page cache counts as used, and the kernel gives it back when it is wanted.
        cached = re.search(r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), re.MULTILINE)
        free = granted - int(used.read_text()) + int(cached[1] if cached else 0)
        return granted, min(memory.available, free)
    return min(memory.total, granted), min(memory.available, granted)


def check_shared_memory(weights_bytes: int = 0, directory: Path = Path("/dev/shm"), free: int | None = None) -> Check:
    """Check that Ray's object store and one copy of the weights fit into shared memory."""
    if not directory.is_dir():
        return Check("shared-memory", "fail", f"{directory} is missing", "Mount a tmpfs there.")
    usage = psutil.disk_usage(str(directory))
    free = usage.free if free is None else free
    needed = LEAST_SHARED_MEMORY + weights_bytes
    detail = f"{gib(free)} free in {directory}, about {gib(needed)} needed"
    if free < needed:
        return Check(
            "shared-memory", "fail", detail, "Remove old files there; start a container with --shm-size or --ipc=host."
        )
    return Check("shared-memory", "ok", detail)


RDMA_DEVICES = Path("/sys/class/infiniband")


def check_locked_memory(gpus: int, limit: int | None = None, rdma: bool | None = None) -> Check:
    """Check the locked memory limit for RDMA, if there is such a network card."""
    rdma = any(RDMA_DEVICES.glob("*")) if rdma is None else rdma
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] if limit is None else limit
    if limit == resource.RLIM_INFINITY:
        return Check("locked-memory", "ok", "unlimited")
    detail = f"at most {gib(limit)} of memory can be locked"
    if gpus and rdma and limit < LEAST_LOCKED:
        fix = "Raise it with `ulimit -l unlimited`, for a container with --ulimit memlock=-1."
        return Check("locked-memory", "warn", f"{detail}: RDMA between nodes fails", fix)
    return Check("locked-memory", "ok", detail)


def check_left_over(directory: Path = Path("/dev/shm"), alive: Iterable[int] | None = None) -> Check:
    """Check that killed runs left no old files `rlctl-<pid>-...` in shared memory."""
    pids, directories = set(psutil.pids() if alive is None else alive), dict[Path, int]()
    for path in directory.glob("rlctl-*-*"):
        pid = path.name.split("-")[1]
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if pid.isdigit() and int(pid) not in pids and time.time() - status.st_mtime > LEFT_OVER_AGE_S:
                directories[path] = status.st_size
    if not directories:
        return Check("left-over-memory", "ok", f"earlier runs left nothing in {directory}")
    detail = f"{len(directories)} segments of runs that ended hold {gib(sum(directories.values()))} in {directory}"
    fix = "Remove them: `rlctl doctor --fix`."
    return Check("left-over-memory", "warn", detail, fix, lambda: remove(directories))


def remove(paths: Iterable[Path]) -> str:
    for path in (removed := list(paths)):
        path.unlink(missing_ok=True)
    return f"removed {len(removed)} files"


def check_directory(name: str, directory: Path, needed: int, fix: str, free: int | None = None) -> Check:
    """Check that `directory` exists or can be made, can be written, and has `needed` bytes free."""
    place = nearest_existing(directory)
    problem = write_problem(place)
    if problem:
        return Check(name, "fail", f"{directory}: {problem}", fix)
    free = psutil.disk_usage(str(place)).free if free is None else free
    detail = f"{directory}{'' if directory.exists() else ' (will be made)'}: {gib(free)} free, {gib(needed)} needed"
    return Check(name, "ok", detail) if free >= needed else Check(name, "fail", detail, fix)


def make_directory(directory: Path) -> str:
    user_path(directory).mkdir(parents=True, exist_ok=True)
    return f"made {directory}"


def check_run_directory(parameters: int = 0, directory: Path = Path("runs"), free: int | None = None) -> Check:
    """Check the space for a run with two checkpoints of a model of `parameters`."""
    needed = max(LEAST_SPACE, 2 * parameters * CHECKPOINT_BYTES_PER_PARAMETER)
    return check_directory("run-directory", directory, needed, "Choose another place with --run-dir.", free)


def check_converted_models(parameters: int = 0, directory: Path | None = None, free: int | None = None) -> Check:
    """Check the space for a converted model of `parameters` where all nodes look for it."""
    needed = max(LEAST_SPACE, parameters * CONVERTED_BYTES_PER_PARAMETER)
    fix = "Set RLCTL_MEGATRON_CHECKPOINT_DIR to a directory that every node can read and write."
    return check_directory("converted-models", directory or converted_directory(), needed, fix, free)


def check_sandbox(layers: Iterable[str] | None = None) -> Check:
    """Check which layers stand between the machine and programs that models write (environment `python`)."""
    present = set(sandbox.layers() if layers is None else layers)
    missing = [layer for layer in sandbox.LAYERS if layer not in present and (layer != "user" or os.geteuid() == 0)]
    detail = (
        f"programs that models write run behind: {', '.join(layer for layer in sandbox.LAYERS if layer in present)}"
    )
    if not missing:
        return Check("sandbox", "ok", detail)
    fix = (
        "docs/environments.md lists the protection and requirements of each layer; without one, use a "
        "disposable machine."
    )
    return Check("sandbox", "warn", f"{detail}; unavailable: {', '.join(missing)}", fix)


def check_ray_directory(directory: Path | None = None) -> Check:
    """Check that Ray's temporary directory can be written, and that its path is short enough for sockets."""
    name, directory = "ray-directory", directory or session_base()
    if problem := write_problem(nearest_existing(directory)):
        return Check(name, "fail", problem, "Set RAY_TMPDIR to a writable directory.")
    if len(os.fsencode(directory)) > MOST_BASE_BYTES:
        detail = f"{directory} is too long for the names of Ray's sockets"
        return Check(name, "fail", detail, f"Set RAY_TMPDIR to a path of at most {MOST_BASE_BYTES} bytes.")
    if not directory.exists():
        fix = f"Make it: `mkdir -p {directory}`, or `rlctl doctor --fix`."
        return Check(name, "fail", f"{directory} does not exist", fix, lambda: make_directory(directory))
    return Check("ray-directory", "ok", f"{directory} is writable")
