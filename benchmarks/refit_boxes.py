"""Counts the copies that policy ranks launch in a refit on shared devices, and measures their host time.

    python benchmarks/refit_boxes.py [--repeats 5]

Qwen3-30B-A3B's tensors (48 layers of 128 experts) 16 wide, on eight policy ranks (EP8) and an engine worker (TP4) next
to each, as in one node of the plan's 64 H100s. No rank reaches another's staging memory, so boxes go through messages.
The copies are made on this CPU; messages are not sent. Prints the copies of rank 0 by kind, the most that the plan
counts, and the CPU seconds of the first refit, which makes all views, and of later ones (median).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rlctl.backends.base import WeightSource
from rlctl.config.parallel import ParallelSpec
from rlctl.models.facts import ModelFacts, MoeFacts
from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.costs.time import handed_boxes, tensor_count
from rlctl.refit.channels import plan_channels
from rlctl.refit.policy_side import RefitSender
from rlctl.refit.records import SenderPlace, SenderSetup
from rlctl.transport.rounds import Need
from rlctl.weights.megatron import MegatronWorld
from rlctl.weights.transfer_plan import World
from rlctl.weights.vllm import VllmParallel, VllmWorld

FACTS = ModelFacts("qwen3_moe", 48, 16, 8, 8, 2, 16, 512, 64, qk_norm=True, moe=MoeFacts(128, 8, 16))
PARALLEL, TP, STAGING = ParallelSpec(ep=8, dp=8), 4, 1 << 22


class Rank(WeightSource):
    """A policy rank with weights of zeros."""

    def __init__(self, rank: int, world: World) -> None:
        self.rank, self._world = rank, world
        shapes = world.layout(rank).params.items()
        self._held = {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in shapes}

    def parameters(self) -> dict[str, torch.Tensor]:
        return self._held

    def layouts(self) -> World:
        return self._world


def connected(source: Rank) -> RefitSender:
    """Return the sender of one rank, connected but to no other process."""
    target, ranks = VllmWorld(FACTS, VllmParallel(tp=TP), "bfloat16"), range(PARALLEL.world_size)
    places = tuple(SenderPlace(f"policy rank {rank}", f"place {rank}", "cpu", "127.0.0.1") for rank in ranks)
    needs = [Need(f"worker {rank}", f"place {rank}", "cpu", (), target.layout(rank % TP)) for rank in ranks]
    channels = plan_channels("shared-memory", needs, places, staging_bytes=STAGING, timeout_s=30)
    sender = RefitSender(source)
    own = sender.refit_make(channels, places, "127.0.0.1").addresses
    there = (replace(one, connection=replace(one.connection, address=own.get(one.index))) for one in channels)
    sender.refit_connect(SenderSetup((), places, tuple(there)))
    exchange: Any = sender._state().exchange
    exchange.group = SimpleNamespace(together=lambda *_: [])
    return sender


def refit(sender: RefitSender, attempt: int, staging: dict[tuple[int, int], torch.Tensor]) -> float:
    """Make all copies of a refit; return the CPU seconds."""
    state, begun = sender._state(), time.process_time()
    exchange: Any = state.exchange
    exchange.start(attempt, sender.source.parameters())
    for end in state.ends.values():
        end.packer.look(sender.source.parameters())
    for index in range(state.rounds):
        exchange.round(index)
        for channel, end in state.ends.items():
            if index < len(end.packer.rounds):
                size = end.channel.connection.capacity
                buffer = staging.setdefault((channel, index % 2), torch.empty(size, dtype=torch.uint8))
                end.packer.pack(index, buffer)
                exchange.put(channel, index, buffer)
    exchange.finish()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sender, staging = connected(Rank(0, MegatronWorld(FACTS, PARALLEL, "te", "bfloat16"))), {}
    first, *later = [refit(sender, attempt, staging) for attempt in range(1 + args.repeats)]
    state = sender._state()
    exchange: Any = state.exchange
    packers = {id(packer): packer for packer, _ in exchange._outgoing.values()}
    copies = {
        "into messages": sum(len(part) for packer in packers.values() for part in packer.copies),
        "out of messages": sum(
            len(part) for _, images in exchange._incoming.values() for of_sender in images.parts for part in of_sender
        ),
        "own": sum(len(part) for end in state.ends.values() for part in end.packer.copies),
    }
    total, seconds = sum(copies.values()), statistics.median(later)
    counted = handed_boxes(FACTS, TrainingChoice(PARALLEL), GenerationChoice(tp=TP))
    report = {
        "tensors": tensor_count(FACTS), "copies": copies, "all": total, "counted_by_the_plan": counted,
        "first_cpu_s": round(first, 3), "later_cpu_s": round(seconds, 3),
        "microseconds_a_copy": round(1e6 * seconds / total, 2), "first_over_later": round(first / seconds, 1),
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    sender.refit_close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
