"""What one rank of a parallel layout holds: layers of its pipeline stage and its share of their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import Adapters, TrainingChoice
from rlctl.planner.parameters import LayerParameters, layer_parameters


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


def stage_layers(layers: int, pp: int, first: int | None = None, last: int | None = None) -> list[int] | None:
    """Layers of each stage: even, or with shorter first and last stages where that does not come out; `first` and
    `last` set those two. None: not possible."""
    if first is not None or last is not None:
        return _with_ends(layers, pp, first, last)
    if layers % pp == 0:
        return [layers // pp] * pp
    middle = -(-layers // pp)
    ends = layers - (pp - 2) * middle
    if pp < 2 or ends < 2:
        return None
    return [-(-ends // 2), *([middle] * (pp - 2)), ends // 2]


def _with_ends(layers: int, pp: int, first: int | None, last: int | None) -> list[int] | None:
    """The other stages share evenly what the given ones leave."""
    given = ({0: first} if first is not None else {}) | ({pp - 1: last} if last is not None else {})
    left, others = layers - sum(given.values()), pp - len(given)
    if pp < 2 or left < others or (left if others == 0 else left % others):
        return None
    return [given.get(stage, left // max(1, others)) for stage in range(pp)]


def stages(facts: ModelFacts, choice: TrainingChoice) -> tuple[Stage, ...]:
    """All stages; layers that cannot be split evenly are spread as evenly as they go."""
    return _stages(facts, choice.pp, choice.first_stage_layers, choice.last_stage_layers)


@lru_cache(maxsize=4096)
def _stages(facts: ModelFacts, pp: int, first: int | None, last: int | None) -> tuple[Stage, ...]:
    sizes = stage_layers(facts.layers, pp, first, last) or _spread(facts.layers, pp)
    result, at = [], 0
    for index, size in enumerate(sizes):
        moe = sum(facts.is_moe_layer(layer) for layer in range(at, at + size))
        last_one = index == pp - 1
        extra = facts.mtp_layers if last_one else 0
        moe_extra = extra if facts.moe else 0
        result.append(Stage(size - moe + extra - moe_extra, moe + moe_extra, index == 0, last_one, pp - index))
        at += size
    return tuple(result)


def _spread(layers: int, pp: int) -> list[int]:
    return [layers // pp + (index < layers % pp) for index in range(pp)]


@lru_cache(maxsize=1024)
def layer_sizes(facts: ModelFacts) -> tuple[LayerParameters, LayerParameters | None]:
    """(layer with a dense MLP, layer with experts)."""
    return layer_parameters(facts, False), layer_parameters(facts, True) if facts.moe else None


@dataclass(frozen=True)
class RankParameters:
    """Parameters of one rank. Dense ones are replicated over DP x CP, experts over the expert-data-parallel group."""

    dense: float
    experts: float
    largest_layer: float
    """Parameters of its largest layer (or embedding), unsharded over data parallelism."""

    @property
    def total(self) -> float:
        return self.dense + self.experts


@lru_cache(maxsize=65536)
def _rank_parameters(facts: ModelFacts, stage: Stage, tp: int, ep: int, etp: int) -> RankParameters:
    def layer(sizes: LayerParameters) -> tuple[float, float]:
        split = (sizes.attention + sizes.dense_mlp) / tp
        return split + sizes.attention_replicated + sizes.router + sizes.norms, sizes.experts / (ep * etp)

    dense_sizes, moe_sizes = layer_sizes(facts)
    dense, experts = 0.0, 0.0
    largest = 0.0
    for sizes, count in ((dense_sizes, stage.dense_layers), (moe_sizes, stage.moe_layers)):
        if sizes is not None and count:
            one = layer(sizes)
            dense, experts = dense + count * one[0], experts + count * one[1]
            largest = max(largest, sum(one))
    table = facts.vocab * facts.hidden / tp
    dense += table * (stage.embedding + stage.head)
    if facts.tied_embeddings and stage.embedding and stage.head:
        dense -= table
    return RankParameters(dense, experts, max(largest, table if stage.embedding or stage.head else 0.0))


def rank_parameters(facts: ModelFacts, stage: Stage, choice: TrainingChoice) -> RankParameters:
    """Parameters of a rank of `stage` under the tensor and expert parallelism of `choice`."""
    return _rank_parameters(facts, stage, choice.tp, choice.ep, choice.etp)


def trained_parameters(facts: ModelFacts, stage: Stage, choice: TrainingChoice) -> RankParameters:
    """Those of `rank_parameters` that have gradients and optimizer states: all, or the adapters."""
    if choice.adapters is None:
        return rank_parameters(facts, stage, choice)
    return RankParameters(_adapter_parameters(facts, stage, choice.adapters, choice.tp), 0.0, 0.0)


@lru_cache(maxsize=65536)
def _adapter_parameters(facts: ModelFacts, stage: Stage, adapters: Adapters, tp: int) -> float:
    """Of one tensor-parallel rank: split outputs share A (whole inputs), split inputs share B (whole outputs)."""

    def pair(column: tuple[int, int], row: tuple[int, int]) -> float:
        return adapters.rank * (column[0] + column[1] / tp + row[0] / tp + row[1])

    attention = 0.0
    if adapters.attention and facts.mla is not None:
        mla, h = facts.mla, facts.hidden
        query = facts.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        keys = facts.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        attention = pair((mla.q_lora_rank or h, query), (facts.heads * mla.v_head_dim, h))
        attention += adapters.rank * (mla.kv_lora_rank + keys / tp)
    elif adapters.attention:
        width = facts.heads * facts.head_dim
        attention = pair((facts.hidden, width + 2 * facts.kv_heads * facts.head_dim), (width, facts.hidden))
    widths = [facts.intermediate, facts.moe.shared_expert_intermediate if facts.moe else 0]
    mlps = [pair((facts.hidden, 2 * w), (w, facts.hidden)) if adapters.mlp and w else 0.0 for w in widths]
    return stage.layers * attention + stage.dense_layers * mlps[0] + stage.moe_layers * mlps[1]
