"""Read pickles of torch_dist checkpoints (`.metadata`, `common.pt`) without running code.

torch's `FileSystemReader` unpickles `.metadata` unrestricted. Here only listed names are admitted; Megatron's
enumerations and settings become inert `Opaque` values.
"""

from __future__ import annotations

import importlib
import pickle
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.errors import InputError, RlctlError, first_line

if TYPE_CHECKING:
    import torch

_CHECKPOINT = "torch.distributed.checkpoint"
ADMITTED = {
    f"{_CHECKPOINT}.metadata": {
        "Metadata", "StorageMeta", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"},
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch._utils": {"_rebuild_tensor_v2"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size", "device", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
        "bool", "float8_e4m3fn", "float8_e5m2",
    },
    "collections": {"OrderedDict", "defaultdict"},
    "argparse": {"Namespace"},
    "builtins": {"set", "frozenset", "slice", "complex", "bytearray"},
    "_codecs": {"encode"},
    "datetime": {"timedelta"},
    "numpy": {"ndarray", "dtype"},
    **{f"numpy.{core}.multiarray": {"_reconstruct", "scalar", "_frombuffer"} for core in ("core", "_core")},
    "numpy._core.numeric": {"_frombuffer"},
}  # fmt: skip
OPAQUE_PREFIXES = ("megatron.", "transformer_engine.")


class Opaque:
    """Stands for an object whose class is not imported, with its constructor arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.args}"


class RefusedPickleError(InputError):
    """A pickle names something that is not admitted."""


class RestrictedUnpickler(pickle.Unpickler):
    """Admits the names of this module only."""

    def find_class(self, module: str, name: str) -> Any:
        """The named class, an `Opaque` stand-in, or RefusedPickleError. Attribute paths are never admitted."""
        if module.startswith(OPAQUE_PREFIXES) and "." not in name:
            return type(name, (Opaque,), {})
        if name not in ADMITTED.get(module, ()):
            raise RefusedPickleError(
                f"it asks to call `{module}.{name}`, which no checkpoint needs: it was not read.",
                "Do not load this checkpoint with other tools either, unless you trust where it comes from.",
            )
        return getattr(importlib.import_module(module), name)


MAPPED_ALIGNMENT = 64
"""Bytes; torch aligns tensors in its archives alike."""
RESTRICTED = types.SimpleNamespace(Unpickler=RestrictedUnpickler, __name__="restricted")
"""The part of the module `pickle` that `torch.load` uses."""


@contextmanager
def _reading(source: str) -> Iterator[None]:
    """Name the source in RefusedPickleErrors, and report unreadable bytes as InputError."""
    try:
        yield
    except RlctlError as error:
        raise type(error)(f"{source}: {error.message}", error.hint) from error
    except Exception as error:
        reason = f"{source} is damaged ({type(error).__name__}: {first_line(error)})."
        raise InputError(reason, "Take another copy of the checkpoint.") from error


def load_metadata(directory: Path) -> Any:
    """The `.metadata` of a torch_dist checkpoint (`torch.distributed.checkpoint.metadata.Metadata`)."""
    path = directory / ".metadata"
    with path.open("rb") as stream, _reading(str(path)):
        return RestrictedUnpickler(stream).load()


def load_common(directory: Path) -> dict[str, Any]:
    """Return the values of `common.pt`; {} without the file."""
    path = directory / "common.pt"
    if not path.is_file():
        return {}
    with path.open("rb") as stream:
        return load_saved(stream, str(path))


def load_saved(stream: Any, source: str) -> Any:
    """The object that torch.save wrote into a stream."""
    import torch

    with _reading(source), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the end of typed storages, and its files still name them
        return torch.load(stream, map_location="cpu", pickle_module=RESTRICTED, weights_only=False)


def load_item(path: Path, offset: int, length: int, key: str) -> torch.Tensor:
    """The tensor of `key` that torch.save wrote into a part of a file: mapped where it is aligned, its pages are read
    when its values are, else copied into memory."""
    import torch
    from torch.distributed.checkpoint.utils import _create_file_view

    source = f"{path} ({key})"
    with path.open("rb") as stream:
        item: Any = _create_file_view(stream, offset, length)
        if offset % MAPPED_ALIGNMENT:
            return load_saved(item, source)
        with _reading(source), torch.serialization._open_zipfile_reader(item) as archive:
            whole = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
            mapped = whole[offset : offset + length]
            return torch.serialization._load(archive, "cpu", RESTRICTED, overall_storage=mapped, encoding="utf-8")


def scan(directory: Path) -> None:
    """Read every pickle of a torch_dist checkpoint, including objects in shards; tensors are left to `weights_only`. A
    resume calls this before Megatron loads the pickles unrestricted. Raises RefusedPickleError for a name that is not
    admitted."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata
    from torch.distributed.checkpoint.utils import _create_file_view

    metadata = load_metadata(directory)
    load_common(directory)
    for index, info in metadata.storage_data.items():
        path = directory / info.relative_path
        if Path(info.relative_path).name != info.relative_path:
            where = directory / ".metadata"
            raise RefusedPickleError(f"{where} points outside of the checkpoint: {info.relative_path}.")
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            with path.open("rb") as stream:
                load_saved(_create_file_view(stream, info.offset, info.length), f"{path} ({index.fqn})")
