"""Writing a policy's tensors beside training, with little work for processors: from where they lie until training
changes them, past the page cache, with digests."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from ctypes import c_char
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms, _write_item
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from rlctl.checkpoints.megatron.pickles import MAPPED_ALIGNMENT
from rlctl.checkpoints.megatron.torch_dist_files import without_checksums

BUFFER_BYTES = 4 << 20
"""Bytes per write: a disk needs large writes, and this size fits a processor's cache."""
LIVE_BYTES = range(64 << 10, 256 << 20)
"""Sizes of tensors that are not copied at first. Smaller tensors are copied at once: biases of routers change before
the optimizer's step. Larger ones too: training would wait for the end of the write."""
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
"""Errors of file systems that do not write past the page cache."""
CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
FAST_BYTES_PER_S = 500e6
"""Past the page cache, this is no reason to try the other way."""
WORTH_CACHING = 1.5
"""Gain at which writes go through the page cache, although that takes more processor time."""
TELLING_BYTES = 32 << 20
"""Smaller files measure no rate."""
LESS_URGENT = 10
"""The priority (nice) of a thread that writes beside training."""


def write_less_urgently() -> None:
    """Give training threads priority: each step waits for the slowest one."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LESS_URGENT)


class Snapshot:
    """Tensors in their present state. CPU tensors are copied only if `keep` is called before they are written."""

    def __init__(self, tensors: Mapping[Any, Tensor], *, copies: bool = True) -> None:
        """Without `copies` only small tensors are copied, and `keep` waits until all others are written."""
        self._live, self._copies, self._may_copy = dict(tensors), dict[Any, Tensor](), copies
        self._in_use = 0
        self._changed = threading.Condition()
        if copies:
            self._copy(lambda tensor: tensor.device.type != "cpu" or tensor.nbytes not in LIVE_BYTES)
        else:
            self._copy(lambda tensor: tensor.nbytes < LIVE_BYTES.start)

    @contextlib.contextmanager
    def tensor(self, key: Any) -> Iterator[Tensor]:
        """Take a tensor out, for as long as the context lasts; on the CPU."""
        with self._changed:
            live = key in self._live
            tensor = (self._live if live else self._copies).pop(key)
            self._in_use += live
        try:
            yield tensor.cpu()
        finally:
            with self._changed:
                self._in_use -= live
                self._changed.notify_all()

    def keep(self) -> None:
        """Copy the tensors not yet written (without copies wait for all) and wait for the one being written. Afterwards
        they may change."""
        with self._changed:
            if self._may_copy:
                self._copy(lambda _: True)
            self._changed.wait_for(lambda: not (self._in_use or self._live))

    def drop(self) -> None:
        with self._changed:
            self._live.clear()
            self._copies.clear()
            self._changed.notify_all()

    def _copy(self, chosen: Callable[[Tensor], bool]) -> None:
        for key in [key for key, tensor in self._live.items() if chosen(tensor)]:
            # Not pinned: torch rounds pinned memory up to powers of two and keeps it.
            self._copies[key] = self._live[key].detach().to("cpu", copy=True)
            del self._live[key]


def write_items(
    path: Path, items: Iterable[tuple[WriteItem, Any]], snapshot: Snapshot
) -> tuple[list[WriteResult], str]:
    """Write items of torch.distributed.checkpoint as its own writer does, and return their places and the file's
    digest. An item has its bytes, or the key of its tensor in `snapshot`."""
    results: list[WriteResult] = []
    with DigestedFile(path) as file, without_checksums():
        for item, value in items:
            file.write(bytes(-file.tell() % MAPPED_ALIGNMENT))
            if item.type == WriteItemType.BYTE_IO:
                results.append(_write(file, item, value, path.name))
                continue
            with snapshot.tensor(value) as tensor:
                results.append(_write(file, item, with_own_storage(tensor), path.name))
    return results, file.digest.hexdigest()


def _write(file: DigestedFile, item: WriteItem, data: io.BytesIO | Tensor, name: str) -> WriteResult:
    stream = cast(io.IOBase, file)
    return _write_item(_StorageWriterTransforms(), stream, data, item, name, SerializationFormat.TORCH_SAVE)


def with_own_storage(tensor: Tensor) -> Tensor:
    """The tensor with a storage of just its size, as torch.save writes whole storages: in the same memory, which must
    outlive it, where that is possible."""
    tensor = tensor.detach()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.is_contiguous() or not tensor.nbytes:
        return tensor.clone(memory_format=torch.contiguous_format)
    memory: Any = (c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


class WrittenRates:
    """Bytes per second at which files of one file system were written past its page cache (True) and through it: a
    server on the network may answer each write late, and takes many at a time from the cache."""

    def __init__(self) -> None:
        self._rates: dict[bool, float] = {}

    @property
    def past_cache(self) -> bool:
        """Whether the next file goes past the cache. Where that is slow, one file is tried through it."""
        direct, cached = self._rates.get(True), self._rates.get(False)
        if direct is None or direct >= FAST_BYTES_PER_S:
            return True
        return cached is not None and cached < WORTH_CACHING * direct

    def wrote(self, count: int, seconds: float, *, past_cache: bool) -> None:
        if count >= TELLING_BYTES:
            self._rates[past_cache] = count / max(seconds, 1e-9)


class DigestedFile:
    """A new file, written in order and flushed at the end, and its XXH3 digest. Goes past the page cache where the file
    system allows that and is not slow then: the kernel's copies and fresh pages would take most of a save's processor
    time."""

    rates: ClassVar[defaultdict[int, WrittenRates]] = defaultdict(WrittenRates)
    """By the number of the file system's device."""

    def __init__(self, path: Path) -> None:
        self._rates = self.rates[path.parent.stat().st_dev]
        self._past_cache = self._rates.past_cache
        self._descriptor = _open_past_cache(path) if self._past_cache else os.open(path, CREATE, 0o666)
        self._seconds = 0.0
        self._buffer = mmap.mmap(-1, BUFFER_BYTES)  # aligned, as such writes have to be
        self._bytes, self._held, self._size = np.frombuffer(self._buffer, np.uint8), 0, 0
        self.digest = xxhash.xxh3_128()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._write_out()
                begun = time.perf_counter()
                os.fsync(self._descriptor)
                self._seconds += time.perf_counter() - begun
                self._rates.wrote(self._size, self._seconds, past_cache=self._past_cache)
        finally:
            os.close(self._descriptor)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """For torch.save; the end flushes."""

    def write(self, data: bytes | memoryview) -> int:
        left = np.frombuffer(data, np.uint8) if len(data) else self._bytes[:0]
        size = len(left)
        while len(left):
            part = left[: BUFFER_BYTES - self._held]
            self._bytes[self._held : self._held + len(part)] = part
            self._held += len(part)
            left = left[len(part) :]
            if self._held == BUFFER_BYTES:
                self._write_out()
        self._size += size
        return size

    def _write_out(self) -> None:
        ready = memoryview(self._buffer)[: self._held]
        self.digest.update(ready)
        if self._held < BUFFER_BYTES:  # past the cache go only whole sectors
            self._through_cache()
        begun = time.perf_counter()
        while ready:
            try:
                ready = ready[os.write(self._descriptor, ready) :]
            except OSError as error:
                if error.errno not in REFUSALS or not self._through_cache():
                    raise
                self._past_cache = False
        self._seconds += time.perf_counter() - begun
        self._held = 0

    def _through_cache(self) -> bool:
        """Whether this changed anything."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)


def _open_past_cache(path: Path) -> int:
    try:
        return os.open(path, CREATE | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return os.open(path, CREATE, 0o666)
