"""Which mover a session takes for where policy and engines are; one that cannot work there is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlctl.errors import ConfigError
from rlctl.refit.channels import choose_mover, where, why_not_shared
from rlctl.refit.records import SenderPlace
from rlctl.transport.rounds import Need
from rlctl.weights.layout import Layout


def needs(*devices: str) -> list[Need]:
    return [Need(f"engine {i}", "node", device, (), Layout(0, {}, ())) for i, device in enumerate(devices)]


def places(*devices: str) -> list[SenderPlace]:
    return [SenderPlace(f"policy rank {i}", "node", device, "127.0.0.1") for i, device in enumerate(devices)]


def test_devices_are_shared_through_memory_and_others_through_nccl() -> None:
    policy = places("cuda:a", "cuda:b")
    assert choose_mover("auto", where(needs("cuda:a", "cuda:b"), policy), None) == "cuda-ipc"
    for asked in ("auto", "collective"):
        assert choose_mover(asked, where(needs("cuda:c"), policy), None) == "collective"
    assert choose_mover("collective", where(needs("cpu"), places("cpu")), None) == "collective"
    assert choose_mover("auto", where(needs("cpu"), places("cpu")), None) == "shared-memory"
    with pytest.raises(ConfigError, match="but engine 1 has a separate device"):
        choose_mover("cuda-ipc", where(needs("cuda:a", "cuda:c"), policy), None)
    with pytest.raises(ConfigError, match="NCCL takes one process of each GPU"):
        choose_mover("collective", where(needs("cuda:a"), policy), None)
    with pytest.raises(ConfigError, match=r"disk needs refit\.directory"):
        choose_mover("disk", where(needs("cuda:a"), policy), None)


def test_gpus_whose_memory_cannot_be_shared_use_memory_of_the_host() -> None:
    """As on WSL2, which has no CUDA IPC."""
    barred = [replace(place, not_shared="CUDA error: operation not supported") for place in places("cuda:a")]
    assert choose_mover("auto", where(needs("cuda:a"), barred), None) == "shared-memory"
    assert choose_mover("auto", where(needs("cuda:c"), barred), None) == "collective"  # nothing is shared there
    assert why_not_shared([*places("cuda:a"), *barred]).endswith("by CUDA IPC (CUDA error: operation not supported)")
    with pytest.raises(ConfigError, match=r"policy rank 0 cannot share GPU memory .*not supported") as caught:
        choose_mover("cuda-ipc", where(needs("cuda:a"), barred), None)
    assert "shared-memory" in (caught.value.hint or "")
