"""Matrices of a model and their published tensors, independent of engines.

A family file lists `Weight`s: for each `Role` the tensor's name and, if it is not exactly that matrix (stacked,
transposed, interleaved), its storage. Engines know roles only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod

from rlctl.models.facts import ModelFacts


class Role(StrEnum):
    """The role of a matrix. Its logical shape is (out, in), as in `torch.nn.Linear`."""

    EMBEDDING = "embedding"
    HEAD = "head"
    FINAL_NORM = "final_norm"
    ATTENTION_NORM = "attention_norm"
    Q = "q"
    K = "k"
    V = "v"
    Q_BIAS = "q_bias"
    K_BIAS = "k_bias"
    V_BIAS = "v_bias"
    Q_NORM = "q_norm"
    K_NORM = "k_norm"
    O = "o"  # noqa: E741
    O_BIAS = "o_bias"
    SINKS = "sinks"
    POST_ATTENTION_NORM = "post_attention_norm"
    MLP_NORM = "mlp_norm"
    POST_MLP_NORM = "post_mlp_norm"
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    ROUTER = "router"
    ROUTER_BIAS = "router_bias"
    EXPERT_BIAS = "expert_bias"
    EXPERT_GATE = "expert_gate"
    EXPERT_UP = "expert_up"
    EXPERT_DOWN = "expert_down"
    EXPERT_GATE_BIAS = "expert_gate_bias"
    EXPERT_UP_BIAS = "expert_up_bias"
    EXPERT_DOWN_BIAS = "expert_down_bias"
    SHARED_GATE = "shared_gate"
    SHARED_UP = "shared_up"
    SHARED_DOWN = "shared_down"
    MLA_Q_DOWN = "mla_q_down"
    MLA_Q_NORM = "mla_q_norm"
    MLA_Q_UP = "mla_q_up"
    MLA_Q = "mla_q"
    MLA_KV_DOWN = "mla_kv_down"
    MLA_KV_NORM = "mla_kv_norm"
    MLA_KV_UP = "mla_kv_up"
    MTP_EMBEDDING_NORM = "mtp_embedding_norm"
    MTP_HIDDEN_NORM = "mtp_hidden_norm"
    MTP_PROJECTION = "mtp_projection"
    MTP_FINAL_NORM = "mtp_final_norm"
    EXPERT_STACK = "expert_stack"
    """A matrix of every expert, or the experts' gates and ups, in one published tensor, as in transformers' modules."""
    STORED = "stored"
    """Stored with the weights and never trained: a buffer of transformers' modules."""
    OTHER = "other"
    """Whether its family has no file, so that its tensors are unknown."""


FLOAT32_ROLES = frozenset({Role.EXPERT_BIAS})
"""Always float32, because it is compared, not multiplied."""
BUFFER_ROLES = frozenset({Role.EXPERT_BIAS, Role.STORED})
"""Held by buffers of transformers' modules, which no optimizer sees."""


@dataclass(frozen=True)
class MatrixInTensor:
    """How a matrix lies in a tensor: dims, tensor axis of each matrix axis, start and step. Other axes are indexed by
    the expert."""

    dims: tuple[str, ...]
    axes: tuple[int, ...]
    starts: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Weight:
    """One role of a family: tensor name with `{layer}` and `{expert}`, and symbolic dims of the matrix."""

    role: Role
    name: str
    dims: tuple[str, ...]
    stored: MatrixInTensor | None = None
    offset: float = 0.0
    """The tensor holds the gain minus this number (Gemma's norms: 1)."""
    dtype: str = ""
    """The tensor's dtype if not the model's."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a model. `tensor_starts`, `tensor_steps` and `axes` place it in `tensor` of `tensor_shape`; other
    axes have fixed indices."""

    role: Role
    layer: int | None
    expert: int | None
    shape: tuple[int, ...]
    tensor: str
    tensor_shape: tuple[int, ...]
    axes: tuple[int, ...]
    tensor_starts: tuple[int, ...]
    tensor_steps: tuple[int, ...]
    offset: float = 0.0
    dtype: str = ""


