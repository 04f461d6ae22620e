"""Checks of the directories that rlctl writes to: whether they can be written and have space."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from rlctl.checkpoints.locations import cache_directory, converted_directory, nearest_existing, write_problem
from rlctl.config.paths import user_path
from rlctl.doctor.finding import GIB, Check, gib

LEAST_SPACE = 2 * GIB
# On a CPU, which takes most. A run's checkpoint: weights, the optimizer's copy of them and two moments of Adam, all in
# float32. A converted model: float32.
CHECKPOINT_BYTES_PER_PARAMETER = 16
CONVERTED_BYTES_PER_PARAMETER = 4
# Linux: sun_path of a Unix socket. A session appends about 80 characters to it.
LONGEST_RAY_DIRECTORY = 107 - 81


def check_directory(name: str, directory: Path, needed: int, fix: str, free: int | None = None) -> Check:
    """Check that `directory` exists or can be made, can be written, and has `needed` bytes free."""
    place = nearest_existing(directory)
    problem = write_problem(place)
    if problem:
        return Check(name, "fail", f"{directory}: {problem}", fix)
    free = psutil.disk_usage(str(place)).free if free is None else free
    detail = f"{directory}{'' if directory.exists() else ' (will be made)'}: {gib(free)} free, {gib(needed)} needed"
    return Check(name, "ok", detail) if free >= needed else Check(name, "fail", detail, fix)


def make(directory: Path) -> str:
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


def check_cache(directory: Path | None = None, free: int | None = None) -> Check:
    """Check the space for the laptop preset's model in rlctl's own cache."""
    fix = "Set RLCTL_CACHE_DIR to a writable directory with space."
    return check_directory("cache", directory or cache_directory(), GIB, fix, free)


def check_ray_directory(directory: Path | None = None) -> Check:
    """Check that Ray's temporary directory can be written, and that its path is short enough for sockets."""
    directory = directory or Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    problem = write_problem(nearest_existing(directory))
    if problem:
        return Check("ray-directory", "fail", problem, "Set RAY_TMPDIR to a writable directory.")
    if not directory.exists() and len(str(directory)) <= LONGEST_RAY_DIRECTORY:
        fix = f"Make it: `mkdir -p {directory}`, or `rlctl doctor --fix`."
        return Check("ray-directory", "fail", f"{directory} does not exist", fix, lambda: make(directory))
    if len(str(directory)) > LONGEST_RAY_DIRECTORY:
        detail = f"{directory} is too long for the names of Ray's sockets"
        fix = f"Set RAY_TMPDIR to a path of at most {LONGEST_RAY_DIRECTORY} characters."
        return Check("ray-directory", "fail", detail, fix)
    return Check("ray-directory", "ok", f"{directory} is writable")
