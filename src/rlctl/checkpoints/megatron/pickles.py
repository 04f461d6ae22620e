"""Reading the pickles of torch_dist checkpoints (`.metadata`, `common.pt`) without running the code they may carry.

A pickle names functions for the reader to call. Only the names listed here are admitted. Enumerations and settings of
Megatron become inert `Opaque` values: nothing of theirs is imported or called.
"""

from __future__ import annotations

import importlib
import io
import pickle
import pickletools
import struct
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from rlctl.errors import InputError

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
ADMITTED: frozenset[tuple[str, str]] = frozenset(
    {(_METADATA, name) for name in (
        "Metadata", "StorageMeta", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    )}
    | {(_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")}
    | {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("torch", "device"),
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("argparse", "Namespace"),
        ("builtins", "set"),
        ("builtins", "frozenset"),
        ("builtins", "slice"),
        ("builtins", "complex"),
        ("builtins", "bytearray"),
        ("_codecs", "encode"),
        ("datetime", "timedelta"),
    }
)  # fmt: skip
DTYPES = frozenset(
    {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}
    | {"float8_e4m3fn", "float8_e5m2"}
)
STORAGE_DTYPES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
STORAGES = frozenset(STORAGE_DTYPES)
DAMAGE = (
    zipfile.BadZipFile, struct.error, LookupError, StopIteration, pickle.UnpicklingError, EOFError, ValueError,
    TypeError, AttributeError, ImportError, OverflowError, MemoryError, RecursionError, NotImplementedError,
)  # fmt: skip
"""Errors of reading pickles and archives whose bytes are not those that were written."""
OPAQUE_PREFIXES = ("megatron.", "transformer_engine.")
NUMPY_MODULES = frozenset({"numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy._core.numeric"})
NUMPY = frozenset({"ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer"})


class Opaque:
    """Stands for an object whose class is not imported; it keeps what it was made from, no more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.args}"


class RefusedPickleError(InputError):
    """A pickle names something that is not admitted."""


class RestrictedUnpickler(pickle.Unpickler):
    """Admits the names of this module and nothing else."""

    def __init__(self, stream: Any, source: str, storages: Any = None) -> None:
        super().__init__(stream)
        self._source, self._storages = source, storages

    def find_class(self, module: str, name: str) -> Any:
        """The named class, an `Opaque` stand-in, or RefusedPickleError."""
        require_admitted(module, name, self._source)
        if module.startswith(OPAQUE_PREFIXES):
            return type(name.rpartition(".")[2], (Opaque,), {})
        return getattr(importlib.import_module(module), name)

    def persistent_load(self, key: Any) -> Any:
        if self._storages is None:
            raise RefusedPickleError(f"{self._source} refers to data outside of itself.")
        return self._storages(key)


def require_admitted(module: str, name: str, source: str) -> None:
    """Raise RefusedPickleError unless a pickle may name `module.name`. Attribute paths are never admitted."""
    plain = "." not in name
    known = (module, name) in ADMITTED
    known |= module == "torch" and name in DTYPES | STORAGES
    known |= module in NUMPY_MODULES and name in NUMPY
    known |= module.startswith(OPAQUE_PREFIXES)
    if not (known and plain):
        raise RefusedPickleError(
            f"{source} asks to call `{module}.{name}`, which no checkpoint needs: it was not read.",
            "Do not load this checkpoint with other tools either, unless you trust where it comes from.",
        )


def load_metadata(directory: Path) -> Any:
    """The `.metadata` of a torch_dist checkpoint (`torch.distributed.checkpoint.metadata.Metadata`)."""
    path = directory / ".metadata"
    with path.open("rb") as stream:
        return _load(RestrictedUnpickler(stream, str(path)), path)


def load_common(directory: Path) -> dict[str, Any]:
    """The values of `common.pt`; {} where there is none."""
    path = directory / "common.pt"
    if not path.is_file():
        return {}
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} is no file that torch.save wrote, or it is truncated.")
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((n for n in archive.namelist() if n.endswith("data.pkl")), None)
            if name is None:
                raise InputError(f"{path} holds no data.")
            storages = _Storages(archive, name.removesuffix("data.pkl"))
            value = _load(RestrictedUnpickler(io.BytesIO(archive.read(name)), str(path), storages), path)
    except InputError:
        raise
    # OSError: an offset before the beginning of the file.
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise InputError(f"{path} is damaged ({error}).", "Copy the checkpoint again.") from error
    return value if isinstance(value, dict) else {"value": value}


class _Storages:
    """Storages of a torch.save archive, read when the pickle asks for them."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        self._archive, self._root = archive, root

    def __call__(self, key: Any) -> Any:
        import torch

        if not (isinstance(key, tuple) and len(key) == 5 and key[0] == "storage"):
            raise RefusedPickleError(f"{self._archive.filename} refers to data outside of itself.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces the end of typed storages, which its own files still name
            dtype = key[1].dtype if hasattr(key[1], "dtype") else torch.uint8
        data = bytearray(self._archive.read(f"{self._root}data/{int(key[2])}"))
        storage = torch.frombuffer(data, dtype=torch.uint8).untyped_storage() if data else torch.UntypedStorage(0)
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _load(unpickler: RestrictedUnpickler, path: Path) -> Any:
    try:
        return unpickler.load()
    except InputError:
        raise
    except DAMAGE as error:
        raise InputError(f"{path} is damaged ({error}).", "Take another copy of the checkpoint.") from error


def scan(directory: Path) -> None:
    """Check every pickle of a torch_dist checkpoint without loading it, objects inside the shards included.

    A run's own resume calls this before it hands the directory to Megatron, which loads pickles unrestricted. Raises
    RefusedPickleError where a pickle names something that is not admitted.
    """
    scan_bytes((directory / ".metadata").read_bytes(), str(directory / ".metadata"))
    if (directory / "common.pt").is_file():
        scan_archive((directory / "common.pt").read_bytes(), str(directory / "common.pt"))
    metadata = load_metadata(directory)
    for index, info in metadata.storage_data.items():
        path = directory / info.relative_path
        if not path.resolve().is_relative_to(directory.resolve()):
            where = directory / ".metadata"
            raise RefusedPickleError(f"{where} points outside of the checkpoint: {info.relative_path}.")
        with path.open("rb") as stream:
            scan_archive(_Slice(stream, info.offset, info.length), f"{path} ({index.fqn})")


class _Slice(io.RawIOBase):
    """A part of a file as a file, so that a zip archive inside a shard is scanned without reading its tensors."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        base = {0: 0, 1: self._at, 2: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._start + self._at)
        data = self._stream.read(min(len(buffer), max(0, self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


@dataclass(frozen=True)
class TensorRecord:
    """Where a tensor that torch.save wrote lies in its file. `first` and `strides` count elements of its storage."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    data: int
    bytes: int


def tensor_record(stream: BinaryIO, offset: int, length: int, source: str) -> TensorRecord:
    """Find the data of the one tensor in the archive at `offset`; its pickle is read with inert stand-ins.

    Raises:
        RefusedPickleError: the pickle names something that is not admitted.
        InputError: the item is no tensor, or its storage does not hold it.
    """
    part = cast(BinaryIO, io.BufferedReader(_Slice(stream, offset, length)))
    with zipfile.ZipFile(part) as archive:
        pickled = next(info for info in archive.infolist() if info.filename.endswith("data.pkl"))
        found = _RecordUnpickler(io.BytesIO(_stored_bytes(part, pickled, source)), source).load()
        if not isinstance(found, _Rebuilt):
            raise InputError(f"{source}: the item at byte {offset} is no tensor.")
        info = archive.getinfo(pickled.filename.removesuffix("data.pkl") + f"data/{found.storage}")
    data = offset + _stored_at(part, info, source)
    last = found.first + sum((n - 1) * step for n, step in zip(found.shape, found.strides, strict=True))
    inside = data + info.file_size <= offset + length and min((found.first, *found.strides)) >= 0
    if not inside or (0 not in found.shape and last >= found.elements):
        raise InputError(f"{source}: the item at byte {offset} is damaged.", "Take another copy of the checkpoint.")
    return TensorRecord(found.dtype, found.shape, found.strides, found.first, data, info.file_size)


def _stored_at(stream: BinaryIO, info: zipfile.ZipInfo, source: str) -> int:
    """Where the bytes of a member of an archive begin. torch.save stores them as they are."""
    stream.seek(info.header_offset)
    header = stream.read(30)
    if len(header) != 30 or info.compress_type != zipfile.ZIP_STORED:
        raise InputError(f"{source} is damaged.", "Take another copy of the checkpoint.")
    name, extra = struct.unpack("<HH", header[26:30])
    return info.header_offset + 30 + name + extra


def _stored_bytes(stream: BinaryIO, info: zipfile.ZipInfo, source: str) -> bytes:
    """A member's bytes, whatever its checksum (`torch.serialization.set_crc32_options` can leave that out)."""
    stream.seek(_stored_at(stream, info, source))
    return stream.read(info.file_size)


@dataclass(frozen=True)
class _Rebuilt:
    storage: str
    dtype: str
    elements: int
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuilt(storage: tuple[str, str, int], first: int, shape: Any, strides: Any, *_: Any) -> _Rebuilt:
    """Stand in for torch's function of the same arguments."""
    name, dtype, elements = storage
    return _Rebuilt(name, dtype, elements, first, tuple(shape), tuple(strides))


class _RecordUnpickler(RestrictedUnpickler):
    """Makes a description of a tensor where torch would make the tensor."""

    def find_class(self, module: str, name: str) -> Any:
        require_admitted(module, name, self._source)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if module == "torch" and name in STORAGES:
            return STORAGE_DTYPES[name]
        return super().find_class(module, name)

    def persistent_load(self, key: Any) -> Any:
        if not (isinstance(key, tuple) and len(key) == 5 and key[0] == "storage"):
            raise RefusedPickleError(f"{self._source} refers to data outside of itself.")
        dtype = key[1] if isinstance(key[1], str) else "uint8"
        return str(key[2]), dtype, int(key[4])


def scan_archive(data: bytes | _Slice, source: str) -> None:
    """Check the pickle inside what torch.save wrote (a zip archive, or a bare pickle)."""
    stream = cast(BinaryIO, io.BytesIO(data) if isinstance(data, bytes) else io.BufferedReader(data))
    if not zipfile.is_zipfile(stream):
        stream.seek(0)
        scan_bytes(stream.read(), source)
        return
    with zipfile.ZipFile(stream) as archive:
        for info in archive.infolist():
            if info.filename.endswith(".pkl"):
                scan_bytes(_stored_bytes(stream, info, source), source)


def scan_bytes(data: bytes, source: str) -> None:
    """Check what a pickle names, from its opcodes alone."""
    strings: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in ("GLOBAL", "INST"):
                module, _, name = str(argument).partition(" ")
                require_admitted(module, name, source)
            elif opcode.name == "STACK_GLOBAL":
                if len(strings) < 2 or not all(isinstance(s, str) for s in strings[-2:]):
                    raise RefusedPickleError(f"{source} hides what it calls: it was not read.")
                require_admitted(strings[-2], strings[-1], source)
            elif opcode.name.startswith("EXT"):
                raise RefusedPickleError(f"{source} uses extension codes: it was not read.")
            elif opcode.name == "MEMOIZE":
                memo[len(memo)] = strings[-1] if strings else None
            elif opcode.name in ("BINPUT", "LONG_BINPUT", "PUT"):
                memo[cast(int, argument)] = strings[-1] if strings else None
            elif opcode.name in ("BINGET", "LONG_BINGET", "GET"):
                strings.append(memo.get(cast(int, argument)))
            elif "UNICODE" in opcode.name or "STRING" in opcode.name:
                strings.append(argument)
            elif opcode.name not in ("FRAME", "PROTO"):
                strings.append(None)
    except InputError:
        raise  # it is a ValueError too
    except (ValueError, IndexError) as error:
        raise InputError(f"{source} is damaged ({error}).", "Take another copy of the checkpoint.") from error
