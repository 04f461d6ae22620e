"""Where vLLM's models keep each matrix: fused qkv and gate_up, KV heads repeated, experts stacked as w13 and w2.

Sources (vLLM 0.32): model_executor/layers/linear.py (QKVParallelLinear), vocab_parallel_embedding.py (padding to 64),
fused_moe/expert_map_manager.py (linear placement of experts) and fused_moe/config.py (experts under data-parallel
attention). Rank r of engine d is d x tp + r. Weights that a kernel has repacked are vLLM's own business: a refit goes
through its loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from rlctl.errors import ConfigError, InputError
from rlctl.models.facts import ModelFacts
from rlctl.models.matrices import FLOAT32_ROLES, Matrix, ModelWeights, Role
from rlctl.models.registry import weights_of
from rlctl.weights.layout import Fill, Layout, ParamSpec, Piece, Span, whole
from rlctl.weights.pieces import on_axis, piece, share
from rlctl.weights.plan import Shard

VOCAB_PADDING = 64
REFUSED = frozenset({"gpt_oss"})


@dataclass(frozen=True)
class VllmParallel:
    """Sizes of one set of engines that share experts. `dp` engines of `tp` ranks; `ep`: experts over all of them."""

    tp: int = 1
    dp: int = 1
    ep: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.dp


class _Kind(Enum):
    WHOLE = "whole"
    VOCAB = "vocab"
    ROWS = "rows"
    COLUMNS = "columns"
    QKV = "qkv"
    PAIR = "pair"  # gate and up, one behind the other
    JOINED = "joined"  # two replicated matrices, one behind the other
    EXPERT = "expert"


_FUSED: dict[Role, tuple[_Kind, str, int]] = {
    Role.EMBEDDING: (_Kind.VOCAB, "", 0),
    Role.HEAD: (_Kind.VOCAB, "", 0),
    Role.Q: (_Kind.QKV, "qkv_proj", 0),
    Role.K: (_Kind.QKV, "qkv_proj", 1),
    Role.V: (_Kind.QKV, "qkv_proj", 2),
    Role.Q_BIAS: (_Kind.QKV, "qkv_proj", 0),
    Role.K_BIAS: (_Kind.QKV, "qkv_proj", 1),
    Role.V_BIAS: (_Kind.QKV, "qkv_proj", 2),
    Role.O: (_Kind.COLUMNS, "", 0),
    Role.GATE: (_Kind.PAIR, "gate_up_proj", 0),
    Role.UP: (_Kind.PAIR, "gate_up_proj", 1),
    Role.DOWN: (_Kind.COLUMNS, "", 0),
    Role.SHARED_GATE: (_Kind.PAIR, "gate_up_proj", 0),
    Role.SHARED_UP: (_Kind.PAIR, "gate_up_proj", 1),
    Role.SHARED_DOWN: (_Kind.COLUMNS, "", 0),
    Role.MLA_Q: (_Kind.ROWS, "", 0),
    Role.MLA_Q_UP: (_Kind.ROWS, "", 0),
    Role.MLA_KV_UP: (_Kind.ROWS, "", 0),
    Role.MLA_Q_DOWN: (_Kind.JOINED, "fused_qkv_a_proj", 0),
    Role.MLA_KV_DOWN: (_Kind.JOINED, "fused_qkv_a_proj", 1),
    Role.EXPERT_GATE: (_Kind.EXPERT, "w13_weight", 0),
    Role.EXPERT_UP: (_Kind.EXPERT, "w13_weight", 1),
    Role.EXPERT_DOWN: (_Kind.EXPERT, "w2_weight", 0),
}
_PROJECTION = re.compile(r"\.(\w+)\.(weight|bias)$")
_EXPERT = re.compile(r"\.experts\.\d+\..*$")


@dataclass(frozen=True)
class VllmWorld:
    """All ranks of one set of vLLM engines."""

    facts: ModelFacts
    parallel: VllmParallel
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.facts.family in REFUSED:
            raise InputError(
                f"vLLM's own loader places the weights of {self.facts.family}.", "Refit it through the loader."
            )

    @property
    def size(self) -> int:
        return self.parallel.world_size

    @cached_property
    def weights(self) -> ModelWeights:
        return weights_of(self.facts)

    def layout(self, rank: int) -> Layout:
        """Everything that `rank` holds."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"Rank {rank} is outside of a world of {self.size}.")
        params: dict[str, ParamSpec] = {}
        pieces: list[Piece] = []
        fills: list[Fill] = []
        for matrix in self._held(rank):
            name, spec, own, padding = self._place(matrix, rank)
            params[name] = spec
            pieces.append(own) if own else None
            fills.extend(padding)
        return Layout(rank, params, tuple(pieces), tuple(fills))

    def shards(self, tensor: str, every: bool = False) -> Sequence[Shard]:
        """Who holds which part of `tensor`: engines hold the same, and so do ranks that share a KV head."""
        shards: list[Shard] = []
        for matrix in self.weights.by_tensor.get(tensor, ()):
            if matrix.layer is None or matrix.layer < self.facts.layers:
                for ranks in self._groups(matrix):
                    _, spec, own, _ = self._place(matrix, ranks[0])
                    if own:
                        shards.append(Shard(ranks, ((own, spec),)))
        return shards

    def local_experts(self, rank: int) -> range:
        """Experts (global numbers) of a rank: as even as possible, the first ranks one more."""
        if self.facts.moe is None:
            return range(0)
        if not self.parallel.ep:
            return range(self.facts.moe.experts)
        base, more = divmod(self.facts.moe.experts, self.size)
        start = rank * base + min(rank, more)
        return range(start, start + base + (rank < more))

    def _held(self, rank: int) -> Iterator[Matrix]:
        yield from self.weights.outer
        for layer in range(self.facts.layers):  # multi-token-prediction layers belong to a drafting model
            yield from self.weights.layer(layer, self.local_experts(rank))

    def _groups(self, matrix: Matrix) -> list[list[int]]:
        """Ranks of each distinct part."""
        kind, _, part = _FUSED.get(matrix.role, (_Kind.WHOLE, "", 0))
        tp, ranks = self.parallel.tp, range(self.size)
        if kind is _Kind.EXPERT:
            own = [r for r in ranks if matrix.expert in self.local_experts(r)]
            return [own] if self.parallel.ep else [[r] for r in own]
        if kind in (_Kind.WHOLE, _Kind.JOINED):
            return [list(ranks)]
        same = self._repeats() if kind is _Kind.QKV and part > 0 else 1
        return [[r for r in ranks if r % tp // same == group] for group in range(tp // same)]

    def _repeats(self) -> int:
        """Ranks that hold the same KV head."""
        return max(1, self.parallel.tp // self.facts.kv_heads)

    def _place(self, matrix: Matrix, rank: int) -> tuple[str, ParamSpec, Piece | None, list[Fill]]:
        kind, fused, part = _FUSED.get(matrix.role, (_Kind.WHOLE, "", 0))
        if kind is _Kind.JOINED and (self.facts.mla is None or self.facts.mla.q_lora_rank is None):
            kind = _Kind.WHOLE  # without a query rank there is nothing to join
        dtype = "float32" if matrix.role in FLOAT32_ROLES else self.dtype
        name = matrix.tensor if kind in (_Kind.WHOLE, _Kind.ROWS, _Kind.COLUMNS, _Kind.VOCAB) else ""
        tp, at = self.parallel.tp, rank % self.parallel.tp
        if kind is _Kind.EXPERT:
            return self._expert(matrix, fused, part, rank, dtype)
        if kind is _Kind.VOCAB:
            return _vocab(matrix, tp, at, dtype)
        if kind is _Kind.QKV:
            return self._qkv(matrix, part, at, dtype)
        if kind is _Kind.JOINED:
            return self._joined(matrix, fused, part, dtype)
        if kind is _Kind.WHOLE:
            own = piece(matrix, whole(matrix.shape), name, (0,) * len(matrix.shape), gain=matrix.offset)
            return name, ParamSpec(matrix.shape, dtype), own, []
        axis = 1 if kind is _Kind.COLUMNS else 0
        span = share(matrix.shape[axis], tp, at, f"Axis {axis} of {matrix.tensor}", "generation tp")
        name = name or _renamed(matrix.tensor, fused)
        shape, starts = list(matrix.shape), [0] * len(matrix.shape)
        shape[axis] = span.count * (2 if kind is _Kind.PAIR else 1)
        starts[axis] = span.count * part
        return name, ParamSpec(tuple(shape), dtype), piece(matrix, on_axis(matrix, axis, span), name, tuple(starts)), []

    def _qkv(self, matrix: Matrix, part: int, at: int, dtype: str) -> tuple[str, ParamSpec, Piece, list[Fill]]:
        facts, tp, name = self.facts, self.parallel.tp, _renamed(matrix.tensor, "qkv_proj")
        heads = share(facts.heads, tp, at, "Number of attention heads", "generation tp")
        if tp >= facts.kv_heads:
            share(tp, facts.kv_heads, 0, "generation tp", "number of KV heads")
            kv = Span(at // self._repeats(), 1)
        else:
            kv = share(facts.kv_heads, tp, at, "Number of KV heads", "generation tp")
        own = heads if part == 0 else kv
        lead = (0, heads.count, heads.count + kv.count)[part]
        dim = facts.head_dim
        box = on_axis(matrix, 0, Span(own.start * dim, own.count * dim))
        spec = ParamSpec(((heads.count + 2 * kv.count) * dim, *matrix.shape[1:]), dtype)
        return name, spec, piece(matrix, box, name, (lead * dim,) + (0,) * (len(matrix.shape) - 1)), []

    def _joined(self, matrix: Matrix, fused: str, part: int, dtype: str) -> tuple[str, ParamSpec, Piece, list[Fill]]:
        mla = self.facts.mla
        assert mla is not None
        assert mla.q_lora_rank is not None
        rows = mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim
        name = _renamed(matrix.tensor, fused)
        own = piece(matrix, whole(matrix.shape), name, (mla.q_lora_rank * part, 0))
        return name, ParamSpec((rows, matrix.shape[1]), dtype), own, []

    def _expert(
        self, matrix: Matrix, fused: str, part: int, rank: int, dtype: str
    ) -> tuple[str, ParamSpec, Piece, list[Fill]]:
        local, axis = self.local_experts(rank), 1 if fused == "w2_weight" else 0
        parts, at = (1, 0) if self.parallel.ep else (self.size, rank)  # without ep, tensor parallel over all engines
        span = share(matrix.shape[axis], parts, at, f"Axis {axis} of {matrix.tensor}", "generation tp x dp")
        shape = list(matrix.shape)
        shape[axis] = span.count * (2 if axis == 0 else 1)
        name = _EXPERT.sub(f".experts.routed_experts.{fused}", matrix.tensor)
        assert matrix.expert is not None
        starts = (matrix.expert - local.start, span.count * part, 0)
        own = piece(matrix, on_axis(matrix, axis, span), name, starts)
        return name, ParamSpec((len(local), *shape), dtype), own, []


def _vocab(matrix: Matrix, tp: int, at: int, dtype: str) -> tuple[str, ParamSpec, Piece | None, list[Fill]]:
    vocab, hidden = matrix.shape
    padded = -(-vocab // VOCAB_PADDING) * VOCAB_PADDING
    span = share(padded, tp, at, "Padded vocabulary", "generation tp")
    held = max(0, min(span.count, vocab - span.start))
    name = matrix.tensor
    own = piece(matrix, (Span(span.start, held), Span(0, hidden)), name, (0, 0)) if held else None
    fills = [Fill(name, (Span(held, span.count - held), Span(0, hidden)))] if held < span.count else []
    return name, ParamSpec((span.count, hidden), dtype), own, fills


def _renamed(tensor: str, fused: str) -> str:
    """`...self_attn.q_proj.weight` -> `...self_attn.qkv_proj.weight`."""
    return _PROJECTION.sub(rf".{fused}.\2", tensor)
