"""A directory that is complete or absent (written aside under a lock, flushed and renamed), and its large files."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from filelock import FileLock, Timeout

from rlctl.config.files import flush
from rlctl.errors import InputError, MachineError, RlctlError
from rlctl.telemetry.start_watch import bounded_wait

FREE_SPACE_MARGIN = 1.02
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Lack of space on the disk, or of a quota."""
MODEL_FILES = (
    "config.json", "*.safetensors", "model.safetensors.index.json", "latest_checkpointed_iteration.txt", ".metadata",
    "rlctl_conversion.json",
)  # fmt: skip
"""A directory that holds one of these is a model or a checkpoint, and not somebody's other files."""


@contextmanager
def locked(destination: Path, waiting: Callable[[str], None]) -> Iterator[bool]:
    """Hold a destination's lock; yield whether another process had it first. `waiting` is called before a wait. Raises
    InputError if it cannot be locked."""
    path = destination.parent / f".{destination.name}.lock"
    lock, waited = FileLock(path), False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting(f"another process is writing {destination}; waiting for it")
            waited = True
            with bounded_wait():
                lock.acquire()
    except OSError as error:
        raise unwritable(destination, error) from error
    try:
        yield waited
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def unwritable(destination: Path, error: OSError) -> RlctlError:
    """The error for a destination that the file system refuses."""
    if error.errno in FULL:
        reason = f"{destination.parent} filled up while {destination.name} was written; nothing of it is left."
        return MachineError(reason, "Free some space, or choose another destination.")
    return InputError(f"{destination} cannot be written: {error.strerror}.", "Choose another destination.")


@contextmanager
def staged(destination: Path, needed_bytes: int, force: bool) -> Iterator[Path]:
    """Yield an empty directory that replaces `destination` on success and is removed on failure. Call under `locked`.
    Removes leftovers of killed processes. Raises InputError if it exists without `force`, MachineError without enough
    space."""
    if not force:
        require_absent(destination)
    aside = destination.parent / f".{destination.name}.partial"
    _remove(aside)
    if (free := shutil.disk_usage(destination.parent).free) < needed_bytes * FREE_SPACE_MARGIN:
        reason = f"{destination.parent} has {free / 1e9:.3g} GB free, but {needed_bytes / 1e9:.3g} GB are needed."
        raise MachineError(reason, "Free some space, or choose another destination.")
    try:
        aside.mkdir(parents=True)
        yield aside
        flush(aside)
        old = destination.parent / f".{destination.name}.old"
        _remove(old)
        if destination.exists():  # it is moved away first and removed afterwards
            os.rename(destination, old)
        os.rename(aside, destination)
        _remove(old)
    except (OSError, RuntimeError) as error:  # torch's writers raise RuntimeErrors, which do not say why
        if isinstance(error, RlctlError):
            raise
        filename = Path(os.fsdecode(getattr(error, "filename", None) or destination))
        if is_full(destination.parent, error):
            raise unwritable(destination, OSError(errno.ENOSPC, "")) from error
        if not isinstance(error, OSError) or not filename.is_relative_to(destination.parent):
            raise
        raise unwritable(destination, error) from error
    finally:
        _remove(aside)


def is_full(directory: Path, error: BaseException) -> bool:
    """Whether a write to `directory` failed for lack of space: torch's writers do not say, the free space then does."""
    reasons = (error, error.__cause__, error.__context__)
    if any(isinstance(reason, OSError) and reason.errno in FULL for reason in reasons):
        return True
    with suppress(FileNotFoundError):
        return shutil.disk_usage(directory).free < 1 << 20
    return False


def require_absent(destination: Path) -> None:
    """Raise InputError if `destination` exists."""
    try:
        taken = destination.exists() and any_content(destination)
    except OSError as error:  # a name that is too long, a directory that may not be looked into
        raise unwritable(destination, error) from error
    if taken:
        raise InputError(f"{destination} exists.", "Give --force to replace it, or another destination.")


def require_replaceable(destination: Path, sources: Collection[Path]) -> None:
    """Raise InputError where `destination` is or holds the working directory, a file, one of `sources`, or no model."""
    place = destination.resolve()
    if Path.cwd().is_relative_to(place):
        raise InputError(f"{destination} is the directory that rlctl runs in.", "Name a directory inside of it.")
    if not place.exists():
        return
    if not place.is_dir():
        raise InputError(f"{destination} is a file.", "Name a directory.")
    if not any(place.iterdir()):
        return
    for source in (source.resolve() for source in sources):
        if source.is_relative_to(place) or place.is_relative_to(source):
            reason = f"{destination} cannot be replaced: what is converted is read from {source}."
            raise InputError(reason, "Name another destination.")
    if not any(any(place.glob(pattern)) for pattern in MODEL_FILES):
        entries = ", ".join(sorted(entry.name for entry in place.iterdir())[:3])
        reason = f"{destination} holds no model but other files ({entries}): --force does not replace them."
        raise InputError(reason, "Name another destination, or remove them yourself.")


def any_content(directory: Path) -> bool:
    return not directory.is_dir() or any(directory.iterdir())


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


PIECE = 1 << 20
"""Bytes per write: one write(2) of 64 MiB took up to ten times as long as 64 of 1 MiB (page cache of ext4, Linux
6.18)."""


BEGUN_BYTES = 16 << 20
"""The kernel starts to write to the disk at this size, so that the last flush is short."""
_SYNC_FILE_RANGE_WRITE = 2


class _Pieces(io.FileIO):
    _begun = 0

    def write(self, data: object) -> int:
        """Writes all of `data` (anything with a buffer), however little the kernel takes at once; returns its bytes."""
        left = memoryview(data).cast("B")  # type: ignore[arg-type]
        total = len(left)
        while left:
            left = left[super().write(left[:PIECE]) or 0 :]
        if (end := self.tell()) - self._begun >= BEGUN_BYTES:
            _begin_flush(self.fileno(), self._begun, end - self._begun)
            self._begun = end
        return total


def _begin_flush(descriptor: int, start: int, size: int) -> None:
    """Tell the kernel to start writing a range to disk. The flush at the end reports errors."""
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)  # of Linux
    if begin is not None:
        begin(ctypes.c_int(descriptor), ctypes.c_int64(start), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


def open_to_write(path: Path) -> BinaryIO:
    """A new file, replacing one that is there."""
    return cast(BinaryIO, io.BufferedWriter(_Pieces(str(path), "wb")))


class Flusher:
    """Flushes complete files to the disk and closes them on a thread, while the main thread continues."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "flush")
        self._under_way: list[Future[None]] = []

    def close(self, stream: BinaryIO) -> None:
        stream.flush()  # empties Python's buffer, so that readers see the whole file
        self._under_way.append(self._pool.submit(_flush_and_close, stream))

    def wait(self) -> None:
        """Wait until all files are on the disk. Raises OSError where one could not be written."""
        for each in self._under_way:
            each.result()
        self._pool.shutdown()


def _flush_and_close(stream: BinaryIO) -> None:
    with stream:
        os.fsync(stream.fileno())
