"""Refits without engines: parameters in the layouts of a Megatron policy and of vLLM, at reduced width.

All tensors of a published model exist under their own names, with small shapes, so that what a refit costs a tensor
shows at the full count. Sessions, plans, movers, rounds and fingerprints are those of a run; only the models around
the parameters are missing: nothing is generated, nothing is repacked.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import torch

from rlctl.backends.vllm.channel import Connection, Need, cut_rounds, payload_bytes
from rlctl.backends.vllm.cuda_buffers import device_name
from rlctl.backends.vllm.direct import Target
from rlctl.backends.vllm.inlets import open_inlet
from rlctl.backends.vllm.messages import Reading, Received, Taken
from rlctl.backends.vllm.receiver import DirectReceiver, Inlet, Timed
from rlctl.backends.vllm.segment import this_node
from rlctl.backends.vllm.sparse import SparseReceiver, require_base
from rlctl.checkpoints.fingerprints import fingerprint
from rlctl.checkpoints.tensors import dtype_of
from rlctl.errors import WorkerError
from rlctl.models.facts import ModelFacts
from rlctl.models.registry import weights_of
from rlctl.refit.records import SourceSetup
from rlctl.refit.source import RefitSource
from rlctl.weights.layout import Layout
from rlctl.weights.megatron import MegatronWorld
from rlctl.weights.megatron_parallel import MegatronParallel
from rlctl.weights.plan import World
from rlctl.weights.vllm import VllmParallel, VllmWorld


def reduced(facts: ModelFacts, hidden: int = 64) -> ModelFacts:
    """The model with all its layers and experts, at `hidden` wide (a multiple of 64): as many tensors, small ones."""
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


class SyntheticSource(RefitSource):
    """One rank's parameters in Megatron's layout."""

    def __init__(
        self,
        rank: int,
        facts: ModelFacts,
        parallel: MegatronParallel,
        dtype: str,
        threads: int | None = None,
        device: str = "cpu",
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.rank, self._dtype = rank, dtype
        self._world = MegatronWorld(facts, parallel, "local", dtype)
        self._params = _zeros(self._world.layout(rank), torch.device(device))

    def setup(self) -> int:
        """Give every element a value that replicas share; returns the number of parameters."""
        self._perturb(self._world, 0, 1.0, 1.0)
        return len(self._params)

    def parameters(self) -> dict[str, torch.Tensor]:
        return self._params

    def refit_world(self, setup: SourceSetup) -> World:
        return self._world

    def close(self) -> None:
        self.refit_close()


class SyntheticEngine:
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
        if threads:
            torch.set_num_threads(threads)
        self.index, self.name = index, f"engine {index} worker 0"
        whole = VllmWorld(facts, parallel, dtype).layout(index % parallel.world_size)
        self.device = torch.device(device)
        self.params = _zeros(whole, self.device)
        self.layout = _without_padding(whole)
        self._shapes = dict(weights_of(facts).tensors)
        self.receiver = DirectReceiver(self._targets)
        self.inlet: Inlet | None = None
        self._version, self._updating = 0, False
        self._applied: int | None = None

    def _targets(self) -> dict[str, Target]:
        rows = {name: spec.shape[0] for name, spec in self.layout.params.items()}
        return {name: Target(value[: rows[name]], rows[name]) for name, value in self.params.items()}

    def refit_open(self, init_info: dict[str, Any]) -> None:
        self.refit_close()

    def refit_needs(self) -> list[Need]:
        taken = Taken("direct", "parameters without an engine", tuple(self.layout.by_tensor))
        return [Need(self.name, this_node(), device_name(self.device), os.getpid(), (taken,), self.layout)]

    def refit_connect(self, connections: tuple[Connection, ...]) -> None:
        self._link = connections[0]
        self.rounds = cut_rounds(self.layout, self._link.capacity)
        self.inlet = open_inlet(connections[0], self.rounds, self.name, self.device)

    def refit_begin(self, version: int) -> None:
        self._updating = True

    def refit_receive(self, update: dict[str, Any]) -> None:
        if self.inlet is None:
            raise WorkerError("A refit before this end was connected.")
        begun, timed = time.perf_counter(), Timed(self.inlet)
        held, self._applied = self._applied, None
        changes = update["lengths"][self._link.channel] if update.get("base") is not None else None
        with torch.no_grad(), self.inlet.begin(update["version"], update["epoch"], changes):
            if changes is None:
                self.receiver.receive(self.rounds, timed)
            else:
                require_base(held, update["base"])
                self._receive_changes(timed, len(changes))
        self._applied = update["version"]
        seconds = time.perf_counter() - begun
        self._received = Received(
            seconds, timed.waited_s, len(self.layout.by_tensor), payload_bytes(self.rounds), "direct"
        )

    def _receive_changes(self, inlet: Timed, rounds: int) -> None:
        link = self._link
        receiver = SparseReceiver(self._targets(), list(self.layout.params), len(link.senders), link.capacity)
        receiver.receive(rounds, inlet)

    def refit_finish(self, version: int) -> dict[str, float]:
        self._version, self._updating = version, False
        return {"load": 0.0, "cache_reset": 0.0}

    def refit_reject(self, version: int) -> None:
        self._updating = True

    def weight_version(self) -> int:
        if self._updating:
            raise WorkerError(f"Engine {self.index} holds half-updated weights.")
        return self._version

    def received(self) -> list[Received]:
        return [self._received]

    def poison(self) -> None:
        """NaN everywhere: what a refit leaves out shows."""
        self._applied = None
        for value in self.params.values():
            value.fill_(float("nan"))

    def readings(self, tensors: list[str] | None = None) -> list[Reading]:
        """Fingerprints of what is in the parameters now."""
        found = []
        for piece in self.layout.pieces:
            if tensors is not None and piece.tensor not in tensors:
                continue
            box = self.params[piece.param][tuple(slice(s.start, s.last + 1, s.step) for s in piece.param_box)]
            extent = tuple(span.count for span in piece.tensor_box)
            shape = self._shapes[piece.tensor]
            start, step = [s.start for s in piece.tensor_box], [s.step for s in piece.tensor_box]
            value = fingerprint(box.reshape(extent), shape, start, step)
            found.append(Reading(piece.tensor, shape, tuple(start), extent, value, piece.param))
        return found

    def refit_close(self) -> None:
        if self.inlet is not None:
            self.inlet.close()
            self.inlet = None

    def close(self) -> None:
        self.refit_close()


def _zeros(layout: Layout, device: torch.device) -> dict[str, torch.Tensor]:
    specs = layout.params.items()
    return {name: torch.zeros(spec.shape, dtype=dtype_of(spec.dtype), device=device) for name, spec in specs}


def _without_padding(layout: Layout) -> Layout:
    """The layout without the rows at the end of embeddings that no tensor determines: they are not transferred."""
    params = dict(layout.params)
    for fill in layout.fills:
        spec = params[fill.param]
        params[fill.param] = replace(spec, shape=(fill.box[0].start, *spec.shape[1:]))
    return Layout(layout.rank, params, layout.pieces)
