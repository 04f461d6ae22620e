"""Parameter counts of a model and of one rank, from facts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from statistics import fmean

from rlctl.config.parallel import ParallelSpec
from rlctl.models.facts import ListedTensor, ModelFacts
from rlctl.models.families import has_file, weights_of
from rlctl.models.matrices import Role, evaluate
from rlctl.models.matrices import sizes as sizes_of
from rlctl.models.vision import VISION_FAMILIES
from rlctl.planner.choice import TrainingChoice
from rlctl.weights.hidden_matrices import HIDDEN_ROLES, MATRIX, STACKED, cost

LAYER_NORMS = frozenset({Role.ATTENTION_NORM, Role.POST_ATTENTION_NORM, Role.MLP_NORM, Role.POST_MLP_NORM})
"""Norms of hidden states in a layer."""


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one transformer layer, split by how parallelism divides them."""

    split: int
    """Projections, dense MLP and shared experts, which tensor parallelism splits."""
    whole: int
    """Norms, router and latent down-projections of MLA, which every tensor rank holds whole."""
    experts: int
    """All routed experts together; expert parallelism splits them."""

    @property
    def dense(self) -> int:
        return self.split + self.whole

    @property
    def total(self) -> int:
        return self.dense + self.experts


def layer_parameters(facts: ModelFacts, moe: bool) -> LayerParameters:
    """Parameters of a layer with experts (`moe`) or with a dense MLP."""
    experts = facts.moe.experts * expert_parameters(facts) if facts.moe and moe else 0
    if facts.listed:  # the mean of the kind's layers: the tensors are known, their use is not
        totals = {layer: 0 for layer in range(facts.layers) if facts.is_moe_layer(layer) == moe}
        for tensor in facts.listed:
            for layer in totals.keys() & set(tensor.layers) if not _of_experts(tensor) else ():
                totals[layer] += prod(tensor.shape)
        return LayerParameters(round(fmean(totals.values())) if totals else 0, 0, experts)
    h, heads, gpt_oss = facts.hidden, facts.heads, facts.family == "gpt_oss"
    norms = len(weights_of(facts).roles & LAYER_NORMS) if has_file(facts.family) else 2
    normed = heads + facts.kv_heads if facts.wide_qk_norm else 2
    whole = norms * h + (normed * facts.head_dim if facts.qk_norm else 0)
    if facts.mla is not None:
        mla, rank = facts.mla, facts.mla.q_lora_rank
        split = (rank or h) * heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        split += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim) + heads * mla.v_head_dim * h
        whole += h * (rank or 0) + h * (mla.kv_lora_rank + mla.qk_rope_head_dim) + (rank or 0) + mla.kv_lora_rank
    else:
        query, kv = heads * facts.head_dim, facts.kv_heads * facts.head_dim
        split = 2 * h * query + 2 * h * kv + (query + 2 * kv if facts.qkv_bias else 0)
        whole += h + heads if gpt_oss else 0  # output bias and attention sinks
    if moe and facts.moe:
        split += 3 * h * facts.moe.shared_expert_intermediate
        whole += facts.moe.experts * (h + int(facts.moe.expert_bias or gpt_oss))
    else:
        split += 3 * h * facts.intermediate
    return LayerParameters(split, whole, experts)


def _of_experts(tensor: ListedTensor) -> bool:
    return "{expert}" in tensor.name or tensor.role == Role.EXPERT_STACK


def expert_parameters(facts: ModelFacts) -> int:
    if facts.moe is None:
        return 0
    if facts.listed:
        sizes = {t.role: prod(t.shape) for t in facts.listed if "{expert}" in t.name}  # not every family's have a gate
        sizes |= {t.name: prod(t.shape[1:]) for t in facts.listed if t.role == Role.EXPERT_STACK}
        return sum(sizes.values())
    width = facts.moe.expert_intermediate
    bias = 2 * width + facts.hidden if facts.family == "gpt_oss" else 0
    return 3 * facts.hidden * width + bias


@dataclass(frozen=True)
class ParameterCount:
    """Totals of a model; multi-token-prediction layers are counted apart."""

    embedding: int
    head: int
    """Output projection; 0 where it is tied to the embedding."""
    layers: int
    experts: int
    """Part of `layers` that is routed experts."""
    active: int
    """Parameters that one token passes through, the embedding lookup left out."""
    mtp: int
    seeing: int = 0
    """Tower and projector of a model that reads images."""
    outside: int = 0
    """Further tables outside the layers, such as Gemma 4's embeddings for each layer."""

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.layers + self.seeing + self.outside


