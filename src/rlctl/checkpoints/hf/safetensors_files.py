"""The safetensors files of a Hugging Face directory: index, values and writing. Headers need no torch. Files are closed
regularly to limit mapped memory, and `SafetensorsWriter` appends blocks of rows; the library supports neither."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from safetensors import SafetensorError, safe_open

from rlctl.checkpoints.hf.hf_files import ADAPTERS, is_lfs_pointer, read_object, refuse_adapters
from rlctl.checkpoints.staging import Flusher, open_to_write
from rlctl.errors import InputError, listed
from rlctl.weights.layout import ITEM_BYTES, ParamSpec, Shape

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")
CONSOLIDATED = "consolidated*"
"""Copies of the same weights in Mistral's and Llama's own form."""
MAPPED_BYTES = 64 << 20
"""A file is closed, and with it its pages are given back, when about this much of it has been read."""
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
    position: int
    """Its place in the order of the file's data."""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file. Raises InputError for a damaged file or an unsupported dtype."""
    with _opened(file) as opened:
        slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
        dtypes = {name: part.get_dtype() for name, part in slices}
        unknown = next((name for name, dtype in dtypes.items() if dtype not in DTYPES), None)
        if unknown is not None:
            raise InputError(f"{file}: tensor {unknown} has dtype {dtypes[unknown]}, which rlctl cannot read.")
        return {
            name: StoredTensor(name, file, DTYPES[dtypes[name]], tuple(part.get_shape()), position)
            for position, (name, part) in enumerate(slices)
        }


def require_whole(directory: Path) -> None:
    """Raise InputError for missing or damaged weights. Dtypes are not checked, because engines may know more."""
    for file in shard_files(directory):
        with _opened(file):
            pass


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    if file.exists() and not os.access(file, os.R_OK):  # the library says that there is no such file
        raise InputError(f"{file} cannot be read: Permission denied.", "Make it readable, or download the model again.")
    try:
        with safe_open(str(file), framework="numpy") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        if is_lfs_pointer(file):
            reason = f"{file} is a pointer of Git LFS in place of the weights."
            raise InputError(reason, f"Fetch them: git -C {file.parent} lfs pull") from error
        reason = f"{file} is not a safetensors file, or it is truncated or damaged ({error})."
        raise InputError(reason, "Download it again.") from error


