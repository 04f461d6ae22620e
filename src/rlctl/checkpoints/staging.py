"""A directory that is complete or absent: written aside under a lock, flushed, and renamed into place."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlctl.errors import InputError, MachineError, RlctlError

FREE_SPACE_MARGIN = 1.02


@contextmanager
def locked(destination: Path, waiting: Callable[[str], None]) -> Iterator[bool]:
    """Hold the lock of a destination; yields whether another process had it first. `waiting` is told before a wait."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    path = destination.parent / f".{destination.name}.lock"
    waited = False
    while True:
        with path.open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waited:
                    waiting(f"another process is writing {destination}; waiting for it")
                waited = True
                fcntl.flock(stream, fcntl.LOCK_EX)
            if not _is_current(path, stream.fileno()):
                continue  # the holder before us removed the file: whoever comes next would lock another one
            try:
                yield waited
            finally:
                path.unlink(missing_ok=True)
            return


def _is_current(path: Path, descriptor: int) -> bool:
    """Whether the open file is the one that `path` names now."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def staged(destination: Path, needed_bytes: int, force: bool) -> Iterator[Path]:
    """An empty directory beside `destination` that replaces it when the block ends well; removed when it does not.

    What a killed process left aside is removed. Call it under `locked`.

    Raises:
        InputError: the destination exists and `force` is not set.
        MachineError: the file system has less free space than needed.
    """
    if not force:
        require_absent(destination)
    aside = destination.parent / f".{destination.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    require_space(destination.parent, needed_bytes)
    aside.mkdir(parents=True)
    try:
        yield aside
        flush(aside)
        replace(aside, destination)
    except (OSError, RuntimeError) as error:  # torch turns a failed write into a RuntimeError
        if isinstance(error, RlctlError) or not is_full(destination.parent, error):
            raise
        raise MachineError(
            f"{destination.parent} filled up while {destination.name} was written; nothing of it is left.",
            "Free some space, or choose another destination.",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_full(directory: Path, error: BaseException) -> bool:
    """Whether a write to the file system of `directory` failed for want of space. torch's writers say only that they
    failed: what is free then tells."""
    full = {errno.ENOSPC, errno.EDQUOT}
    return getattr(error, "errno", None) in full or shutil.disk_usage(directory).free < 1 << 20


def require_absent(destination: Path) -> None:
    """Raise InputError where there is something at `destination` already."""
    if destination.exists() and any_content(destination):
        raise InputError(f"{destination} exists.", "Give --force to replace it, or another destination.")


def any_content(directory: Path) -> bool:
    """Whether a path is a file or a directory with something in it."""
    return not directory.is_dir() or any(directory.iterdir())


def require_space(directory: Path, needed_bytes: int) -> None:
    """Raise MachineError unless `needed_bytes` (and a little more) are free."""
    free = shutil.disk_usage(directory).free
    if free < needed_bytes * FREE_SPACE_MARGIN:
        raise MachineError(
            f"{directory} has {free / 1e9:.1f} GB free, but {needed_bytes / 1e9:.1f} GB are needed.",
            "Free some space, or choose another destination.",
        )


def flush(directory: Path) -> None:
    """Make sure that files and directory entries are on the disk."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace(aside: Path, destination: Path) -> None:
    """Rename `aside` to `destination`; an existing one is moved away first and removed afterwards."""
    old = destination.parent / f".{destination.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if destination.exists():
        os.rename(destination, old)
    os.rename(aside, destination)
    shutil.rmtree(old, ignore_errors=True)
