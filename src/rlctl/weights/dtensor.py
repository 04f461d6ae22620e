"""The layout of an FSDP2 policy of transformers' modules, as plain data.

Experts are stacked as in transformers 5, with gate and up along a separate axis, so that parts are boxes for
torch.distributed.checkpoint. Sources: torch/distributed/tensor placement types (Shard splits like torch.chunk) and
torch/distributed/fsdp (sharding along the first axis after tensor parallelism).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rlctl.config.parallel import ParallelSpec
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.matrices import BUFFER_ROLES, Matrix, Role
from rlctl.models.quantized_base import packed_tensors
from rlctl.weights import hf
from rlctl.weights.layout import Box, Layout, ParamSpec, Piece, Shape, Span, cut, whole
from rlctl.weights.megatron import piece as piece_of
from rlctl.weights.transfer_plan import Shard

COLUMN_ROLES = frozenset(
    {Role.Q, Role.K, Role.V, Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS, Role.GATE, Role.UP, Role.HEAD, Role.MLA_Q}
    | {Role.MLA_Q_UP, Role.MLA_KV_UP, Role.SHARED_GATE, Role.SHARED_UP, Role.EMBEDDING, Role.SINKS}
    | {Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_GATE_BIAS, Role.EXPERT_UP_BIAS}
)
"""Their outputs are divided by tensor parallelism."""
ROW_ROLES = frozenset({Role.O, Role.DOWN, Role.SHARED_DOWN, Role.EXPERT_DOWN})
"""Their inputs are."""
ROW_BIASES = frozenset({Role.O_BIAS, Role.EXPERT_DOWN_BIAS})
"""Added to products of divided inputs, which are added up over the ranks."""
EXPERT_ROLES = frozenset(
    {Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN, Role.EXPERT_STACK}
    | {Role.EXPERT_GATE_BIAS, Role.EXPERT_UP_BIAS, Role.EXPERT_DOWN_BIAS}
)
"""Stacked along their first axis, which expert parallelism divides before FSDP2 does."""
_STACKED = {
    Role.EXPERT_GATE: ("gate_up_proj", 0),
    Role.EXPERT_UP: ("gate_up_proj", 1),
    Role.EXPERT_DOWN: ("down_proj", None),
}
HEAD = "lm_head."
"""Prefix of the output layer's parameters, unless a model lists others."""
_ONE_EXPERT = re.compile(r"\.experts\.\d+\..*$")


def module_name(tensor: str) -> str:
    """Return a published tensor's name in transformers' modules (an expert's: the stack's). Mixtral's expert blocks
    have two names."""
    return tensor.replace("block_sparse_moe", "mlp")


def param_names(facts: ModelFacts) -> dict[str, str]:
    """Published tensor -> the parameter of transformers' modules that holds it, or a part of it."""
    return {piece.tensor: piece.param for piece in module_layout(facts, "float32").pieces}


def module_layout(facts: ModelFacts, dtype: str) -> Layout:
    """Return all parameters of transformers' modules, whole: experts in `gate_up_proj` [E, 2, I, H] and `down_proj` [E,
    H, I], or without a family file in transformers' shapes."""
    if facts.listed:
        return _listed_layout(facts, dtype)
    plain = hf.layout(facts, dtype)
    stacked = {m.tensor: m for m in weights_of(facts).matrices if m.role in _STACKED and len(m.tensor_shape) == 2}
    params = {module_name(name): spec for name, spec in plain.params.items() if name not in stacked}
    pieces = [p.renamed(p.tensor, module_name(p.param)) for p in plain.pieces if p.tensor not in stacked]
    for matrix in stacked.values():
        name, spec, module_start = _stack(facts, matrix, dtype)
        params[name] = spec
        pieces.append(module_start)
    return Layout(0, params, tuple(pieces))


def _stack(facts: ModelFacts, matrix: Matrix, dtype: str) -> tuple[str, ParamSpec, Piece]:
    assert facts.moe is not None
    assert matrix.expert is not None
    module, part = _STACKED[matrix.role]
    name = module_name(_ONE_EXPERT.sub(f".experts.{module}", matrix.tensor))
    halves, starts = ((), ()) if part is None else ((2,), (part,))
    spec = ParamSpec((facts.moe.experts, *halves, *matrix.shape), dtype)
    return name, spec, piece_of(matrix, whole(matrix.shape), name, (matrix.expert, *starts, 0, 0))


