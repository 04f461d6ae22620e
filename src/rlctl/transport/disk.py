"""The disk transport, for debugging and for engines that share only a file system with trainers.

<directory>/version-7/channel-0-policy-rank-1 has a header (boxes) and the boxes by round. A version is written aside,
flushed and renamed, so it is complete or absent.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rlctl.config.files import flush_one
from rlctl.errors import InputError, VerificationError, WorkerError
from rlctl.transport.facts import Rates
from rlctl.transport.movers import Receiver, Sender, Transport
from rlctl.transport.rounds import Channel, Connection, Lengths, Rounds, decode_parts, encode_parts

if TYPE_CHECKING:
    import torch

    from rlctl.transport.round_buffers import Packer
    from rlctl.transport.staging import Staging

LENGTH_BYTES = 8


class Disk(Transport):
    """Files of whole versions in a directory that every node can see."""

    name = "disk"
    way = "Weights go through files."
    stored = True
    whole_only = "the disk mover sends whole boxes"

    def detour_s(self, size: float, rates: Rates) -> float:
        return 2 * size / rates.disk

    def check_directory(self, directory: str) -> None:
        place = Path(directory).absolute()
        there = next(folder for folder in (place, *place.parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise InputError(
                f"refit.directory = {directory} cannot be written to: {there} is not a directory that takes files.",
                "Name another: --set refit.directory=DIR.",
            )

    def publish(self, directory: str, version: int) -> None:
        writing, final = _being_written(directory, version), version_directory(directory, version)
        flush_one(writing)
        if final.exists():
            shutil.rmtree(final)
        writing.rename(final)
        flush_one(final.parent)

    def retire(self, directory: str, version: int | None) -> None:
        if not Path(directory).exists():
            return
        for path in Path(directory).glob("version-*"):
            if version is None or path.name != f"version-{version}":
                shutil.rmtree(path, ignore_errors=True)
        if version is None:
            Path(directory).rmdir()

    def sender(
        self, channel: Channel, rank: int, packer: Packer, *, staging: Staging | None, device: torch.device
    ) -> Sender:
        return DiskSender(channel, rank, packer)

    def receiver(self, connection: Connection, rounds: Rounds, name: str, device: torch.device) -> Receiver:
        return DiskReceiver(connection, rounds)


def version_directory(directory: str | None, version: int) -> Path:
    assert directory is not None  # every session has one
    return Path(directory) / f"version-{version}"


def _being_written(directory: str | None, version: int) -> Path:
    return version_directory(directory, version).with_suffix(".writing")


def file_name(channel: int, sender: str) -> str:
    return f"channel-{channel}-{sender.replace(' ', '-')}"


class DiskSender(Sender):
    """Writes one rank's boxes into its file of a channel."""

    def __init__(self, channel: Channel, rank: int, packer: Packer) -> None:
        import torch

        self.directory = channel.connection.directory
        self.name = file_name(channel.index, channel.connection.senders[channel.senders.index(rank)])
        self._header = encode_parts(packer.parts)
        self._buffer = torch.empty(max(packer.lengths, default=0), dtype=torch.uint8)

    @contextmanager
    def begin(self, version: int, attempt: int) -> Iterator[None]:
        folder = _being_written(self.directory, version)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / self.name).open("wb") as self._file:
                self._file.write(len(self._header).to_bytes(LENGTH_BYTES, "little") + self._header)
                yield
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            hint = "Choose a directory that every node can write, with room for two versions of the weights."
            raise WorkerError(f"refit.directory: {error}.", hint) from None

    def wait(self, index: int) -> torch.Tensor:
        return self._buffer

    def done(self, index: int, length: int) -> None:
        self._file.write(self._buffer[:length].numpy().data)


class DiskReceiver(Receiver):
    """Reads rounds from the files of a finished version in a directory that both sides see."""

    def __init__(self, connection: Connection, rounds: Rounds) -> None:
        self.connection, self.rounds = connection, rounds

    @contextmanager
    def begin(self, version: int, attempt: int, changes: Lengths | None = None) -> Iterator[None]:
        import torch

        from rlctl.transport.round_buffers import Images

        link = self.connection
        with ExitStack() as stack:
            self._files = [stack.enter_context(_opened(link, version, sender)) for sender in link.senders]
            headers = [file.read(int.from_bytes(file.read(LENGTH_BYTES), "little")) for file in self._files]
            parts = [decode_parts(header) for header in headers]
            self.images = Images(self.rounds, parts, torch.device("cpu"), link.capacity)
            yield

    def wait(self, index: int) -> torch.Tensor:
        for sender, file in enumerate(self._files):
            if len(message := self.images.message(sender, index)):
                if file.readinto(message.numpy().data) < len(message):  # type: ignore[attr-defined]
                    raise VerificationError(f"{file.name} ends before round {index + 1}.")
                self.images.unpack(sender, index)
        return self.images.image(index)


def _opened(link: Connection, version: int, sender: str) -> BinaryIO:
    folder = version_directory(link.directory, version)
    try:
        return (folder / file_name(link.channel, sender)).open("rb")
    except FileNotFoundError:
        versions = sorted(path.name for path in folder.parent.glob("version-*"))
        raise VerificationError(
            f"{folder.parent} does not hold version {version} of the weights ({', '.join(versions) or 'it is empty'}).",
            "Engine and policy must see the same files under refit.directory.",
        ) from None
