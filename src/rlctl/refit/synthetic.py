"""Refits without engines: a policy's and vLLM's layouts at reduced width.

All tensors of a published model keep their names with small shapes, which shows the cost per tensor. Layouts, plans,
movers, rounds and fingerprints are a run's; nothing is generated or repacked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rlctl.backends.base import WeightSource
from rlctl.backends.vllm.weights.write import Destination, DirectWriter, ReceivingEnd
from rlctl.checkpoints.tensor_fingerprints import fingerprint
from rlctl.errors import WorkerError
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.refit.policy_side import RefitSender
from rlctl.transport.device_memory import device_name
from rlctl.transport.movers import Received
from rlctl.transport.rounds import Connection, Need, Route
from rlctl.transport.staging import this_node
from rlctl.weights.layout import Layout
from rlctl.weights.plan_execution import dtype_of
from rlctl.weights.readings import Reading
from rlctl.weights.transfer_plan import World
from rlctl.weights.vllm import VllmParallel, VllmWorld


def reduced(facts: ModelFacts, hidden: int = 64) -> ModelFacts:
    """The model with all its layers and experts, at `hidden` wide (a multiple of 64): as many tensors, but small."""
    heads = min(facts.heads, 16)
    dim = hidden // 4
    moe, mla = facts.moe, facts.mla
    if moe is not None:
        shared = dim if moe.shared_expert_intermediate else 0
        moe = replace(moe, expert_intermediate=dim, shared_expert_intermediate=shared)
    if mla is not None:
        mla = replace(
            mla,
            q_lora_rank=dim if mla.q_lora_rank else None,
            kv_lora_rank=dim,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
        )
    return replace(
        facts,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if mla is not None else min(facts.kv_heads, heads),
        head_dim=16,
        intermediate=2 * hidden,
        vocab=min(facts.vocab, 1024),
        moe=moe,
        mla=mla,
        mtp_layers=0,
    )


class SyntheticSource(WeightSource):
    """One rank's parameters in the layout of a policy backend."""

    def __init__(self, rank: int, world: World, device: str = "cpu") -> None:
        self.rank, self._world = rank, world
        self._params = _zeros(self._world.layout(rank), torch.device(device))

    def parameters(self) -> dict[str, torch.Tensor]:
        return self._params

    def layouts(self) -> World:
        return self._world


class SyntheticSender(RefitSender):
    """Sends such parameters."""

    def __init__(self, rank: int, world: World, threads: int | None = None, device: str = "cpu") -> None:
        if threads:
            torch.set_num_threads(threads)
        super().__init__(SyntheticSource(rank, world, device))

    def setup(self) -> int:
        """Give every element a value that replicas share; returns the number of parameters."""
        self.refit_perturb(0, 1.0)
        return len(self.source.parameters())

    def close(self) -> None:
        self.refit_close()


class SyntheticEngine(ReceivingEnd):
    """One rank's parameters in vLLM's layout, received as an engine's worker receives them, always directly."""

    def __init__(
        self,
        index: int,
        facts: ModelFacts,
        parallel: VllmParallel,
        dtype: str,
        threads: int | None = None,
        device: str = "cpu",
    ) -> None:
        """`index` is the rank in the engines' world; ranks of several engines hold the same."""
        super().__init__(torch.device(device))
        if threads:
            torch.set_num_threads(threads)
        self.index, self.name = index, f"engine {index} worker 0"
        self.layout = VllmWorld(facts, parallel, dtype).layout(index % parallel.world_size)
        self.params = _zeros(self.layout, self.device)
        self._shapes = dict(weights_of(facts).tensors)
        self.writer = DirectWriter(self.targets)
        self._version, self._updating = 0, False

    def targets(self) -> dict[str, Destination]:
        return {name: Destination(value, value.shape[0]) for name, value in self.params.items()}

    def refit_open(self, table: tuple[Any, ...], receive: str) -> None:
        self.close()

    def refit_needs(self) -> list[Need]:
        route = Route("direct", "parameters without an engine", tuple(self.layout.by_tensor))
        return [Need(self.name, this_node(), device_name(self.device), (route,), self.layout)]

    def refit_connect(self, connections: tuple[Connection, ...]) -> None:
        self.connect(connections[0], self.name)

    def refit_begin(self, version: int) -> None:
        self._updating = True

    def refit_receive(self, update_info: dict[str, Any]) -> None:
        self._received = Received("direct", self.receive(**update_info))

    def refit_finish(self, version: int) -> float:
        self._version, self._updating = version, False
        return 0.0

    def refit_reject(self, version: int) -> None:
        self._updating = True

    def weight_version(self) -> int:
        if self._updating:
            raise WorkerError(f"Engine {self.index} holds half-updated weights.")
        return self._version

    def received(self) -> list[Received]:
        return [self._received]

    def poison(self) -> None:
        self.applied = None
        for value in self.params.values():
            value.fill_(float("nan"))

    def readings(self, tensors: list[str] | None = None) -> list[Reading]:
        all_readings = []
        for piece in self.layout.pieces:
            if tensors is not None and piece.tensor not in tensors:
                continue
            box = self.params[piece.param][tuple(slice(s.start, s.last + 1, s.step) for s in piece.param_box)]
            extent = tuple(span.count for span in piece.tensor_box)
            shape = self._shapes[piece.tensor]
            start, step = [s.start for s in piece.tensor_box], [s.step for s in piece.tensor_box]
            value = fingerprint(box.reshape(extent), shape, start, step)
            all_readings.append(Reading(piece.tensor, shape, tuple(start), extent, value, piece.param))
        return all_readings

    def refit_close(self) -> None:
        self.close()


def _zeros(layout: Layout, device: torch.device) -> dict[str, torch.Tensor]:
    specs = layout.params.items()
    return {name: torch.zeros(spec.shape, dtype=dtype_of(spec.dtype), device=device) for name, spec in specs}
