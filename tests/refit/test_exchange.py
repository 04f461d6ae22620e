"""Memory of the exchange between policy ranks that do not reach the memory of each other's engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore

from rlctl.backends.base import WeightSource
from rlctl.config.parallel import ParallelSpec
from rlctl.models.facts import ModelFacts, MoeFacts
from rlctl.planner.choice import TrainingChoice
from rlctl.planner.costs.memory import exchange_bytes
from rlctl.planner.inputs.cluster import make_cluster
from rlctl.planner.inputs.constants import Constants
from rlctl.planner.inputs.request import Request
from rlctl.refit.channels import plan_channels
from rlctl.refit.policy_side import RefitSender
from rlctl.refit.records import SenderPlace, SenderSetup
from rlctl.transport.rounds import Need
from rlctl.weights.megatron import MegatronWorld
from rlctl.weights.transfer_plan import World
from rlctl.weights.vllm import VllmParallel, VllmWorld

SIZES: dict[str, Any] = {
    "layers": 4, "hidden": 64, "heads": 8, "kv_heads": 8, "head_dim": 16, "intermediate": 96, "vocab": 8192,
    "max_length": 64,
}  # fmt: skip
DENSE = ModelFacts("llama", **SIZES)
EXPERTS = ModelFacts("qwen3_moe", **SIZES, qk_norm=True, moe=MoeFacts(8, 2, 1024))
STAGING = 1 << 18


class Rank(RefitSender, WeightSource):
    def __init__(self, rank: int, world: World) -> None:
        self.rank, self._world = rank, world
        super().__init__(self)
        self._held = {
            name: torch.zeros(one.shape, dtype=getattr(torch, one.dtype))
            for name, one in world.layout(rank).params.items()
        }

    def parameters(self) -> dict[str, Tensor]:
        return self._held

    def layouts(self) -> World:
        return self._world


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def held_bytes(thing: Any) -> int:
    """Bytes of the buffers that an object holds."""
    found, looked, left = dict[int, int](), set[int](), [thing]
    while left:
        one = left.pop()
        if isinstance(one, Tensor) and one.dtype == torch.uint8:
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif id(one) not in looked and not isinstance(one, Tensor | Mock):
            looked.add(id(one))
            left += one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else ()
            left += vars(one).values() if hasattr(one, "__dict__") else ()
    return sum(found.values())


@pytest.mark.parametrize(
    ("facts", "parallel", "tp"),
    [
        (DENSE, ParallelSpec(tp=2, dp=4), 1),
        (DENSE, ParallelSpec(tp=8), 1),
        (DENSE, ParallelSpec(pp=2, dp=4), 2),
        (DENSE, ParallelSpec(pp=4, tp=2), 4),
        (EXPERTS, ParallelSpec(ep=4, dp=8), 1),
    ],
    ids=lambda value: value.name() if isinstance(value, ParallelSpec) else None,
)
def test_buffers_stay_in_what_the_plan_counts_and_go_with_the_refit(
    facts: ModelFacts, parallel: ParallelSpec, tp: int, group: None
) -> None:
    """Eight ranks that reach no memory but their own, as on eight GPUs, and an engine worker next to each."""
    world, target = MegatronWorld(facts, parallel, "te", "bfloat16"), VllmWorld(facts, VllmParallel(tp=tp), "bfloat16")
    places = tuple(SenderPlace(f"policy rank {rank}", f"place {rank}", "cpu", "127.0.0.1") for rank in range(8))
    needs = [Need(f"worker {rank}", f"place {rank}", "cpu", (), target.layout(rank % tp)) for rank in range(8)]
    channels = plan_channels("shared-memory", needs, places, staging_bytes=STAGING, timeout_s=30)
    request = Request(facts, make_cluster("h100", 1, 8), constants=Constants(staging_bytes=STAGING))
    counted = exchange_bytes(request, TrainingChoice(parallel))
    for rank in range(8):
        sender = Rank(rank, world)
        own = sender.refit_make(channels, places, "127.0.0.1").addresses
        known = (replace(one.connection, address=own.get(one.index)) for one in channels)
        there = tuple(map(lambda one, link: replace(one, connection=link), channels, known))
        assert not sender.refit_connect(SenderSetup((), places, there))
        exchange = sender._state().exchange
        assert exchange is not None
        exchange.group = Mock(together=lambda *_: [])
        exchange.start(1, sender.parameters())
        assert 0 < held_bytes(exchange) <= counted
        exchange.finish()
        assert held_bytes(exchange) == 0
        sender.refit_close()
