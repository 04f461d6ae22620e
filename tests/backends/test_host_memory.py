"""Host memory in slabs."""

from __future__ import annotations

import pytest
import torch

from rlctl.backends import host_memory
from rlctl.backends.host_memory import HostMemory, pairs


def test_storages_go_through_slabs_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SLAB_BYTES", 100)
    tensors = [torch.randn(n) for n in (10, 60, 1, 7)]
    before = [tensor.clone() for tensor in tensors]
    memory = HostMemory()
    kept = [(tensor.untyped_storage(), memory.take(tensor.nbytes)) for tensor in tensors]
    assert [len(host) for _, host in kept] == [1, 3, 1, 2]
    assert [sum(piece.numel() for piece in host) for _, host in kept] == [tensor.nbytes for tensor in tensors]
    for storage, host in kept:
        for piece, there in pairs(host, storage):
            piece.copy_(there)
        storage.resize_(0)
    for storage, host in kept:
        storage.resize_(sum(piece.numel() for piece in host))
        for piece, there in pairs(host, storage):
            there.copy_(piece)
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


def test_what_is_taken_after_a_rewind_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SLAB_BYTES", 100)
    memory = HostMemory()
    first = memory.take(250)
    memory.rewind()
    again = memory.take(250)
    assert [piece.numel() for piece in first] == [piece.numel() for piece in again] == [100, 100, 50]
