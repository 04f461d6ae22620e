"""Files that users name, read up to a bound and never from pipes or devices; temporary folders that nobody leaves."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlctl.errors import ConfigError

TEXT_LIMIT_BYTES = 16 << 20
"""Size of a template, a source or a list of prompts beyond which the wrong file was named."""

ABANDONED_S = 60.0
"""A temporary folder is locked within this time after it was made."""

KEPT, KEPT_S = "kept", 86400.0
"""The file that marks a folder whose logs somebody may want to read, and how long it stays at least."""

KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip


def problem_with(path: Path) -> str | None:
    """Return why `path` is no file that can be read to its end, or None. Opening a pipe may never return."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a zero byte in the name
        return str(error)
    return None if stat.S_ISREG(mode) else f"it is {KINDS.get(stat.S_IFMT(mode), 'of another kind')}, not a file"


def read_text(path: Path, what: str, most_bytes: int = TEXT_LIMIT_BYTES) -> str:
    """Return the text of a file; `what` names it in errors. Raises ConfigError where it cannot be read, is no regular
    file, holds more than `most_bytes`, or is not UTF-8."""
    problem, data = problem_with(path), b""
    if problem is None:
        try:
            with path.open("rb") as file:
                data = file.read(most_bytes + 1)
        except OSError as error:
            problem = error.strerror or str(error)
    if len(data) > most_bytes:
        problem = f"it is larger than {most_bytes:,} bytes"
    if problem is None:
        try:
            return data.decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError:
            problem = "it is not a UTF-8 text"
    raise ConfigError(f"{what} {path} cannot be read: {problem}.")


def written_text(path: Path, errors: str = "strict") -> str:
    """Return the text of a file that rlctl itself wrote. Raises OSError, also where a pipe or a device is in its place:
    these may have no end."""
    if path.exists() and (problem := problem_with(path)):
        raise OSError(problem)
    return path.read_text(encoding="utf-8", errors=errors)


@contextlib.contextmanager
def temporary_folder(name: str, tell: Callable[[str], None] | None = None) -> Iterator[Path]:
    """Make a folder `rlctl-name-...` that is removed at the end, and remove those that killed processes have left.

    With `tell` the folder is for logs, which errors name: where the block fails it is kept for a day and longer, until
    the next folder of the name is made, and `tell` hears so.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"rlctl-{name}-*"):
        _remove_abandoned(folder)
    made, kept = Path(tempfile.mkdtemp(prefix=f"rlctl-{name}-")), False
    lock = os.open(made, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, in whatever way
        yield made
    except Exception:
        if tell is not None and any(path.is_file() and path.stat().st_size for path in made.rglob("*")):
            with contextlib.suppress(OSError):  # the failure itself is what matters
                (made / KEPT).touch()
                kept = True
                tell(f"the logs of the processes are kept in {made}")
        raise
    finally:
        os.close(lock)
        if not kept:
            shutil.rmtree(made, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder of this user that no process holds, and that is not kept."""
    with contextlib.suppress(OSError):  # it is held, or another process removes it
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            found, most_s = os.fstat(lock), KEPT_S if (folder / KEPT).exists() else ABANDONED_S
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > most_s:
                shutil.rmtree(folder)
        finally:
            os.close(lock)