def sizes(facts: ModelFacts) -> dict[str, int]:
    """Numbers that symbolic dims may name."""
    constants = {
        "hidden": facts.hidden,
        "vocab": facts.vocab,
        "ffn": facts.intermediate,
        "heads": facts.heads,
        "head_dim": facts.head_dim,
        "q": facts.heads * facts.head_dim,
        "kv": facts.kv_heads * facts.head_dim,
        "o": facts.heads * (facts.mla.v_head_dim if facts.mla else facts.head_dim),
    }
    if facts.moe:
        constants |= {"experts": facts.moe.experts, "expert_ffn": facts.moe.expert_intermediate}
        constants |= {"shared_ffn": facts.moe.shared_expert_intermediate}
    if facts.mla:
        mla = facts.mla
        qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        constants |= {"q_rank": mla.q_lora_rank or 0, "kv_rank": mla.kv_lora_rank, "mla_q": facts.heads * qk}
        constants |= {"rope": mla.qk_rope_head_dim, "mla_kv": facts.heads * (mla.qk_nope_head_dim + mla.v_head_dim)}
    return constants


def evaluate(expression: str, constants: dict[str, int]) -> int:
    """Value of a symbolic dim: sums of products of names and numbers, such as `2*expert_ffn` or `kv_rank+rope`."""

    def product(term: str) -> int:
        return prod(int(factor) if factor.isdigit() else constants[factor] for factor in term.split("*"))

    return sum(product(term) for term in expression.split("+"))


@dataclass(frozen=True)
class ModelWeights:
    """All matrices of one model and the published tensors that hold them."""

    facts: ModelFacts
    once: tuple[Weight, ...]
    """Weights outside of the layers."""
    per_layer: tuple[tuple[Weight, ...], ...]
    """Weights of each layer; multi-token-prediction layers last."""
    copies: dict[str, str] = field(default_factory=dict)
    """Published tensors that repeat another one -> that one."""

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return sizes(self.facts)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        return (*self.outer, *(matrix for layer in range(len(self.per_layer)) for matrix in self.layer(layer)))

    @cached_property
    def roles(self) -> frozenset[Role]:
        return frozenset(weight.role for weights in (self.once, *self.per_layer) for weight in weights)

    @cached_property
    def zero_centered_norms(self) -> bool:
        """Whether tensors hold norm gains minus one."""
        return any(weight.offset for weight in self.once)

    @cached_property
    def outer(self) -> tuple[Matrix, ...]:
        return tuple(self._fill(weight, None, None) for weight in self.once)

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {matrix.tensor: matrix.tensor_shape for matrix in self.matrices}

    @cached_property
    def by_tensor(self) -> dict[str, tuple[Matrix, ...]]:
        index: dict[str, list[Matrix]] = {}
        for matrix in self.matrices:
            index.setdefault(matrix.tensor, []).append(matrix)
        return {name: tuple(matrices) for name, matrices in index.items()}

    def layer(self, layer: int, experts: range | None = None) -> Iterator[Matrix]:
        for weight in self.per_layer[layer]:
            if not self.is_expert(weight):
                yield self._fill(weight, layer, None)
                continue
            for expert in range(self._sizes["experts"]) if experts is None else experts:
                yield self._fill(weight, layer, expert)

    @staticmethod
    def is_expert(weight: Weight) -> bool:
        """Whether the weight exists once an expert."""
        return "{expert}" in weight.name or (weight.stored is not None and "experts" in weight.stored.dims)

    @property
    def parameters(self) -> int:
        return sum(map(prod, self.tensors.values()))

    def _fill(self, weight: Weight, layer: int | None, expert: int | None) -> Matrix:
        sizes, stored = self._sizes, weight.stored
        shape = tuple(evaluate(dim, sizes) for dim in weight.dims)
        tensor_shape, axes = shape, tuple(range(len(shape)))
        starts, steps = [0] * len(shape), [1] * len(shape)
        if stored is not None:
            tensor_shape, axes = tuple(evaluate(dim, sizes) for dim in stored.dims), stored.axes
            starts = [0 if axis in axes else expert or 0 for axis in range(len(tensor_shape))]
            steps = [1] * len(tensor_shape)
            for i, axis in enumerate(axes):
                starts[axis] = evaluate(stored.starts[i], sizes) if stored.starts else 0
                steps[axis] = stored.steps[i] if stored.steps else 1
        name = weight.name.format(layer=layer, expert=expert)
        place = (tensor_shape, axes, tuple(starts), tuple(steps), weight.offset, weight.dtype)
        return Matrix(weight.role, layer, expert, shape, name, *place)