@lru_cache(maxsize=1024)
def count(facts: ModelFacts) -> ParameterCount:
    """Parameters of `facts` as its published total counts them."""
    kinds = [facts.is_moe_layer(layer) for layer in range(facts.layers)]
    dense, moe = layer_parameters(facts, False), layer_parameters(facts, True) if any(kinds) else None
    layers = kinds.count(False) * dense.total + (kinds.count(True) * moe.total if moe else 0) + facts.hidden
    experts = kinds.count(True) * moe.experts if moe else 0
    embedding = facts.vocab * facts.hidden
    active_experts = kinds.count(True) * facts.moe.experts_per_token * expert_parameters(facts) if facts.moe else 0
    mtp_layer = (moe or dense).total + 2 * facts.hidden**2 + 3 * facts.hidden
    return ParameterCount(
        embedding=embedding,
        head=0 if facts.tied_embeddings else embedding,
        layers=layers,
        experts=experts,
        active=layers - experts + active_experts + embedding,
        mtp=facts.mtp_layers * mtp_layer,
        seeing=seeing_parameters(facts),
        outside=outside_parameters(facts),
    )


@lru_cache(maxsize=1024)
def seeing_parameters(facts: ModelFacts) -> int:
    """Parameters of tower and projector; 0 for text models."""
    if facts.vision is None:
        return 0
    family = VISION_FAMILIES[facts.vision.kind]
    seeing = (
        tensor for tensor in facts.listed if family.part_of(tensor.module or tensor.name) in ("vision", "projector")
    )
    return sum(prod(tensor.shape) for tensor in seeing)


@lru_cache(maxsize=1024)
def outside_parameters(facts: ModelFacts) -> int:
    """Parameters outside the layers of a text model beyond embedding, head and final norm."""
    counted = (Role.EMBEDDING, Role.HEAD)
    tensors = [tensor for tensor in facts.listed if not tensor.layers and tensor.role not in counted]
    sizes = sum(prod(tensor.shape) for tensor in tensors) if facts.vision is None else 0
    return max(0, sizes - facts.hidden)


def attended(facts: ModelFacts, length: float) -> float:
    """Mean over the layers of the keys that a token attends to where full attention has `length`."""
    if facts.sliding_window is None:
        return length
    full = facts.layers if facts.full_attention_layers is None else len(facts.full_attention_layers)
    windowed = min(length, facts.sliding_window)
    return (full * length + (facts.layers - full) * windowed) / facts.layers


def score_width(facts: ModelFacts) -> int:
    """Per token and key: multiply-adds of the score and value products over all heads of one layer."""
    if facts.mla is not None:
        return facts.heads * (facts.mla.qk_nope_head_dim + facts.mla.qk_rope_head_dim + facts.mla.v_head_dim)
    return 2 * facts.heads * facts.head_dim


def kv_bytes_per_token(facts: ModelFacts, element_bytes: float = 2) -> float:
    """KV cache of one token over all layers and heads, windowed layers counted whole, in bytes."""
    if facts.mla is not None:
        return facts.layers * (facts.mla.kv_lora_rank + facts.mla.qk_rope_head_dim) * element_bytes
    return 2 * facts.layers * facts.kv_heads * facts.head_dim * element_bytes


@dataclass(frozen=True)
class Stage:
    """One pipeline stage."""

    dense_layers: int
    moe_layers: int
    embedding: bool
    head: bool
    in_flight: int
    """Stages from here to the end: the micro-batches whose activations it holds at once in 1F1B."""

    @property
    def layers(self) -> int:
        return self.dense_layers + self.moe_layers


def stages(facts: ModelFacts, choice: TrainingChoice) -> tuple[Stage, ...]:
    """Return the stages of a policy, without multi-token-prediction layers, as even as possible."""
    parallel = choice.parallel
    all_stages = _stages(facts, parallel.pp, parallel.first_stage_layers, parallel.last_stage_layers)
    return (*all_stages[:-1], replace(all_stages[-1], head=False)) if choice.valued else all_stages


def distinct_stages(facts: ModelFacts, choice: TrainingChoice) -> tuple[Stage, ...]:
    """Return the first stage of each kind: later stages hold as much, and fewer micro-batches at once."""
    kinds: dict[tuple[int, int, bool, bool], Stage] = {}
    for stage in stages(facts, choice):
        kinds.setdefault((stage.dense_layers, stage.moe_layers, stage.embedding, stage.head), stage)
    return tuple(kinds.values())


