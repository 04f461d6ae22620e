"""Files that a save writes beside training: the bytes from before a change, whatever the file system allows."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import _create_file_view

from rlctl.checkpoints import background_writes
from rlctl.checkpoints.background_writes import DigestedFile, Snapshot, write_items
from rlctl.checkpoints.identity import file_digest

SIZES = {"empty": 0, "one": 1, "buffer": 1024, "more": 3000}
"""Elements; a buffer holds 1,024 of float32."""


def refused_at_open(monkeypatch: pytest.MonkeyPatch, number: int = errno.EINVAL) -> None:
    original = os.open

    def open_(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return original(path, flags, mode)

    monkeypatch.setattr(background_writes.os, "open", open_)


def refused_at_first_write(monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write

    def write(descriptor: int, data: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(descriptor, data[:1000])  # and only a part at a time

    monkeypatch.setattr(background_writes.os, "write", write)


def not_supported_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    refused_at_open(monkeypatch, errno.EOPNOTSUPP)


@pytest.mark.parametrize("refuse", [None, refused_at_open, not_supported_at_open, refused_at_first_write])
def test_items_are_what_torch_reads_and_the_digest_is_the_files(
    refuse: Callable[[pytest.MonkeyPatch], None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_writes, "BUFFER_BYTES", 4096)
    if refuse is not None:
        refuse(monkeypatch)
    whole = torch.randn(8000)
    tensors = {name: whole[7 : 7 + size] for name, size in SIZES.items()}  # parts of a larger storage
    tensors["columns"] = whole[:100].view(10, 10)[:, 3:5]
    items = [(WriteItem(MetadataIndex(name), WriteItemType.TENSOR), name) for name in tensors]
    objects = [(WriteItem(MetadataIndex("object"), WriteItemType.BYTE_IO), io.BytesIO(b"some bytes"))]
    path = tmp_path / "__0_0.distcp"
    results, digest = write_items(path, [*objects, *items], Snapshot(tensors))
    assert digest == file_digest(path)
    assert len(results) == len(tensors) + 1
    assert path.stat().st_size < 4 * (sum(SIZES.values()) + 20) + 3000 * len(results)  # and not `whole` for each
    for result in results:
        info = result.storage_data
        with path.open("rb") as file:
            item = _create_file_view(file, info.offset, info.length)
            if result.index.fqn == "object":
                assert item.read(info.length) == b"some bytes"
            else:
                assert torch.equal(torch.load(item, weights_only=True), tensors[result.index.fqn])


@pytest.mark.parametrize(
    ("direct_s", "cached_s", "ways"),
    [
        (0.01, 0.001, [True] * 4),  # fast enough: 3.2 GB/s
        (0.2, 0.05, [True, False, False, False]),
        (0.2, 0.18, [True, False, True, True]),  # the disk itself is slow
    ],
)
def test_files_go_through_the_page_cache_where_that_is_much_faster(
    direct_s: float, cached_s: float, ways: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that each write of 4 MiB moves on; a file has eight."""
    now, original, seen = [0.0], os.write, list[bool]()

    def write(descriptor: int, data: memoryview) -> int:
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        seen.append(direct)
        now[0] += (direct_s if direct else cached_s) / 8
        return original(descriptor, data)

    monkeypatch.setattr(background_writes.os, "write", write)
    monkeypatch.setattr(background_writes.os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(background_writes.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(DigestedFile, "rates", defaultdict(background_writes.WrittenRates))
    found = []
    for number in range(len(ways)):
        seen.clear()
        with DigestedFile(tmp_path / str(number)) as file:
            file.write(bytes(32 << 20))
            if not seen[0] and number == 0:
                pytest.skip("this file system does not write past its cache")
        assert len(set(seen)) == 1
        found.append(seen[0])
        with DigestedFile(tmp_path / "small") as file:  # says nothing about a rate
            file.write(bytes(100))
    assert found == ways


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("/dev/full is not there")
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"), DigestedFile(link) as file:
        file.write(bytes(10))


def test_a_change_waits_for_what_is_being_written_and_the_rest_is_what_was_before() -> None:
    size = 1 << 15
    live = {name: torch.full((size,), float(number)) for number, name in enumerate(["first", "second", "third"])}
    snapshot, kept = Snapshot(live), threading.Event()

    def change() -> None:
        snapshot.keep()
        kept.set()
        for value in live.values():
            value.fill_(9)

    with snapshot.tensor("first") as first:
        assert first.data_ptr() == live["first"].data_ptr()  # no copy
        changing = threading.Thread(target=change)
        changing.start()
        assert not kept.wait(0.2)
        assert torch.equal(first, torch.zeros(size))
    changing.join(60)
    assert kept.is_set()
    with snapshot.tensor("second") as second, snapshot.tensor("third") as third:
        assert torch.equal(second, torch.ones(size))
        assert torch.equal(third, torch.full((size,), 2.0))
        snapshot.keep()  # nothing is left to wait for: these are copies


def test_without_copies_a_change_waits_until_all_is_written_or_given_up() -> None:
    live = {"first": torch.zeros(1 << 15), "second": torch.ones(1 << 15), "small": torch.ones(4)}
    snapshot, kept = Snapshot(live, copies=False), threading.Event()
    live["small"].fill_(9)  # routers' biases change before the update
    changing = threading.Thread(target=lambda: (snapshot.keep(), kept.set()))
    changing.start()
    for name in ("first", "second"):
        assert not kept.wait(0.1)
        with snapshot.tensor(name) as value:
            assert value.data_ptr() == live[name].data_ptr()
            assert not kept.wait(0.1)
    changing.join(60)
    assert kept.is_set()
    with snapshot.tensor("small") as value:
        assert torch.equal(value, torch.ones(4))

    failed = Snapshot({"first": live["first"]}, copies=False)
    changing = threading.Thread(target=failed.keep)
    changing.start()
    failed.drop()  # the disk is full
    changing.join(60)
    assert not changing.is_alive()


@pytest.mark.parametrize("sizes", [range(8), range(17, 1000)])
def test_large_and_small_tensors_are_copied_at_once(sizes: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_writes, "LIVE_BYTES", sizes)
    live = torch.ones(4)
    with Snapshot({"one": live}).tensor("one") as value:
        live.fill_(9)
        assert torch.equal(value, torch.ones(4))
