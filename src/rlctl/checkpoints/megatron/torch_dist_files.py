"""Files of Megatron's torch_dist checkpoints, read and written by block without Megatron.

The format is torch.distributed.checkpoint (torch.save items at offsets of `__R_N.distcp`, a pickled `.metadata`) with
Megatron's `metadata.json` and `common.pt`. torch's planners need the whole model in one process, and its reader
unpickles unrestricted.
"""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rlctl.checkpoints.hf.hf_files import read_object
from rlctl.checkpoints.megatron.pickles import MAPPED_ALIGNMENT, load_common, load_item, load_metadata
from rlctl.checkpoints.staging import Flusher, open_to_write
from rlctl.errors import InputError
from rlctl.weights.layout import ParamSpec, Span
from rlctl.weights.plan_execution import dtype_of
from rlctl.weights.torch_dist import StoredBlock

BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
FILE_BYTES = 4 << 30
CACHE_BYTES = 128 << 20


@contextmanager
def without_checksums() -> Iterator[None]:
    """Let this thread's torch.save skip the checksums of zip archives, which take most of its time. No reader of
    checkpoints looks at them."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@dataclass
class TorchDistWriter:
    """Writes one checkpoint, a block in memory at a time. Call `write` for every block, then `finish` and `wait`."""

    directory: Path
    shapes: dict[str, ParamSpec]
    """Global shape and dtype of each key."""
    file_bytes: int = FILE_BYTES
    _chunks: dict[str, list[ChunkStorageMetadata]] = field(default_factory=dict)
    _storage: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)
    _objects: list[str] = field(default_factory=list)
    _stream: BinaryIO | None = None
    _file: int = -1
    _flusher: Flusher = field(default_factory=Flusher)

    def write(self, chunk: StoredBlock, values: torch.Tensor) -> None:
        offsets = torch.Size(span.start for span in chunk.box)
        sizes = torch.Size(span.count for span in chunk.box)
        info = self._append(values)
        self._chunks.setdefault(chunk.key, []).append(ChunkStorageMetadata(offsets, sizes))
        self._storage[MetadataIndex(chunk.key, offsets)] = info

    def write_object(self, key: str, value: Any) -> None:
        """Append a small Python value (`_extra_state`)."""
        self._storage[MetadataIndex(key)] = self._append(value)
        self._objects.append(key)

    def finish(self, common: dict[str, Any]) -> None:
        """Write `common.pt`, `.metadata` and `metadata.json`: the checkpoint can be read."""
        self._close()
        torch.save(common, self.directory / "common.pt")
        entries: dict[str, Any] = {key: BytesStorageMetadata() for key in self._objects}
        for key, chunks in self._chunks.items():
            spec = self.shapes[key]
            properties = TensorProperties(dtype=dtype_of(spec.dtype))
            entries[key] = TensorStorageMetadata(properties, torch.Size(spec.shape), chunks)
        metadata = Metadata(state_dict_metadata=entries, planner_data=None, storage_data=self._storage)
        (self.directory / ".metadata").write_bytes(pickle.dumps(metadata))
        (self.directory / "metadata.json").write_text(json.dumps(BACKEND))

    def wait(self) -> None:
        """Wait until all blocks are on the disk."""
        self._flusher.wait()

    def _append(self, value: Any) -> _StorageInfo:
        if self._stream is not None and self._stream.tell() >= self.file_bytes:
            self._close()
        if self._stream is None:
            self._file += 1
            self._stream = open_to_write(self.directory / f"__0_{self._file}.distcp")
        self._stream.write(bytes(-self._stream.tell() % MAPPED_ALIGNMENT))
        offset = self._stream.tell()
        with without_checksums():
            torch.save(value, self._stream)
        return _StorageInfo(f"__0_{self._file}.distcp", offset, self._stream.tell() - offset)

    def _close(self) -> None:
        if self._stream is not None:
            self._flusher.close(self._stream)
            self._stream = None


@dataclass
class TorchDistReader:
    """The blocks of one checkpoint, read on demand; the last ones stay in memory."""

    directory: Path
    metadata: Metadata
    common: dict[str, Any]
    shapes: dict[str, ParamSpec]
    _cache: OrderedDict[str, torch.Tensor] = field(default_factory=OrderedDict)
    _held_bytes: int = 0

    @staticmethod
    def open(directory: Path) -> TorchDistReader:
        """Read metadata with the restricted unpickler and check that items lie inside their files. Raises InputError
        for a missing or damaged checkpoint."""
        path, hint = directory / "metadata.json", "Copy the checkpoint again."
        if not path.is_file() or not (directory / ".metadata").is_file():
            raise InputError(f"{directory} is not a torch_dist checkpoint: metadata.json or .metadata is missing.")
        backend = read_object(directory, path.name, hint).get("sharded_backend")
        if backend != "torch_dist":
            how = "Save it with --dist-ckpt-format torch_dist, or convert it with Megatron's own tools."
            raise InputError(f"{directory} is a checkpoint of format `{backend}`; rlctl reads torch_dist.", how)
        metadata, sizes = load_metadata(directory), dict[str, int]()
        for index, info in metadata.storage_data.items():
            name = info.relative_path
            if Path(name).name != name:
                raise InputError(f"{directory / '.metadata'} points outside of the checkpoint: {name}.")
            if not (directory / name).is_file():
                raise InputError(f"{directory}: shard {name} is missing; it holds {index.fqn}.", hint)
            if info.offset + info.length > sizes.setdefault(name, (directory / name).stat().st_size):
                raise InputError(f"{directory}: shard {name} is truncated; it holds {index.fqn}.", hint)
        shapes = {
            key: ParamSpec(tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."))
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        return TorchDistReader(directory, metadata, load_common(directory), shapes)

    def chunks(self, key: str) -> list[StoredBlock]:
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)  # the keys of `shapes`
        return [
            StoredBlock(key, tuple(Span(o, n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True)))
            for chunk in entry.chunks
        ]

    def read(self, chunk: StoredBlock) -> torch.Tensor:
        """The values of a block, contiguous."""
        cached = self._cache.get(chunk.name)
        if cached is not None:
            self._cache.move_to_end(chunk.name)
            return cached
        info = self.metadata.storage_data[MetadataIndex(chunk.key, torch.Size(s.start for s in chunk.box))]
        path = self.directory / info.relative_path
        values = load_item(path, info.offset, info.length, chunk.key)
        expected = tuple(span.count for span in chunk.box)
        if values.numel() != prod(expected) or values.dtype != dtype_of(self.shapes[chunk.key].dtype):
            stored_form, spec = f"{values.dtype} {list(values.shape)}", self.shapes[chunk.key].dtype
            raise InputError(f"{path}: {chunk.key} holds {stored_form} and not {spec} {list(expected)}.")
        values = values.reshape(expected).contiguous()
        self._cache[chunk.name] = values
        self._held_bytes += values.nbytes
        while self._held_bytes > CACHE_BYTES and len(self._cache) > 1:
            _, old = self._cache.popitem(last=False)
            self._held_bytes -= old.nbytes
        return values

    def whole(self, key: str) -> torch.Tensor:
        """The values of a key. Raises InputError where the checkpoint has none."""
        if key not in self.shapes:
            raise InputError(f"{self.directory} holds no {key}.", "Copy the checkpoint again.")
        spec = self.shapes[key]
        out = torch.empty(spec.shape, dtype=dtype_of(spec.dtype))
        for chunk in self.chunks(key):
            out[tuple(slice(span.start, span.start + span.count) for span in chunk.box)] = self.read(chunk)
        return out