@lru_cache(maxsize=4096)
def _stages(facts: ModelFacts, pp: int, first: int | None, last: int | None) -> tuple[Stage, ...]:
    sizes = ParallelSpec(pp=pp, first_stage_layers=first, last_stage_layers=last).stage_layers(facts.layers)
    sizes = sizes or [facts.layers // pp + (index < facts.layers % pp) for index in range(pp)]
    result, at = [], 0
    for index, size in enumerate(sizes):
        moe = sum(facts.is_moe_layer(layer) for layer in range(at, at + size))
        result.append(Stage(size - moe, moe, index == 0, index == pp - 1, pp - index))
        at += size
    return tuple(result)


@lru_cache(maxsize=1024)
def layer_sizes(facts: ModelFacts) -> tuple[LayerParameters, LayerParameters | None]:
    return layer_parameters(facts, False), layer_parameters(facts, True) if facts.moe else None


@dataclass(frozen=True)
class HiddenSizes:
    """The matrices of one layer, a mean over the layers of its kind."""

    dense: float = 0.0
    """Elements, without routed experts."""
    experts: float = 0.0
    """Elements of all routed experts."""
    cost: float = 0.0
    """Multiply-adds of a Newton-Schulz step over all matrices."""
    largest: float = 0.0
    """Multiply-adds of the costliest matrix."""
    most: float = 0.0
    """Elements of the largest matrix."""


@lru_cache(maxsize=1024)
def hidden_sizes(facts: ModelFacts, moe: bool) -> HiddenSizes:
    """Return the matrices of a layer with experts (`moe`) or with a dense MLP. Where only the facts of a family are
    known: as if dense ones were as wide as the hidden states."""
    if not facts.listed and not has_file(facts.family):
        layer, wide, narrow = layer_parameters(facts, moe), facts.hidden, expert_parameters(facts) // (3 * facts.hidden)
        by_element = 3.0 * wide * layer.dense + narrow * (2 + narrow / wide) * layer.experts
        return HiddenSizes(layer.dense, layer.experts, by_element, 3.0 * wide**3, wide**2)
    kind = [layer for layer in range(facts.layers) if facts.is_moe_layer(layer) == moe]
    dense, experts, costs, largest, most = 0, 0, 0, 0, 0
    weights, constants = weights_of(facts), sizes_of(facts)
    for weight in (weight for layer in kind for weight in weights.per_layer[layer]):
        shape = tuple(evaluate(dim, constants) for dim in weight.dims)
        stacked = len(shape) == STACKED and weight.role is Role.EXPERT_STACK
        if weight.role not in HIDDEN_ROLES or not (stacked or len(shape) == MATRIX):
            continue
        of_experts = stacked or weights.is_expert(weight)
        number = shape[0] if stacked else constants["experts"] if of_experts else 1
        matrix_cost = cost(shape[-2:])
        dense, experts = dense + (not of_experts) * prod(shape), experts + of_experts * number * prod(shape[-2:])
        costs, largest, most = costs + number * matrix_cost, max(largest, matrix_cost), max(most, prod(shape[-2:]))
    count = max(1, len(kind))
    return HiddenSizes(dense / count, experts / count, costs / count, largest, most)


@dataclass(frozen=True)
class RankParameters:
    """Parameters of one rank. Dense ones are replicated over DP x CP, experts over the expert-data-parallel group."""

    dense: float
    experts: float
    largest_layer: float
    """Parameters of its largest layer, unsharded over data parallelism."""
    tables: float
    """Parameters of embedding and head (tied, they count once), tower and projector among the dense ones."""
    hidden: tuple[float, float] = (0.0, 0.0)
    """Parameters in matrices of layers (`weights/hidden_matrices.py`), dense and of experts; with AdamW not counted."""

    @property
    def total(self) -> float:
        return self.dense + self.experts

    def owned(self, parallel: ParallelSpec) -> float:
        """Parameters whose optimizer states this rank owns, shared with ranks of equal parameters (FSDP2: one copy)."""
        return parallel.replicate * (self.dense / (parallel.dp * parallel.cp) + self.experts / parallel.expert_dp)

    def owned_hidden(self, parallel: ParallelSpec) -> float:
        """Return the parameters in matrices of layers among `owned`."""
        dense, experts = self.hidden
        return replace(self, dense=dense, experts=experts).owned(parallel)


@lru_cache(maxsize=65536)
def _rank_parameters(facts: ModelFacts, stage: Stage, tp: int, ep: int, etp: int, muon: bool) -> RankParameters:
    dense, experts, largest, hidden = 0.0, 0.0, 0.0, (0.0, 0.0)
    for moe, (sizes, layers) in enumerate(zip(layer_sizes(facts), (stage.dense_layers, stage.moe_layers), strict=True)):
        if sizes is not None and layers:
            per_layer = (sizes.split / tp + sizes.whole, sizes.experts / (ep * etp))
            dense, experts = dense + layers * per_layer[0], experts + layers * per_layer[1]
            matrices = hidden_sizes(facts, bool(moe)) if muon else HiddenSizes()
            in_dense = min(matrices.dense / sizes.dense, 1.0) * per_layer[0] if muon else 0.0
            hidden = (hidden[0] + layers * in_dense, hidden[1] + layers * matrices.experts / (ep * etp))
            largest = max(largest, sum(per_layer))
    shared = facts.tied_embeddings and stage.embedding and stage.head
    tables = facts.vocab * facts.hidden / tp * (stage.embedding + stage.head - shared)
    tables += (seeing_parameters(facts) + outside_parameters(facts)) * stage.embedding
    return RankParameters(dense + tables, experts, largest, tables, hidden)


def rank_parameters(facts: ModelFacts, stage: Stage, choice: TrainingChoice) -> RankParameters:
    """Parameters of a rank of `stage` under the tensor and expert parallelism of `choice`."""
    p = choice.parallel
    return _rank_parameters(facts, stage, p.tp, p.ep, p.etp, choice.muon_steps > 0)
