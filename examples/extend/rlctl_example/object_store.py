"""A transport: the weights go through an object store, by any file system of fsspec (S3, GCS, Azure).

    --set refit.mover=object-store --set refit.directory=s3://bucket/weights

A version is one object per round, channel and policy rank. A store cannot rename, so the object `complete` is written
last, and a version without it is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import torch

from rlctl.errors import InputError, VerificationError, WorkerError
from rlctl.transport.facts import Rates
from rlctl.transport.movers import Receiver, Sender, Transport
from rlctl.transport.round_buffers import Images, Packer
from rlctl.transport.rounds import Channel, Connection, Lengths, Rounds, decode_parts, encode_parts
from rlctl.transport.staging import Staging

BYTES_PER_S = 1e9
"""Assumed rate of a store, for the planner."""


class ObjectStore(Transport):
    """Objects of whole versions under the URL in `refit.directory`."""

    name = "object-store"
    way = "Weights go through an object store."
    stored = True
    whole_only = "an object store takes whole boxes"

    def detour_s(self, size: float, rates: Rates) -> float:
        return 2 * size / BYTES_PER_S

    def check_directory(self, directory: str) -> None:
        try:
            fsspec.core.url_to_fs(directory)
        except (ImportError, ValueError) as error:
            raise InputError(f"refit.directory = {directory} cannot be opened: {error}.", "Name a URL.") from None

    def session_directory(self, directory: str | None, session: str) -> str:
        assert directory is not None  # `stored`: the session was refused without one
        return f"{directory.rstrip('/')}/{session}"

    def publish(self, directory: str, version: int) -> None:
        put(f"{directory}/{version}/complete", b"")

    def retire(self, directory: str, version: int | None) -> None:
        store, root = fsspec.core.url_to_fs(directory)
        store.invalidate_cache()  # other processes have written
        for path in store.ls(root, detail=False) if store.exists(root) else ():
            if path.rstrip("/").rpartition("/")[2] != str(version):
                store.rm(path, recursive=True)
        if version is None and store.exists(root):
            store.rm(root, recursive=True)  # the empty directory, where a store has directories

    def sender(
        self, channel: Channel, rank: int, packer: Packer, *, staging: Staging | None, device: torch.device
    ) -> Sender:
        return ObjectSender(channel, rank, packer)

    def receiver(self, connection: Connection, rounds: Rounds, name: str, device: torch.device) -> Receiver:
        return ObjectReceiver(connection, rounds)


class ObjectSender(Sender):
    """Puts one rank's message of each round into an object."""

    def __init__(self, channel: Channel, rank: int, packer: Packer) -> None:
        link = channel.connection
        self.link, self.name = link, link.senders[channel.senders.index(rank)]
        self.parts = encode_parts(packer.parts)
        self.buffer = torch.empty(max(packer.lengths, default=0), dtype=torch.uint8)

    @contextmanager
    def begin(self, version: int, attempt: int) -> Iterator[None]:
        self.version = version
        try:
            put(place(self.link, version, self.name, "parts"), self.parts)
            yield
        except OSError as error:
            raise WorkerError(f"refit.directory: {error}.", "Does the store take new objects?") from None

    def wait(self, index: int) -> torch.Tensor:
        return self.buffer

    def done(self, index: int, length: int) -> None:
        put(place(self.link, self.version, self.name, f"round-{index}"), self.buffer[:length].numpy().tobytes())


class ObjectReceiver(Receiver):
    """Gets the messages of a complete version, and puts them together."""

    def __init__(self, connection: Connection, rounds: Rounds) -> None:
        self.link, self.rounds = connection, rounds

    @contextmanager
    def begin(self, version: int, attempt: int, changes: Lengths | None = None) -> Iterator[None]:
        self.version = version
        try:
            get(f"{self.link.directory}/{version}/complete")
        except FileNotFoundError:
            raise VerificationError(f"{self.link.directory} holds no complete version {version}.") from None
        parts = [decode_parts(get(place(self.link, version, sender, "parts"))) for sender in self.link.senders]
        self.images = Images(self.rounds, parts, torch.device("cpu"), self.link.capacity)
        yield

    def wait(self, index: int) -> torch.Tensor:
        for number, sender in enumerate(self.link.senders):
            if len(message := self.images.message(number, index)):
                body = get(place(self.link, self.version, sender, f"round-{index}"))
                if len(body) != len(message):
                    raise VerificationError(f"Round {index + 1} of {sender} has {len(body)} bytes, not {len(message)}.")
                message.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
                self.images.unpack(number, index)
        return self.images.image(index)

    def done(self, index: int) -> None:
        """Keep the image until its memory is used for another round."""


def place(link: Connection, version: int, sender: str, what: str) -> str:
    """Return the URL of an object."""
    return f"{link.directory}/{version}/channel-{link.channel}/{sender.replace(' ', '-')}/{what}"


def put(url: str, body: bytes) -> None:
    """Write an object."""
    store, path = fsspec.core.url_to_fs(url)
    store.makedirs(store._parent(path), exist_ok=True)
    store.pipe_file(path, body)


def get(url: str) -> bytes:
    """Read an object."""
    store, path = fsspec.core.url_to_fs(url)
    return store.cat_file(path)
