"""Folders of a session, with notes of its shared memory; the next session removes leftovers."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil

from rlctl.config.files import LOCK, held_folder

NOTES = "shared-memory-"
SHARED_MEMORY = Path("/dev/shm")
# vLLM's ranks meet at a file of this name, and the names of their shared memory begin with the file's.
VLLM_MEETING = "vllm_dist_*"


def lasting_folder(base: Path) -> contextlib.AbstractContextManager[Path]:
    """Make a private folder in `base`; remove it and its noted shared memory at the end. Raises OSError on failure."""
    return held_folder("", base, _remove)


def note_shared_memory(paths: Iterable[Path]) -> None:
    """Register shared memory files for removal with this process's TMPDIR folder, if any."""
    folder = Path(tempfile.gettempdir())
    if (folder / LOCK).exists():
        with (folder / f"{NOTES}{os.getpid()}").open("a") as notes:
            notes.writelines(f"{path}\n" for path in paths)


def family_shared_memory(process: psutil.Process | None = None) -> list[Path]:
    """Return shared memory files mapped by a process (None: this one) and its descendants."""
    process, mapped = process or psutil.Process(), set[int]()
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{member.pid}/maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in lines if f" {SHARED_MEMORY}/" in line}
    # By inode: the map shows the temporary name of a semaphore, which is renamed after it was mapped.
    return sorted(Path(entry) for entry in os.scandir(SHARED_MEMORY) if entry.inode() in mapped)


def _remove(folder: Path) -> None:
    noted = [Path(line) for notes in folder.glob(f"{NOTES}*") for line in notes.read_text().splitlines()]
    orphans = [path for meeting in folder.glob(VLLM_MEETING) for path in SHARED_MEMORY.glob(f"{meeting.name}-*")]
    for path in (*noted, *orphans):
        with contextlib.suppress(OSError):
            path.unlink()
    shutil.rmtree(folder, ignore_errors=True)
