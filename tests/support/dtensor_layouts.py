"""Modules as transformers 5 stacks their experts, and their shards: tensor parallel by role, then FSDP2 along the first
axis.

Source: torch/distributed/tensor placement types (Shard splits as torch.chunk does, so late ranks may hold less or
nothing) and torch/distributed/fsdp (each parameter sharded along dim 0 of its tensor-parallel part).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.matrices import Matrix, Role
from rlctl.weights import hf
from rlctl.weights.layout import Box, Layout, ParamSpec, Piece, Shape, Span, cut, whole
from rlctl.weights.megatron import piece as piece_of
from rlctl.weights.transfer_plan import Shard

COLUMN_ROLES = frozenset(
    {Role.Q, Role.K, Role.V, Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS, Role.GATE, Role.UP, Role.HEAD, Role.MLA_Q}
    | {Role.MLA_Q_UP, Role.MLA_KV_UP, Role.SHARED_GATE, Role.SHARED_UP, Role.EMBEDDING, Role.SINKS}
)
ROW_ROLES = frozenset({Role.O, Role.DOWN, Role.SHARED_DOWN})
_STACKED = {
    Role.EXPERT_GATE: ("gate_up_proj", 0),
    Role.EXPERT_UP: ("gate_up_proj", 1),
    Role.EXPERT_DOWN: ("down_proj", 0),
}
_ONE_EXPERT = re.compile(r"\.experts\.\d+\..*$")


def module_layout(facts: ModelFacts, dtype: str) -> Layout:
    """As transformers 5 holds the model: experts of a layer in `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I]."""
    plain = hf.layout(facts, dtype)
    stacked = {m.tensor: m for m in weights_of(facts).matrices if m.role in _STACKED and len(m.tensor_shape) == 2}
    params = {name: spec for name, spec in plain.params.items() if name not in stacked}
    pieces = [p for p in plain.pieces if p.tensor not in stacked]
    for matrix in stacked.values():
        name, spec, own = _stack(facts, matrix, dtype)
        params[name] = spec
        pieces.append(own)
    return Layout(0, params, tuple(pieces))


def _stack(facts: ModelFacts, matrix: Matrix, dtype: str) -> tuple[str, ParamSpec, Piece]:
    assert facts.moe is not None
    assert matrix.expert is not None
    module, part = _STACKED[matrix.role]
    name = _ONE_EXPERT.sub(f".experts.{module}", matrix.tensor).replace("block_sparse_moe", "mlp")
    rows, columns = matrix.shape
    spec = ParamSpec((facts.moe.experts, rows * (2 if module == "gate_up_proj" else 1), columns), dtype)
    own = piece_of(matrix, (Span(0, rows), Span(0, columns)), name, (matrix.expert, rows * part, 0))
    return name, spec, own


@dataclass(frozen=True)
class DTensorParallel:
    """Mesh sizes. Rank = (replicate x shard + shard rank) x tp + tp rank."""

    tp: int = 1
    shard: int = 1
    """Ranks over which FSDP divides each parameter."""
    replicate: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.shard * self.replicate


@dataclass(frozen=True)
class DTensorWorld:
    """All ranks of a policy on DTensor; parameters are called as the published tensors or transformers' modules."""

    facts: ModelFacts
    parallel: DTensorParallel
    dtype: str = "float32"
    modules: bool = False
    """Experts stacked as transformers 5 holds them, instead of one tensor an expert."""

    @property
    def size(self) -> int:
        return self.parallel.world_size

    @cached_property
    def _plain(self) -> Layout:
        return module_layout(self.facts, self.dtype) if self.modules else hf.layout(self.facts, self.dtype)

    @cached_property
    def _axis(self) -> dict[str, int]:
        """Param -> its tensor-parallel axis; absent: replicated."""
        roles = {m.tensor: m.role for m in weights_of(self.facts).matrices}
        return {n: 0 if r in COLUMN_ROLES else 1 for n, r in roles.items() if r in COLUMN_ROLES | ROW_ROLES}

    def layout(self, rank: int) -> Layout:
        """Everything that `rank` holds; parameters of which it holds nothing are there with an empty shape."""
        boxes = {name: self.local_box(name, spec.shape, rank) for name, spec in self._plain.params.items()}
        params = {n: replace(s, shape=tuple(x.count for x in boxes[n])) for n, s in self._plain.params.items()}
        pieces = [cut(p, p.param, boxes[p.param]) for p in self._plain.pieces if params[p.param].size]
        return Layout(rank, params, tuple(p for p in pieces if p is not None))

    def shards(self, tensor: str, every: bool = False) -> Sequence[Shard]:
        """Return the holders of each part of `tensor`: replicas, and tensor-parallel ranks of what is not divided among
        them."""
        parallel = self.parallel
        found: dict[Box, tuple[list[int], list[tuple[Piece, ParamSpec]]]] = {}
        for piece in self._plain.by_tensor.get(tensor, ()):
            spec = self._plain.params[piece.param]
            for rank in range(parallel.world_size):
                box = self.local_box(piece.param, spec.shape, rank)
                part = cut(piece, piece.param, box)
                if part is not None and all(span.count for span in box):
                    local = replace(spec, shape=tuple(span.count for span in box))
                    found.setdefault(part.tensor_box, ([], [(part, local)]))[0].append(rank)
        return [Shard(ranks, tuple(pieces)) for ranks, pieces in found.values()]

    def local_box(self, name: str, shape: Shape, rank: int) -> Box:
        """The part of a param that `rank` holds."""
        tp_rank, shard_rank = rank % self.parallel.tp, rank // self.parallel.tp % self.parallel.shard
        box = list(whole(shape))
        axis = self._axis.get(name)
        if axis is not None:
            box[axis] = chunk(box[axis], self.parallel.tp, tp_rank)
        box[0] = chunk(box[0], self.parallel.shard, shard_rank)
        return tuple(box)


def chunk(span: Span, parts: int, index: int) -> Span:
    """The `index`-th of the parts that torch.chunk makes: ceil-sized, the last ones shorter or empty."""
    size = -(-span.count // parts)
    first = min(index * size, span.count)
    return Span(span.start + first, min(size, span.count - first))
