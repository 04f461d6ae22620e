"""Which mover a session takes for where policy and engines are; one that cannot work there is refused."""

from __future__ import annotations

from rlctl.refit.channels import choose_mover
from rlctl.refit.records import SenderPlace
from rlctl.transport.rounds import Need
from rlctl.weights.layout import Layout


def needs(*devices: str) -> list[Need]:
    return [Need(f"engine {i}", "node", device, (), Layout(0, {}, ())) for i, device in enumerate(devices)]


def places(*devices: str) -> list[SenderPlace]:
    return [SenderPlace(f"policy rank {i}", "node", device, "127.0.0.1") for i, device in enumerate(devices)]


def test_devices_are_shared_through_memory_and_others_through_nccl() -> None:
    policy = places("cuda:a", "cuda:b")
    assert choose_mover("auto", needs("cuda:a", "cuda:b"), policy, None) == "cuda-ipc"
    for asked in ("auto", "collective"):
        assert choose_mover(asked, needs("cuda:c"), policy, None) == "collective"
    assert choose_mover("collective", needs("cpu"), places("cpu"), None) == "collective"
