"""The disk mover: policy ranks write their boxes to files, and engines read them once a version is complete.

It is for debugging, and for engines that share nothing with the trainers but a file system.

    <directory>/version-7/channel-0-policy-rank-1      a header (which boxes) and the boxes, round by round
    <directory>/version-7/manifest.json                the version, and how long each file must be

A version is written aside, forced to disk and renamed, so that it is there as a whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import BinaryIO

import torch

from rlctl.checkpoints.staging import flush_one
from rlctl.errors import VerificationError, WorkerError
from rlctl.transport.round_buffers import Images, Packer
from rlctl.transport.rounds import Channel, Connection, Lengths, Rounds, decode_parts, encode_parts, message_bytes

MANIFEST = "manifest.json"
LENGTH_BYTES = 8


def version_directory(directory: str | None, version: int, *, whole: bool = True) -> Path:
    """The directory of a version, or (not `whole`) the one in which it is written until it is complete."""
    if directory is None:
        raise WorkerError("The disk mover needs refit.directory.")
    return Path(directory) / (f"version-{version}" if whole else f"version-{version}.writing")


def file_name(channel: int, sender: str) -> str:
    """The file of one sender for one channel."""
    return f"channel-{channel}-{sender.replace(' ', '-')}"


@contextmanager
def _explained() -> Iterator[None]:
    """Name the key of the configuration in whatever the file system refuses in the block."""
    try:
        yield
    except OSError as error:
        hint = "Choose a directory that every node can write, with room for two versions of the weights."
        raise WorkerError(f"refit.directory: {error}.", hint) from None


class WriteFile:
    """Writes a sender's file for one channel."""

    def __init__(self, directory: str | None, version: int, channel: int, sender: str, header: bytes) -> None:
        folder = version_directory(directory, version, whole=False)
        with _explained():
            folder.mkdir(parents=True, exist_ok=True)
            self.file: BinaryIO = (folder / file_name(channel, sender)).open("wb", buffering=0)
            self.file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)

    def write(self, memory: torch.Tensor) -> None:
        data = memory.numpy().data
        with _explained():
            while data:
                data = data[self.file.write(data) :]

    def finish(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()


class ReadFile:
    """Reads a sender's file for one channel from the front."""

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
        data = memory.numpy().data
        while data:
            count = self.file.readinto(data)
            if not count:
                raise VerificationError(f"{self.path} ends too early.")
            data = data[count:]

    def close(self) -> None:
        self.file.close()


def open_read(directory: str | None, version: int, channel: int, sender: str) -> ReadFile:
    """Open a sender's file of a complete version. Raises VerificationError if the version is another, or not whole."""
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
            f"{path} has {size} bytes of version {manifest['version']}, but "
            f"{manifest['files'].get(path.name)} bytes of version {version} were expected."
        )
    return ReadFile(path)


def publish(directory: str | None, version: int) -> None:
    """Make a version visible that every sender has written."""
    writing, final = version_directory(directory, version, whole=False), version_directory(directory, version)
    files = {path.name: path.stat().st_size for path in writing.iterdir()}
    with (writing / MANIFEST).open("w") as file:
        json.dump({"version": version, "files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    flush_one(writing)
    if final.exists():
        shutil.rmtree(final)
    writing.rename(final)
    flush_one(final.parent)


def remove_others(directory: str | None, version: int | None) -> None:
    """Remove every version but `version` (None: all, and the directory)."""
    if directory is None or not Path(directory).exists():
        return
    for path in Path(directory).glob("version-*"):
        if version is None or path.name != f"version-{version}":
            shutil.rmtree(path, ignore_errors=True)
    if version is None:
        Path(directory).rmdir()


class DiskSender:
    """Writes one rank's boxes into its file of a channel."""

    def __init__(self, channel: Channel, rank: int, packer: Packer) -> None:
        self.channel, self.packer = channel, packer
        self.name = channel.connection.senders[channel.senders.index(rank)]
        self._header = encode_parts(packer.parts)
        self._buffer = torch.empty(max(map(message_bytes, packer.parts), default=0), dtype=torch.uint8)

    @contextmanager
    def begin(self, version: int, attempt: int) -> Iterator[None]:
        link = self.channel.connection
        self._file = WriteFile(link.directory, version, self.channel.index, self.name, self._header)
        with self._file.file:
            yield
            self._file.finish()

    def wait(self, index: int) -> torch.Tensor:
        return self._buffer

    def done(self, index: int) -> None:
        self._file.write(self._buffer[: message_bytes(self.packer.parts[index])])

    def wait_changes(self, index: int) -> torch.Tensor:
        raise WorkerError("The disk mover sends whole boxes.")

    def done_changes(self, index: int, length: int) -> None:
        raise WorkerError("The disk mover sends whole boxes.")

    def close(self) -> None:
        pass


class DiskReceiver:
    """Reads rounds from the files of a finished version in a directory that both sides see."""

    def __init__(self, connection: Connection, rounds: Rounds) -> None:
        self.connection, self.rounds = connection, rounds

    @contextmanager
    def begin(self, version: int, attempt: int, changes: Lengths | None = None) -> Iterator[None]:
        link = self.connection
        with ExitStack() as stack:
            self._files = [
                stack.enter_context(closing(open_read(link.directory, version, link.channel, sender)))
                for sender in link.senders
            ]
            parts = [decode_parts(file.header) for file in self._files]
            self.images = Images(self.rounds, parts, torch.device("cpu"), link.capacity)
            yield

    def wait(self, index: int) -> torch.Tensor:
        for sender, file in enumerate(self._files):
            if len(message := self.images.message(sender, index)):
                file.read_into(message)
                self.images.unpack(sender, index)
        return self.images.image(index)

    def done(self, index: int) -> None:
        pass

    def close(self) -> None:
        pass
