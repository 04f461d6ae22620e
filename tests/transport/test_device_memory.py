"""How staging memory is allocated that another process opens by CUDA IPC. The calls are recorded: no GPU is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from rlctl.transport import device_memory
from rlctl.transport.device_memory import _segments_of_their_own


@pytest.mark.parametrize("settings", ["max_split_size_mb:64,expandable_segments:True", "max_split_size_mb:64", None])
def test_shared_memory_is_in_plain_segments_of_its_own(monkeypatch: pytest.MonkeyPatch, settings: str | None) -> None:
    calls: list[object] = []

    @contextlib.contextmanager
    def pool(pool: object, device: torch.device) -> Iterator[None]:
        calls.append("pool")
        yield

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if settings is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    monkeypatch.setattr("torch.cuda.MemPool", object)
    monkeypatch.setattr("torch.cuda.use_mem_pool", pool)
    monkeypatch.setattr("torch.cuda.memory._set_allocator_settings", calls.append)
    with contextlib.suppress(MemoryError), _segments_of_their_own(torch.device("cuda")):
        raise MemoryError
    fixed = "max_split_size_mb:64,expandable_segments:False"
    assert calls == ([fixed, "pool", settings] if settings and "expandable" in settings else ["pool"])


def test_a_gpu_whose_handles_cannot_be_made_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(buffer: torch.Tensor) -> tuple:
        raise RuntimeError("CUDA error: operation not supported\nCUDA kernel errors might be reported later")

    assert device_memory.why_not_shared(torch.device("cpu")) == ""
    plain = torch.empty
    monkeypatch.setattr(device_memory, "_segments_of_their_own", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(device_memory.torch, "empty", lambda *sizes, device, **options: plain(*sizes, **options))
    monkeypatch.setattr(device_memory, "_share", lambda buffer: (buffer,))
    assert device_memory.why_not_shared(torch.device("cuda:0")) == ""
    monkeypatch.setattr(device_memory, "_share", refuse)
    assert device_memory.why_not_shared(torch.device("cuda:0")) == "CUDA error: operation not supported"
