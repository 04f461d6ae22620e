"""Which mover a session takes for where policy and engines are; one that cannot work there is refused."""

from __future__ import annotations

import pytest

from rlctl.errors import ConfigError
from rlctl.refit.channels import choose_mover
from rlctl.refit.records import SenderPlace
from rlctl.transport.rounds import Need
from rlctl.weights.layout import Layout


def needs(*devices: str) -> list[Need]:
    return [Need(f"engine {i}", "node", device, (), Layout(0, {}, ())) for i, device in enumerate(devices)]


def places(*devices: str) -> list[SenderPlace]:
    return [SenderPlace(f"policy rank {i}", "node", device, "127.0.0.1") for i, device in enumerate(devices)]


def test_nccl_takes_one_process_of_each_gpu() -> None:
    policy = places("cuda:a", "cuda:b")
    for engines in (("cuda:a", "cuda:b"), ("cuda:b", "cuda:c")):
        with pytest.raises(ConfigError, match="share GPUs with the policy") as error:
            choose_mover("collective", needs(*engines), policy, None)
        assert error.value.hint
    assert choose_mover("auto", needs("cuda:a", "cuda:b"), policy, None) == "cuda-ipc"
    for asked in ("auto", "collective"):
        assert choose_mover(asked, needs("cuda:c"), policy, None) == "collective"
    assert choose_mover("collective", needs("cpu"), places("cpu"), None) == "collective"