@dataclass
class SafetensorsDirectory:
    """The safetensors files of a directory, by tensor."""

    directory: Path
    tensors: dict[str, StoredTensor]
    _open: dict[Path, Any] = field(default_factory=dict, repr=False)
    _read_bytes: dict[Path, int] = field(default_factory=dict, repr=False)

    @staticmethod
    def open(directory: Path) -> SafetensorsDirectory:
        """Read every header. Raises InputError for missing or damaged files."""
        tensors: dict[str, StoredTensor] = {}
        for file in shard_files(directory):
            for name, tensor in read_header(file).items():
                if name in tensors:
                    raise InputError(f"Tensor {name} is in both {tensors[name].file.name} and {file.name}.")
                tensors[name] = tensor
        indexed = {} if (directory / SINGLE).exists() else _weight_map(directory)
        for name, file in indexed.items():
            if name not in tensors or tensors[name].file.name != file:
                raise InputError(f"{directory}: the index puts tensor {name} into {file}, which does not hold it.")
        return SafetensorsDirectory(directory, tensors)

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())

    def in_order(self) -> list[StoredTensor]:
        """The tensors in file order."""
        return sorted(self.tensors.values(), key=lambda tensor: (tensor.file.name, tensor.position))

    @cached_property
    def dtypes(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.dtype] += prod(tensor.shape)
        return dict(counts.most_common())

    def read(self, name: str) -> torch.Tensor:
        """The tensor, mapped from its file: its pages are read when its values are."""
        file = self.tensors[name].file
        if file not in self._open:
            self._open[file] = safe_open(str(file), framework="pt")
        return self._open[file].get_tensor(name)

    def same(self, *names: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes."""
        import torch

        first, second = (self.tensors[name] for name in names)
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        return torch.equal(*(self.read(name).reshape(-1).view(torch.uint8) for name in names))

    def drop(self, name: str) -> None:
        """Say that a tensor has been read. Tensors in use keep the mapping of their file alive."""
        tensor = self.tensors[name]
        read = self._read_bytes.get(tensor.file, 0) + tensor.bytes
        if read >= MAPPED_BYTES:
            self._open.pop(tensor.file, None)
        self._read_bytes[tensor.file] = read % MAPPED_BYTES


def shard_files(directory: Path) -> list[Path]:
    """Return the weight files: the single file (even with an index), else the index's files, else all `*.safetensors`.
    Raises InputError for missing files."""
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    if weight_map := _weight_map(directory):
        files = [directory / name for name in sorted(set(weight_map.values()))]
        absent = [file.name for file in files if not file.exists()]
        if absent:
            reason = f"{directory} lacks {len(absent)} shard(s) that {INDEX} names: {listed(absent, 3)}."
            raise InputError(reason, "Download the missing files.")
        return files
    refuse_adapters(directory)
    files = sorted(directory.glob("*.safetensors"))
    files = [file for file in files if not file.match("adapter_model*") and not file.match(CONSOLIDATED)] or files
    _refuse_parts(directory, files)
    if not files:
        pickled = any(directory.glob("*.bin"))
        hint = "Its weights are pickles (*.bin): save them as safetensors first." if pickled else "Download it again."
        if below := sorted(file.parent for file in directory.glob("*/*.safetensors")):
            hint = f"There are some in {below[0]}: name that directory, if it is the model."
        raise InputError(f"{directory} has no safetensors weights.", hint)
    return files


def unread_weights(directory: Path) -> list[str]:
    """Return a sentence for each set of weights next to the loaded one that may differ from it: another save in
    safetensors, an adapter, and a newer copy in another format. transformers reads the same set as rlctl."""
    read = shard_files(directory)
    names = f"{directory}: weights are read from {listed([file.name for file in read], 3)}"
    others = sorted(set(directory.glob("*.safetensors")) - {*read})
    saves = [file.name for file in others if not file.match("adapter_model*") and not file.match(CONSOLIDATED)]
    lines = [f"{names}, and not from {listed(saves, 3)} of another save"] if saves else []
    if (directory / ADAPTERS).is_file() and (adapters := sorted(directory.glob("adapter_model*"))):
        without = "The model is read without it; transformers with PEFT would apply it"
        lines.append(f"{directory} holds an adapter ({adapters[0].name}) next to the whole model. {without}")
    newest = max(file.stat().st_mtime for file in read)
    copies = [file for pattern in (CONSOLIDATED, "pytorch_model*.bin") for file in sorted(directory.glob(pattern))]
    if newer := [file.name for file in copies if file not in read and file.stat().st_mtime > newest]:
        lines.append(f"{names}, and not from {listed(newer, 3)}, which is newer")
    return lines


def refuse_others_for_vllm(directory: Path) -> None:
    """Raise InputError if vLLM would read other files than transformers: it follows an index next to a single file, and
    without an index reads every `*.safetensors` (0.32)."""
    if not any(directory.glob("*.safetensors")):  # whoever opens the weights says so
        return
    indexed, read = set(_weight_map(directory).values()), {file.name for file in shard_files(directory)}
    if (directory / SINGLE).exists() and indexed - {SINGLE}:
        raise InputError(
            f"{directory} holds {SINGLE}, and {INDEX} of an earlier save names other files, which vLLM would read.",
            f"Remove {directory / INDEX}.",
        )
    others = sorted(file.name for file in directory.glob("*.safetensors") if file.name not in read)
    others = [name for name in others if not Path(name).match(CONSOLIDATED)]
    if others and not indexed:
        kind = "an adapter" if others[0].startswith("adapter_model") else "weights of another save"
        raise InputError(
            f"{directory} holds {listed(sorted(read), 3)} and {kind} ({listed(others, 3)}), and vLLM would read both.",
            f"Move {directory / others[0]} elsewhere.",
        )


def _refuse_parts(directory: Path, files: list[Path]) -> None:
    shards = [(int(match[1]), int(match[2])) for file in files if (match := SHARD.search(file.name))]
    counts = sorted({count for _, count in shards})
    if len(counts) > 1:
        saves = " and of ".join(str(count) for count in counts)
        raise InputError(
            f"{directory} holds shards of two saves (of {saves} files), and no {INDEX} says which belong to the model.",
            "Remove the files of the earlier save.",
        )
    if shards and len(shards) < counts[0]:
        reason = f"{directory} holds {len(shards)} of {counts[0]} shards, and no {INDEX}."
        raise InputError(reason, "Download the missing files.")


def _weight_map(directory: Path) -> dict[str, str]:
    """Return tensor -> file from the index; empty without one."""
    if not (directory / INDEX).is_file():
        return {}
    weight_map = read_object(directory, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(f, str) and Path(f).name == f for f in weight_map.values()
    ):
        raise InputError(f"{directory / INDEX} is damaged (its `weight_map` names no files).", "Download it again.")
    return weight_map


class SafetensorsWriter:
    """Write tensors in the order of `specs` into shards of `shard_bytes` (a larger tensor gets a separate shard), or
    into named `files`."""

    def __init__(
        self, directory: Path, specs: dict[str, ParamSpec], shard_bytes: int, files: dict[str, list[str]] | None = None
    ) -> None:
        self._directory, self._specs, self._named = directory, specs, files is not None
        shards, size = list[list[str]]([[]]), 0
        for name, spec in specs.items():
            if shards[-1] and size + spec.bytes > shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += spec.bytes
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        self._files = files or dict(zip(names if len(shards) > 1 else [SINGLE], shards, strict=True))
        self.order = [name for shard in self._files.values() for name in shard]
        """The names of the tensors in writing order."""
        self._left = iter(self._files)
        self._expected: list[str] = []
        self._written = 0  # bytes of the tensor that comes next
        self._stream: BinaryIO | None = None
        self._flusher = Flusher()

    def write(self, name: str, values: torch.Tensor) -> None:
        """Append the next tensor, or the next rows of it (contiguous)."""
        import torch

        stream = self._stream or self._begin(next(self._left))
        stream.write(values.reshape(-1).view(torch.uint8).numpy().data)
        self._written += values.nbytes
        if self._written == self._specs[name].bytes:
            self._expected.pop(0)
            self._written = 0
        if not self._expected:
            self._flusher.close(stream)
            self._stream = None

    def finish(self) -> None:
        """Write the index of several unnamed files."""
        if len(self._files) == 1 or self._named:
            return
        weight_map = {name: file for file, shard in self._files.items() for name in shard}
        index = {"metadata": {"total_size": sum(s.bytes for s in self._specs.values())}, "weight_map": weight_map}
        (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def wait(self) -> None:
        """Wait until all tensors are on the disk."""
        self._flusher.wait()

    def _begin(self, file: str) -> BinaryIO:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset, self._expected = 0, list(self._files[file])
        for name in self._expected:
            spec = self._specs[name]
            span = [offset, offset + spec.bytes]
            header[name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
            offset += spec.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._stream = open_to_write(self._directory / file)
        self._stream.write(struct.pack("<Q", len(text)) + text)
        return self._stream
