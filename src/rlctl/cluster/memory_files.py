"""Files in a host's memory that survive the process that wrote them, and copies between hosts.

A small process on each host owns a folder in /dev/shm. The folder is removed when this process ends, even if it is
killed. Other processes on the host use the folder like any other.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.processes.owned_folder import OwnedFolder

SHARED_MEMORY = Path("/dev/shm")
PART_BYTES = 32 << 20
"""Bytes per message between hosts."""
PART = ".part"
"""Suffix of an incomplete file's name."""


def free_bytes() -> int:
    """Return the free bytes in /dev/shm."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0


class MemoryFiles:
    """Owner of one host's folder, with a subfolder per step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._owned = OwnedFolder(self.folder)

    def free(self) -> int:
        return free_bytes()

    def make(self, step: int) -> None:
        """Make an empty folder for a step."""
        shutil.rmtree(self.place(step), ignore_errors=True)
        self.place(step).mkdir()

    def files(self, step: int) -> dict[str, int]:
        """Return the sizes of a step's complete files, by name relative to its folder."""
        folder = self.place(step)
        complete = (path for path in folder.rglob("*") if path.is_file() and path.suffix != PART)
        return {str(path.relative_to(folder)): path.stat().st_size for path in complete}

    def place(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def read(self, step: int, name: str, first: int) -> bytes:
        with (self.place(step) / name).open("rb") as file:
            file.seek(first)
            return file.read(PART_BYTES)

    def copy_from(self, host: Any, step: int, files: dict[str, int]) -> None:
        """Copy files of a step, given as {name: size}, from another host. `host`: Ray's handle of its owner process."""
        import ray

        def part(name: str, first: int) -> Any:
            return host.call.remote(("read",), (step, name, first), {})

        for name, size in files.items():
            path = self.place(step) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(path.name + PART)
            with aside.open("wb") as file:
                coming = part(name, 0)
                for first in range(0, size, PART_BYTES):  # fetch the next part while this part is written
                    here, coming = coming, part(name, first + PART_BYTES)
                    file.write(ray.get(here))
            aside.rename(path)

    def write_out(self, step: int, names: Sequence[str], folder: str) -> None:
        """Copy files of a step to another folder."""
        for name in names:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.place(step) / name, path)

    def keep(self, steps: Sequence[int]) -> None:
        """Remove the folders of all steps except `steps`."""
        kept = {self.place(step) for step in steps}
        for folder in self.folder.iterdir():
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self._owned.close()