def _listed_layout(facts: ModelFacts, dtype: str) -> Layout:
    """The layout of a family without a file: each entry of its list is a box of a tensor and of a parameter."""
    params: dict[str, ParamSpec] = {}
    pieces: list[Piece] = []
    for tensor in facts.listed:
        start, inside = (origin or (0,) * len(tensor.shape) for origin in (tensor.tensor_start, tensor.module_start))
        box, at = (tuple(map(Span, begin, tensor.shape)) for begin in (start, inside))
        stacked = facts.moe is not None and "{expert}" in tensor.name
        spec = ParamSpec(tensor.module_shape or tensor.shape, tensor.dtype or dtype)
        axes = (*((None,) if stacked else ()), *range(len(box)))
        for layer in tensor.layers or (None,):
            param = (tensor.module or tensor.name).format(layer=layer)
            params[param] = spec
            for expert in range(facts.moe.experts) if facts.moe and stacked else (None,):
                lead = () if expert is None else (Span(expert, 1),)
                pieces.append(Piece(tensor.name.format(layer=layer, expert=expert), box, param, (*lead, *at), axes))
    return Layout(0, params, tuple(pieces))


@dataclass(frozen=True)
class DTensorWorld:
    """All ranks of a policy. Rank = ((replicate x shards + shard) x tp) + tp rank; context-parallel ranks are shards.
    Parameters have transformers' names."""

    facts: ModelFacts
    parallel: ParallelSpec
    dtype: str = "float32"
    head: bool = True
    """False: the model has no output layer, as a critic's."""

    @property
    def size(self) -> int:
        return self.parallel.world_size

    @cached_property
    def modules(self) -> Layout:
        layout = module_layout(self.facts, self.dtype)
        if self.head:
            return layout
        # A bias of the head (Phi) is in the same module, which a critic's model does not have.
        heads = {m.tensor for m in weights_of(self.facts).outer if m.role is Role.HEAD}
        head_params = (piece.param for name in heads for piece in layout.by_tensor[name])
        head_names = tuple({HEAD, *(param.removesuffix("weight") for param in head_params)})
        params = {name: spec for name, spec in layout.params.items() if not name.startswith(head_names)}
        return Layout(0, params, tuple(piece for piece in layout.pieces if piece.param in params))

    @cached_property
    def packed(self) -> frozenset[str]:
        """Weights of packed layers, which are in no layout: every rank holds them whole."""
        tensors = packed_tensors(self.facts)
        return frozenset(piece.param for piece in self.modules.pieces if piece.tensor in tensors)

    @cached_property
    def roles(self) -> dict[str, Role]:
        roles = {matrix.tensor: matrix.role for matrix in weights_of(self.facts).matrices}
        return {piece.param: roles[piece.tensor] for piece in self.modules.pieces}

    def layout(self, rank: int) -> Layout:
        """Return all parameters of `rank`. Parameters without elements on it have an empty shape."""
        tp, shard = rank % self.parallel.tp, rank // self.parallel.tp % self.parallel.fsdp_shards
        whole_params = {name: spec for name, spec in self.modules.params.items() if name not in self.packed}
        boxes = {name: self._box(name, spec.shape, tp, shard) for name, spec in whole_params.items()}
        params = {name: replace(spec, shape=_counts(boxes[name])) for name, spec in whole_params.items()}
        pieces = [
            cut(p, p.param, boxes[p.param]) for p in self.modules.pieces if p.param in params and params[p.param].size
        ]
        return Layout(rank, params, tuple(p for p in pieces if p is not None))

    def shards(self, tensor: str) -> Sequence[Shard]:
        """Return the holders of each part of `tensor`: replicas, and the ranks of an axis that does not divide it."""
        pairs = []
        for piece in self.modules.by_tensor.get(tensor, ()) if tensor not in packed_tensors(self.facts) else ():
            spec = self.modules.params[piece.param]
            for ranks, box in self._holders(piece.param, spec.shape):
                part = cut(piece, piece.param, box)
                if part is not None and all(span.count for span in part.param_box):
                    pairs.append(Shard(ranks, ((part, replace(spec, shape=_counts(box))),)))
        return pairs

    def _holders(self, name: str, shape: Shape) -> Iterator[tuple[Sequence[int], Box]]:
        """(ranks, content) of each distinct part of a param."""
        parallel = self.parallel
        tps, shards = range(parallel.tp), range(parallel.fsdp_shards)
        for tp in tps if self.axis(name) is not None else [None]:
            for shard in shards if self._sharded(name) else [None]:
                ranks = [
                    (copy * parallel.fsdp_shards + s) * parallel.tp + t
                    for copy in range(parallel.replicate)
                    for s in (shards if shard is None else [shard])
                    for t in (tps if tp is None else [tp])
                ]
                yield ranks, self._box(name, shape, tp or 0, shard or 0)

    def axis(self, name: str) -> int | None:
        """The axis along which tensor parallelism divides a param; None: every rank has it."""
        return self._axes[name]

    @cached_property
    def _axes(self) -> dict[str, int | None]:
        matrices = {matrix.tensor: matrix for matrix in weights_of(self.facts).matrices}
        axes: dict[str, int | None] = {}
        for piece in self.modules.pieces:
            matrix = matrices[piece.tensor]
            side = 0 if matrix.role in COLUMN_ROLES else 1 if matrix.role in ROW_ROLES else None
            axes[piece.param] = None if side is None else piece.axes.index(matrix.axes[side])
        return axes

    def adapted(self, name: str) -> tuple[str, str]:
        """Return the param that an adapter belongs to, and `lora_a` or `lora_b`. Adapters are called `<module>.lora_a`;
        a stack of experts has the attribute `<stack>_lora_a`."""
        base, which = name[: -len("_lora_a")], name[-len("lora_a") :]
        return base if base in self.modules.params else f"{base}.weight", which

    def adapter_axis(self, name: str) -> int | None:
        """Return the tensor-parallel axis of an adapter: B has the weight's rows, A its columns (the last axis)."""
        param, which = self.adapted(name)
        axis, columns = self.axis(param), len(self.modules.params[param].shape) - 1
        if which == "lora_b":
            return None if axis == columns else axis
        return (2 if self.is_expert(param) else 1) if axis == columns else None

    def adapter_box(self, name: str, shape: Shape, rank: int) -> Box:
        """The part of an adapter of that whole shape that a rank holds."""
        tp, shard = rank % self.parallel.tp, rank // self.parallel.tp % self.parallel.fsdp_shards
        return self._part(self.adapted(name)[0], shape, self.adapter_axis(name), tp, shard)

    def box(self, name: str, rank: int) -> Box:
        """The part of a param that a rank holds."""
        tp, shard = rank % self.parallel.tp, rank // self.parallel.tp % self.parallel.fsdp_shards
        return self._box(name, self.modules.params[name].shape, tp, shard)

    def is_expert(self, name: str) -> bool:
        """Whether a param holds something of every expert of a layer."""
        return self.roles.get(name) in EXPERT_ROLES

    def _sharded(self, name: str) -> bool:
        return self.roles[name] not in BUFFER_ROLES

    def _box(self, name: str, shape: Shape, tp: int, shard: int) -> Box:
        return self._part(name, shape, self.axis(name), tp, shard)

    def _part(self, name: str, shape: Shape, axis: int | None, tp: int, shard: int) -> Box:
        box = list(whole(shape))
        if axis is not None:
            box[axis] = _chunk(box[axis], self.parallel.tp, tp)
        ep = self.parallel.ep
        if self.is_expert(name) and ep > 1:
            box[0] = _chunk(_chunk(box[0], ep, shard % ep), self.parallel.fsdp_shards // ep, shard // ep)
        elif self._sharded(name):
            box[0] = _chunk(box[0], self.parallel.fsdp_shards, shard)
        return tuple(box)


def _counts(box: Box) -> Shape:
    return tuple(span.count for span in box)


def _chunk(span: Span, parts: int, index: int) -> Span:
    """The `index`-th part of torch.chunk: ceil-sized, the last parts shorter or empty."""
    size = -(-span.count // parts)
    first = min(index * size, span.count)
    return Span(span.start + first, min(size, span.count - first))
