"""Writing a Hugging Face directory: sharded safetensors with their index, and the files beside the weights."""

from __future__ import annotations

import json
import os
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rlctl.checkpoints.large_writes import open_to_write
from rlctl.checkpoints.safetensors import INDEX, NAMES, SINGLE
from rlctl.weights.layout import ParamSpec

if TYPE_CHECKING:
    import torch

COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "*.model", "*.tiktoken", "chat_template*", "preprocessor_config.json", "*.py",
)  # fmt: skip


def copy_companions(source: Path, destination: Path, drop_from_config: tuple[str, ...] = (), **config: Any) -> None:
    """Copy configuration, generation configuration, tokenizer and chat template.

    `config` values replace those of config.json, keys in `drop_from_config` are taken out of it.
    """
    destination.mkdir(parents=True, exist_ok=True)
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, destination / path.name)
    path = destination / "config.json"
    values = {k: v for k, v in json.loads(path.read_text()).items() if k not in drop_from_config} | config
    path.write_text(json.dumps(values, indent=2) + "\n")


@dataclass
class SafetensorsWriter:
    """Writes tensors in the order of `specs` into shards of at most `shard_bytes` (one tensor may exceed it)."""

    directory: Path
    specs: dict[str, ParamSpec]
    shard_bytes: int
    _shards: list[list[str]] = field(init=False)
    _shard: int = 0
    _expected: list[str] = field(default_factory=list)
    _written: int = 0
    """Bytes of the tensor that comes next."""
    _stream: BinaryIO | None = None

    def __post_init__(self) -> None:
        self._shards, size = [[]], 0
        for name, spec in self.specs.items():
            if self._shards[-1] and size + spec.bytes > self.shard_bytes:
                self._shards.append([])
                size = 0
            self._shards[-1].append(name)
            size += spec.bytes

    def write(self, name: str, values: torch.Tensor) -> None:
        """Append the next tensor, or the next rows of it (contiguous)."""
        import torch

        if self._stream is None:
            self._begin()
        if not self._expected or self._expected[0] != name:
            raise ValueError(f"tensor {name} comes out of order")
        assert self._stream is not None
        self._stream.write(memoryview(values.reshape(-1).view(torch.uint8).numpy()))
        self._written += values.nbytes
        if self._written == self.specs[name].bytes:
            self._expected.pop(0)
            self._written = 0
        if not self._expected:
            self._end()

    def finish(self) -> None:
        """Write the index; nothing is needed beside a single file."""
        if len(self._shards) == 1:
            return
        weight_map = {name: self._file(i) for i, shard in enumerate(self._shards) for name in shard}
        index = {"metadata": {"total_size": sum(s.bytes for s in self.specs.values())}, "weight_map": weight_map}
        (self.directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _file(self, shard: int) -> str:
        return SINGLE if len(self._shards) == 1 else f"model-{shard + 1:05d}-of-{len(self._shards):05d}.safetensors"

    def _begin(self) -> None:
        names, offset, header = self._shards[self._shard], 0, {"__metadata__": {"format": "pt"}}
        for name in names:
            spec = self.specs[name]
            span = [offset, offset + spec.bytes]
            header[name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}  # type: ignore
            offset += spec.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._stream = open_to_write(self.directory / self._file(self._shard))
        self._stream.write(struct.pack("<Q", len(text)) + text)
        self._expected = list(names)

    def _end(self) -> None:
        assert self._stream is not None
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._stream, self._shard = None, self._shard + 1
