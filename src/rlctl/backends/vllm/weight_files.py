"""Versions of weights in a directory that both sides of a refit see, for the disk mover.

    <directory>/version-7/channel-0-policy-rank-1      a header (which boxes) and the boxes, round by round
    <directory>/version-7/manifest.json                the version, and how long each file must be

A version is written aside, forced to disk and renamed, so that it is there whole or not at all. Torch is used to read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

from rlctl.errors import VerificationError, WorkerError

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
LENGTH_BYTES = 8


def version_directory(directory: str | None, version: int, *, whole: bool = True) -> Path:
    """Where a version is, or (not `whole`) where it is written until it is complete."""
    if directory is None:
        raise WorkerError("The disk mover needs refit.directory.")
    return Path(directory) / (f"version-{version}" if whole else f"version-{version}.writing")


def file_name(channel: int, sender: str) -> str:
    return f"channel-{channel}-{sender.replace(' ', '-')}"


@contextmanager
def _explained() -> Iterator[None]:
    """What the file system refuses in the block names the key of the configuration."""
    try:
        yield
    except OSError as error:
        hint = "Choose a directory that every node can write, with room for two versions of the weights."
        raise WorkerError(f"refit.directory: {error}.", hint) from None


class WriteFile:
    """A sender's file for one channel, being written."""

    def __init__(self, directory: str | None, version: int, channel: int, sender: str, header: bytes) -> None:
        folder = version_directory(directory, version, whole=False)
        with _explained():
            folder.mkdir(parents=True, exist_ok=True)
            self.file: BinaryIO = (folder / file_name(channel, sender)).open("wb", buffering=0)
            self.file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)

    def write(self, memory: torch.Tensor) -> None:
        data = memoryview(memory.numpy())
        with _explained():
            while data:
                data = data[self.file.write(data) :]

    def finish(self) -> None:
        """On disk, not only in memory."""
        os.fsync(self.file.fileno())
        self.file.close()


class ReadFile:
    """A sender's file for one channel, being read from the front."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("rb", buffering=0)
        length = int.from_bytes(self._exactly(LENGTH_BYTES), "little")
        self.header = self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        data = self.file.read(count)
        if data is None or len(data) != count:
            raise VerificationError(f"{self.path} ends too early.")
        return data

    def read_into(self, memory: torch.Tensor) -> None:
        data = memoryview(memory.numpy())
        while data:
            count = self.file.readinto(data)  # type: ignore[attr-defined]
            if not count:
                raise VerificationError(f"{self.path} ends too early.")
            data = data[count:]

    def __enter__(self) -> ReadFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.file.close()


def open_read(directory: str | None, version: int, channel: int, sender: str) -> ReadFile:
    """A sender's file of a complete version. Raises VerificationError where it is another, or not whole."""
    folder = version_directory(directory, version)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        held = sorted(path.name for path in Path(directory or "").glob("version-*"))
        raise VerificationError(
            f"{directory} does not hold version {version} of the weights ({', '.join(held) or 'it is empty'}).",
            "Engine and policy must see the same files under refit.directory.",
        ) from None
    path = folder / file_name(channel, sender)
    size = path.stat().st_size if path.exists() else None
    if manifest["version"] != version or manifest["files"].get(path.name) != size:
        raise VerificationError(
            f"{path} has {size} bytes of version {manifest['version']}; expected were "
            f"{manifest['files'].get(path.name)} bytes of version {version}."
        )
    return ReadFile(path)


def publish(directory: str | None, version: int) -> None:
    """Make a version that every sender has written visible, whole; versions before it go."""
    writing, final = version_directory(directory, version, whole=False), version_directory(directory, version)
    files = {path.name: path.stat().st_size for path in writing.iterdir()}
    with (writing / MANIFEST).open("w") as file:
        json.dump({"version": version, "files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(writing)
    if final.exists():
        shutil.rmtree(final)
    writing.rename(final)
    _sync_directory(final.parent)


def remove_others(directory: str | None, version: int | None) -> None:
    """Remove every version but `version` (None: all, and the directory)."""
    if directory is None or not Path(directory).exists():
        return
    for path in Path(directory).glob("version-*"):
        if version is None or path.name != f"version-{version}":
            shutil.rmtree(path, ignore_errors=True)
    if version is None:
        Path(directory).rmdir()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
