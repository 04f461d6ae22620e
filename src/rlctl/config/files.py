"""Files that users name, read up to a bound; files replaced at once; locks; folders that end with their process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from rlctl.errors import ConfigError

TEXT_LIMIT_BYTES = 16 << 20
"""Size of a template, a source or a list of prompts beyond which the wrong file was named."""

LOCK = "lock"
"""The file in a folder that the process which holds it has locked."""

KEPT, KEPT_S = "kept", 86400.0
"""The file that marks a folder whose logs somebody may want to read, and how long it stays at least."""


def read_text(path: Path, description: str, most_bytes: int = TEXT_LIMIT_BYTES) -> str:
    """Return a file's text; `what` names it in errors. Raises ConfigError if unreadable, over `most_bytes`, or not
    UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
        if len(data) <= most_bytes:
            return data.decode("utf-8-sig").replace("\r\n", "\n")
        problem = f"it is larger than {most_bytes:,} bytes"
    except OSError as error:
        problem = error.strerror or str(error)
    except UnicodeDecodeError:
        problem = "it is not a UTF-8 text"
    raise ConfigError(f"{description} {path} cannot be read: {problem}.")


def flush(directory: Path) -> None:
    """Make sure that files and directory entries are on the disk."""
    for path in [*directory.rglob("*"), directory]:
        flush_one(path)


def flush_one(path: Path) -> None:
    """Make sure that one file, or the entries of one directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace `path` by `data` atomically; `durable` also survives a power loss."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_bytes(data)
    if durable:
        flush_one(aside)
    aside.replace(path)
    if durable:
        flush_one(path.parent)


def json_line(value: Any, indent: int | None = None, other: Callable[[Any], str] | None = None) -> bytes:
    """Return `value` as readable JSON; lone surrogates are escaped. `other` converts types without JSON form."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=other)
    return f"{text}\n".encode(errors="backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, atomically (`replace_file`)."""
    replace_file(path, json_line(value, indent=2))


def lock_file(file: int | IO[Any], *, shared: bool = False) -> bool:
    """Lock an open file until it closes; return False if another process holds the lock. Raises OSError without file
    locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_remove = partial(shutil.rmtree, ignore_errors=True)


@contextlib.contextmanager
def held_folder(name: str, base: Path, remove: Callable[[Path], object] = _remove) -> Iterator[Path]:
    """Make a private folder `rlctl-name...` in `base` and `remove` it at the end unless marked as kept; first remove
    killed processes' folders. A file lock marks it as used. Raises OSError on failure."""
    for folder in abandoned(name, base):
        remove(folder)
    folder = Path(tempfile.mkdtemp(prefix=f"rlctl-{name}", dir=base))
    lock = os.open(folder / f"{LOCK}.new", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock_file(lock)
        os.rename(folder / f"{LOCK}.new", folder / LOCK)  # so that none sees it before it is held
        yield folder
    finally:
        if not (folder / KEPT).exists():
            remove(folder)
        os.close(lock)


def abandoned(name: str, base: Path) -> list[Path]:
    """Return this user's folders of a name whose holder has ended, without folders still to be kept."""
    files = []
    for lock in base.glob(f"rlctl-{name}*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open() as stream:
            kept = (lock.parent / KEPT).exists() and time.time() - lock.parent.stat().st_mtime < KEPT_S
            if lock.stat().st_uid == os.getuid() and not kept and lock_file(stream):
                files.append(lock.parent)
    return files


@contextlib.contextmanager
def temporary_folder(name: str, tell: Callable[[str], None] | None = None) -> Iterator[Path]:
    """Make a temporary folder `rlctl-name-...` (see `held_folder`). With `tell` the folder is for logs: after a failure
    it is kept for a day, and `tell` receives its path."""
    with held_folder(f"{name}-", Path(tempfile.gettempdir())) as made:
        try:
            yield made
        except Exception:
            if tell is not None and any(path.is_file() and path.stat().st_size for path in made.rglob("*")):
                with contextlib.suppress(OSError):  # report the failure, not the clean-up
                    (made / KEPT).touch()
                    tell(f"the logs of the processes are kept in {made}")
            raise


def user_path(name: str | os.PathLike[str]) -> Path:
    """Return `name` with `~` and `~user` expanded, or unchanged if the user is unknown or has no home; its reader then
    reports it."""
    return Path(os.path.expanduser(name))


def cache_directory() -> Path:
    """Return rlctl's cache: RLCTL_CACHE_DIR, else `rlctl` in XDG_CACHE_HOME or ~/.cache."""
    configured = os.environ.get("RLCTL_CACHE_DIR")
    return user_path(configured or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "rlctl")
