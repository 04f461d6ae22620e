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
from rlctl.backends.host_memory import HostMemory, Offloaded
from rlctl.config.parallel import ParallelSpec
from rlctl.models.facts import ModelFacts, MoeFacts
from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.costs.memory import exchange_bytes
from rlctl.planner.costs.time import handed_boxes
from rlctl.planner.inputs.cluster import make_cluster
from rlctl.planner.inputs.constants import Constants
from rlctl.planner.inputs.request import Request
from rlctl.refit.channels import plan_channels
from rlctl.refit.policy_side import RefitSender
from rlctl.refit.records import SenderPlace, SenderSetup
from rlctl.transport.round_buffers import Packer
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


def launched(sender: RefitSender) -> int:
    """Copies that a rank makes in a refit: into and out of messages, and of its own parts."""
    state = sender._state()
    assert state.exchange is not None
    packers = {id(packer): packer for packer, _ in state.exchange._outgoing.values()}
    packers |= {id(end.packer): end.packer for end in state.ends.values()}
    packed = sum(len(copies) for packer in packers.values() for copies in packer.copies)
    parts = (images.parts for _, images in state.exchange._incoming.values())
    return packed + sum(len(of_round) for senders in parts for of_sender in senders for of_round in of_sender)


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
        cut = 3 * sender._state().rounds  # tensors that a round's end cuts in two: here as large as a round
        assert launched(sender) <= handed_boxes(facts, TrainingChoice(parallel), GenerationChoice(tp=tp)) + cut
        exchange.finish()
        assert held_bytes(exchange) == 0
        sender.refit_close()


def test_views_are_made_once_though_weights_and_buffers_leave_between_refits(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of tensor parallelism, which send each other halves: after a sleep the same views send the new values
    from where these are then."""
    target = VllmWorld(DENSE, VllmParallel(), "bfloat16")
    places = tuple(SenderPlace(f"policy rank {rank}", f"place {rank}", "cpu", "127.0.0.1") for rank in range(2))
    needs = [Need(f"worker {rank}", f"place {rank}", "cpu", (), target.layout(0)) for rank in range(2)]
    channels = plan_channels("shared-memory", needs, places, staging_bytes=STAGING, timeout_s=30)
    sender = Rank(0, MegatronWorld(DENSE, ParallelSpec(tp=2), "te", "bfloat16"))
    own = sender.refit_make(channels, places, "127.0.0.1").addresses
    there = (replace(one, connection=replace(one.connection, address=own.get(one.index))) for one in channels)
    assert not sender.refit_connect(SenderSetup((), places, tuple(there)))
    exchange = sender._state().exchange
    assert exchange is not None
    exchange.group = Mock(together=lambda *_: [])
    made = Mock(wraps=Packer._bind)
    monkeypatch.setattr(Packer, "_bind", lambda *args: made(*args))

    def sent(value: float) -> set[float]:
        for parameter in sender.parameters().values():
            parameter.fill_(value)
        exchange.start(1, sender.parameters())
        found = set[float]()
        for packer, _ in exchange._outgoing.values():
            for index, length in enumerate(packer.lengths):
                buffer = exchange._buffers[id(packer)][index % 2]
                packer.pack(index, buffer)
                found |= set(buffer[:length].view(torch.bfloat16).float().unique().tolist())
        exchange.finish()
        return found

    assert sent(1.0) == {1.0}
    rounds = made.call_count
    asleep = Offloaded(sender.parameters().values(), (), HostMemory())
    blockers = [torch.ones(1 << 20) for _ in range(4)]  # so that the weights come back elsewhere
    asleep.restore()
    assert sent(2.0) == {2.0}
    assert made.call_count == rounds > 0
    del blockers
    sender.refit_close()
