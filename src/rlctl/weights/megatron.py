"""The layout of every rank of a Megatron-Core policy, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rlctl.errors import ConfigError
from rlctl.models.facts import ModelFacts
from rlctl.models.matrices import Matrix, ModelWeights, Role
from rlctl.models.registry import weights_of
from rlctl.weights.layout import Fill, Layout, ParamSpec, Piece
from rlctl.weights.megatron_names import MTP_OUTER, Kind, Slot, slot
from rlctl.weights.megatron_parallel import (
    Coordinates,
    Experts,
    MegatronParallel,
    MegatronSetting,
    Spec,
    chunk_layers,
    coordinates,
    first_layers,
    stage_of_layer,
)
from rlctl.weights.megatron_shards import Place, place
from rlctl.weights.pieces import share
from rlctl.weights.plan import Shard


@dataclass(frozen=True)
class MegatronWorld(MegatronSetting):
    """All ranks of one Megatron policy.

    Names are those of `GPTModel.named_parameters()` and its persistent buffers: layers are counted within the stage.
    With vpp > 1 a rank has several models, so layers have their global number there.
    """

    @property
    def size(self) -> int:
        return self.parallel.world_size

    @cached_property
    def weights(self) -> ModelWeights:
        return weights_of(self.facts)

    @cached_property
    def _alike(self) -> dict[tuple, Place]:
        """One place of each kind: layers and experts repeat it under other names."""
        return {}

    def layout(self, rank: int) -> Layout:
        """Everything that `rank` holds."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"Rank {rank} is outside of a world of {self.size}.")
        at = coordinates(self.parallel, rank)
        params: dict[str, ParamSpec] = {}
        pieces: list[Piece] = []
        fills: dict[str, tuple[Fill, ...]] = {}
        for matrix in self._held(at):
            for held in self._places(matrix, at):
                params[held.param] = held.spec
                pieces.extend(held.pieces)
                if held.fills:
                    fills[held.param] = held.fills
        return Layout(rank, params, tuple(pieces), tuple(fill for own in fills.values() for fill in own))

    def shards(self, tensor: str, every: bool = False) -> Sequence[Shard]:
        """Who holds which part of `tensor`; the ranks of a shard differ in dp and cp (and tp where replicated)."""
        shards: list[Shard] = []
        for matrix in self.weights.by_tensor.get(tensor, ()):
            for stage in self._stages(matrix):
                for ranks, at in self._groups(matrix, stage):
                    places = self._places(matrix, at)
                    held = tuple((p, own.spec) for own in places for p in own.pieces if p.primary or every)
                    if held:
                        shards.append(Shard(ranks, held))
        return shards

    def layers_of(self, stage: int) -> list[int]:
        """Layers (from 0) of all chunks of a stage; multi-token-prediction layers are on the last."""
        chunks, layers = range(self.parallel.chunks), self.facts.layers
        own = [i for chunk in chunks for i in chunk_layers(layers, self.parallel, stage, chunk)]
        return own + (list(range(layers, layers + self.facts.mtp_layers)) if stage == self.parallel.pp - 1 else [])

    def local_experts(self, ep_rank: int) -> range:
        """Experts (global numbers) of an expert-parallel rank."""
        if self.facts.moe is None:
            return range(0)
        own = share(self.facts.moe.experts, self.parallel.ep, ep_rank, "Number of experts", "ep")
        return range(own.start, own.start + own.count)

    def param_name(self, matrix: Matrix, target: Slot) -> str:
        """Name of the parameter on the rank that has it."""
        name = target.name
        if matrix.expert is not None:
            name = name.format(expert=matrix.expert % len(self.local_experts(0)))
        if matrix.layer is None:
            return name
        layers = self.facts.layers
        if matrix.layer >= layers:
            inside = "" if matrix.role in MTP_OUTER else "transformer_layer."
            return f"mtp.layers.{matrix.layer - layers}.{inside}{name}"
        if self.parallel.chunks > 1:
            return f"decoder.layers.{matrix.layer}.{name}"
        first = first_layers(layers, self.parallel)[self._stage_of(matrix.layer)]
        return f"decoder.layers.{matrix.layer - first}.{name}"

    def _held(self, at: Coordinates) -> Iterator[Matrix]:
        """Matrices of which the rank holds a part, in the order of the model."""
        yield from self.weights.outer
        for layer in self.layers_of(at.pp):
            yield from self.weights.layer(layer, self.local_experts(at.ep))

    def _places(self, matrix: Matrix, at: Coordinates) -> Iterator[Place]:
        """Where `matrix` lies on a rank; nothing where the rank has no part of it."""
        last, first = at.pp == self.parallel.pp - 1, at.pp == 0
        if matrix.role is Role.EMBEDDING:
            if first or (self.facts.mtp_layers and last):
                yield self._place(matrix, Role.EMBEDDING, at, primary=first)
            if self.facts.tied_embeddings and last and not first:
                yield self._place(matrix, Role.HEAD, at, primary=False)
        elif matrix.role in (Role.HEAD, Role.FINAL_NORM):
            if last:
                yield self._place(matrix, matrix.role, at)
        else:
            yield self._place(matrix, matrix.role, at)

    def _place(self, matrix: Matrix, role: Role, at: Coordinates, primary: bool = True) -> Place:
        target = self._slot(matrix, role)
        name = self.param_name(matrix, target)
        expert = matrix.expert if self.experts == "legacy_grouped" else matrix.expert is not None
        kind = (target, matrix.role, matrix.shape, matrix.tensor_starts, matrix.tensor_steps, matrix.axes)
        key = (*kind, matrix.offset, expert, at, primary)
        found = self._alike.get(key)
        if found is None:
            found = self._alike[key] = place(self, matrix, target, name, at, primary)
        return found.renamed(matrix.tensor, name)

    def _slot(self, matrix: Matrix, role: Role) -> Slot:
        return slot(role, self, matrix.layer is not None and self.facts.is_moe_layer(matrix.layer))

    def _stage_of(self, layer: int) -> int:
        return stage_of_layer(self.facts.layers, self.facts.mtp_layers, self.parallel)[layer]

    def _stages(self, matrix: Matrix) -> list[int]:
        last = self.parallel.pp - 1
        if matrix.role is Role.EMBEDDING:
            return [0, last] if last and (self.facts.tied_embeddings or self.facts.mtp_layers) else [0]
        return [last] if matrix.layer is None else [self._stage_of(matrix.layer)]

    def _groups(self, matrix: Matrix, stage: int) -> Iterator[tuple[Sequence[int], Coordinates]]:
        """(ranks, coordinates) of each distinct part of a matrix within a stage."""
        parallel, base = self.parallel, stage * self.parallel.stage_size
        end = base + parallel.stage_size
        replicated = self._slot(matrix, matrix.role).kind is Kind.REPLICATED
        if matrix.expert is not None:
            etp, block = parallel.expert_tp, parallel.expert_tp * parallel.ep
            ep = matrix.expert // len(self.local_experts(0))
            if replicated:
                ranks = [r for r in range(base, end) if (r - base) // etp % parallel.ep == ep]
                yield ranks, Coordinates(stage, 0, ep, 0)
                return
            for t in range(etp):
                yield range(base + ep * etp + t, end, block), Coordinates(stage, t, ep, t)
        elif replicated:
            yield range(base, end), Coordinates(stage, 0, 0, 0)
        else:
            for t in range(parallel.tp):
                yield range(base + t, end, parallel.tp), Coordinates(stage, t, 0, 0)


def layout(
    facts: ModelFacts,
    parallel: MegatronParallel,
    rank: int,
    spec: Spec = "local",
    dtype: str = "float32",
    experts: Experts = "sequential",
) -> Layout:
    """Layout of one rank; see `MegatronWorld`."""
    return MegatronWorld(facts, parallel, spec, dtype, experts).layout(rank)
