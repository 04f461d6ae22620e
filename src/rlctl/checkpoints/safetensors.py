"""Sharded safetensors files of a Hugging Face directory: what they hold, checked before anything is read.

The headers are parsed here rather than by the safetensors package, so that inspecting needs no torch and every problem
names file and tensor. Data is mapped, and let go of after each tensor, so that memory does not grow with the model.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.errors import InputError, listed
from rlctl.weights.layout import ITEM_BYTES, Shape

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
COMPARED_BYTES = 16 << 20
"""At a time, where two tensors are compared."""
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
NAMES = {ours: theirs for theirs, ours in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of one file."""

    name: str
    file: Path
    dtype: str
    shape: Shape
    offset: int
    """From the start of the file, in bytes."""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Tensors of one safetensors file; InputError for a file that is truncated or is none."""
    if file.is_dir():
        raise InputError(f"{file} is a directory, not a safetensors file.", "Download it again.")
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise InputError(f"{file} is no safetensors file, or it is truncated.", "Download it again.")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{file}: its header is damaged ({error}).", "Download it again.") from error
    if not isinstance(header, dict):
        raise InputError(f"{file}: its header is damaged (it holds no object).", "Download it again.")
    header.pop("__metadata__", None)
    return {name: _stored(name, file, entry, 8 + length, size) for name, entry in header.items()}


def _stored(name: str, file: Path, entry: dict[str, Any], data: int, size: int) -> StoredTensor:
    entry = entry if isinstance(entry, dict) else {}
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not (_whole_numbers(shape) and _whole_numbers(offsets) and len(offsets) == 2):
        raise InputError(f"{file}: its header is damaged (the entry of tensor {name}).", "Download it again.")
    if str(entry.get("dtype")) not in DTYPES:
        raise InputError(f"{file}: tensor {name} has dtype {entry.get('dtype')}, which rlctl cannot read.")
    begin, end = offsets
    tensor = StoredTensor(name, file, DTYPES[entry["dtype"]], tuple(entry["shape"]), data + begin)
    if end - begin != tensor.bytes or begin < 0:
        raise InputError(f"{file}: tensor {name} takes {end - begin} bytes, but its shape needs {tensor.bytes}.")
    if data + end > size:
        raise InputError(
            f"{file} is truncated: tensor {name} ends at byte {data + end} of {size}.", "Download it again."
        )
    return tensor


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


@dataclass
class SafetensorsDirectory:
    """The safetensors files of a directory, by tensor."""

    directory: Path
    tensors: dict[str, StoredTensor]
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, repr=False)

    @staticmethod
    def open(directory: Path) -> SafetensorsDirectory:
        """Read every header. InputError: no weights, files that the index names and that are absent, damaged files."""
        tensors: dict[str, StoredTensor] = {}
        for file in shard_files(directory):
            for name, tensor in read_header(file).items():
                if name in tensors:
                    raise InputError(f"Tensor {name} is in both {tensors[name].file.name} and {file.name}.")
                tensors[name] = tensor
        _check_index(directory, tensors)
        return SafetensorsDirectory(directory, tensors)

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())

    @cached_property
    def dtypes(self) -> dict[str, int]:
        """dtype -> elements in it, most first."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + prod(tensor.shape)
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def read(self, name: str) -> torch.Tensor:
        """The tensor, mapped from its file (copy before writing to it)."""
        import warnings

        import torch

        tensor = self.tensors[name]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")
            flat = (
                torch.frombuffer(
                    self._map(tensor.file),
                    dtype=getattr(torch, tensor.dtype),
                    count=prod(tensor.shape),
                    offset=tensor.offset,
                )
                if prod(tensor.shape)
                else torch.empty(0, dtype=getattr(torch, tensor.dtype))
            )
        return flat.reshape(tensor.shape)

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes."""
        first, second = self.tensors[one], self.tensors[other]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        for begin in range(0, first.bytes, COMPARED_BYTES):
            end = min(begin + COMPARED_BYTES, first.bytes)
            parts = (self._map(t.file)[t.offset + begin : t.offset + end] for t in (first, second))
            if next(parts) != next(parts):
                return False
        return True

    def drop(self, name: str) -> None:
        """Let go of the pages of a tensor that has been read."""
        tensor = self.tensors[name]
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = tensor.offset + tensor.bytes - start
        if length:
            self._map(tensor.file).madvise(mmap.MADV_DONTNEED, start, length)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]


def shard_files(directory: Path) -> list[Path]:
    """The files that hold the weights: those of the index, else the single file, else all `*.safetensors`."""
    if (directory / INDEX).is_file():
        files = [directory / name for name in sorted(set(_weight_map(directory).values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise InputError(
                f"{directory}: the index names {listed(absent)}, which is missing.", "Download the model again."
            )
        return files
    files = [directory / SINGLE] if (directory / SINGLE).is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        others = any(directory.glob("*.bin"))
        hint = (
            "Its weights are pickles (*.bin): save them as safetensors first."
            if others
            else "Download the model again."
        )
        raise InputError(f"{directory} has no safetensors weights.", hint)
    return files


def _weight_map(directory: Path) -> dict[str, str]:
    try:
        named = json.loads((directory / INDEX).read_text())["weight_map"]
        if any(not isinstance(file, str) or Path(file).name != file for file in named.values()):
            raise TypeError("a file of its weight_map is no file name")
        return named
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{directory / INDEX} is damaged ({error}).", "Download it again.") from error


def _check_index(directory: Path, tensors: dict[str, StoredTensor]) -> None:
    if not (directory / INDEX).is_file():
        return
    for name, file in _weight_map(directory).items():
        if name not in tensors or tensors[name].file.name != file:
            raise InputError(f"{directory}: the index puts tensor {name} into {file}, which does not hold it.")
