"""Files in a host's memory that outlive the process that wrote them, and copies of those of another host.

A small process on each host owns a folder in /dev/shm, and removes it when it ends, also when it is killed. Other
processes of the host read and write there as in any folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")
PART_BYTES = 32 << 20
"""Bytes that travel between hosts at a time."""
PART = ".part"
"""Ending of the name of a file that is not complete."""
SWEEP = 'exec 3<&0; (cat <&3 > /dev/null; rm -rf "$0") &'
"""Leaves a process that waits for the end of the one at the other end of its input. That process is no child: Ray ends
the children of a worker with it."""


def free_bytes() -> int:
    """Return the bytes that files in memory can still take on this host."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0


class MemoryFiles:
    """The folders of one host, by the steps that they are of."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(mode=0o700)
        read, self._life = os.pipe()
        subprocess.run(
            ["sh", "-c", SWEEP, folder], stdin=read, env={"PATH": os.defpath}, start_new_session=True, check=True
        )
        os.close(read)

    def free(self) -> int:
        return free_bytes()

    def make(self, step: int) -> None:
        """Make the folder of a step, which is empty."""
        shutil.rmtree(self.place(step), ignore_errors=True)
        self.place(step).mkdir()

    def files(self, step: int) -> dict[str, int]:
        """Return the sizes of the files of a step, by their names in its folder."""
        folder = self.place(step)
        found = (one for one in folder.rglob("*") if one.is_file() and one.suffix != PART)
        return {str(one.relative_to(folder)): one.stat().st_size for one in found}

    def place(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def read(self, step: int, name: str, first: int) -> bytes:
        with (self.place(step) / name).open("rb") as file:
            file.seek(first)
            return file.read(PART_BYTES)

    def copy_from(self, host: Any, step: int, files: dict[str, int]) -> None:
        """Copy files of a step from the process of this kind that `host` is Ray's handle of."""
        import ray

        def part(name: str, first: int) -> Any:
            return host.call.remote(("read",), (step, name, first), {})

        for name, size in files.items():
            path = self.place(step) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(path.name + PART)
            with aside.open("wb") as file:
                coming = part(name, 0)
                for first in range(0, size, PART_BYTES):  # one part travels while the one before is written
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
        """Remove the folders of all other steps."""
        kept = {self.place(step) for step in steps}
        for one in self.folder.iterdir():
            if one not in kept:
                shutil.rmtree(one, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._life)
