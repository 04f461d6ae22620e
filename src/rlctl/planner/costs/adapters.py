"""Adapters (`training.lora`): the sites of a model as a choice, and their parameters on one rank."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import prod

from rlctl.models.facts import ModelFacts
from rlctl.models.families import has_file, weights_of
from rlctl.models.matrices import Role
from rlctl.planner.choice import AdaptedKind, LoraChoice, Split, TrainingChoice
from rlctl.planner.costs.parameters import RankParameters, Stage, rank_parameters, stages
from rlctl.settings.training import LoraConfig
from rlctl.weights.adapter_sites import Site, saved_whole, sites
from rlctl.weights.dtensor import COLUMN_ROLES, ROW_ROLES


def lora_choice(facts: ModelFacts, lora: LoraConfig) -> LoraChoice:
    """Return the adapters that settings name. Raises ConfigError like `sites`."""
    has_tensors = facts.listed or has_file(facts.family)
    if not has_tensors:
        return LoraChoice(lora.rank, _usual_kinds(facts, lora))
    matrices = weights_of(facts).by_tensor
    roles = {matrices[tensor][0].role for tensor in saved_whole(facts, lora).values()}
    return LoraChoice(lora.rank, _kinds(facts, lora), (Role.EMBEDDING in roles, Role.HEAD in roles))


def _kinds(facts: ModelFacts, lora: LoraConfig) -> tuple[AdaptedKind, ...]:
    counts = Counter[tuple[AdaptedKind, bool]]()
    for site in sites(facts, lora).all:
        *lead, outputs, inputs = site.place.shape
        stacked = site.place.is_expert
        outputs, number = (outputs * prod(lead[1:]), lead[0]) if stacked else (outputs, 1)
        kind = AdaptedKind("experts" if stacked else _split(site), inputs, outputs, site.rank)
        counts[kind, facts.is_moe_layer(site.place.layer)] += number
    return tuple(
        AdaptedKind(kind.split, kind.inputs, kind.outputs, kind.rank, counts[kind, False], counts[kind, True])
        for kind in dict.fromkeys(kind for kind, _ in counts)
    )


def _split(site: Site) -> Split:
    role = site.place.role
    return "outputs" if role in COLUMN_ROLES else "inputs" if role in ROW_ROLES else "none"


def _usual_kinds(facts: ModelFacts, lora: LoraConfig) -> tuple[AdaptedKind, ...]:
    """Attention and MLP, where only the facts of a family are known."""
    h, queries, keys = facts.hidden, facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    shared = facts.moe.shared_expert_intermediate if facts.moe else 0
    moe = sum(map(facts.is_moe_layer, range(facts.layers)))
    dense = facts.layers - moe
    kinds = [AdaptedKind("outputs", h, outputs, lora.rank, dense, moe) for outputs in (queries, keys, keys)]
    kinds.append(AdaptedKind("inputs", queries, h, lora.rank, dense, moe))
    for width, layers in ((facts.intermediate, (dense, 0)), (shared, (0, moe))):
        if width:
            kinds += [AdaptedKind("outputs", h, width, lora.rank, *layers)] * 2
            kinds.append(AdaptedKind("inputs", width, h, lora.rank, *layers))
    return tuple(kinds)


def trained_parameters(facts: ModelFacts, stage: Stage, choice: TrainingChoice) -> RankParameters:
    """`rank_parameters` with gradients and optimizer states: all, or adapters."""
    if choice.adapters is None:
        return rank_parameters(facts, stage, choice)
    parallel = choice.parallel
    dense, experts, _ = _adapter_parameters(facts, stage, choice.adapters, parallel.tp)
    embedding, head = choice.adapters.tables
    tables = facts.vocab * facts.hidden / parallel.tp * (stage.embedding * embedding + stage.head * head)
    return RankParameters(dense + tables, experts / (parallel.ep * parallel.etp), 0.0, tables)


def adapted_parameters(facts: ModelFacts, stage: Stage, choice: TrainingChoice) -> RankParameters:
    adapters = choice.adapters
    adapted = _adapter_parameters(facts, stage, adapters, choice.parallel.tp)[2] if adapters else 0.0
    return RankParameters(adapted, 0.0, 0.0, 0.0)


def adapted_matrices(facts: ModelFacts, adapters: LoraChoice, tp: int) -> float:
    """Return the adapted weights of the whole model on one of `tp` ranks."""
    [stage] = stages(facts, TrainingChoice())
    return _adapter_parameters(facts, stage, adapters, tp)[2]


def adapter_elements(facts: ModelFacts, adapters: LoraChoice) -> float:
    """Return the elements of all adapters, each once."""
    [stage] = stages(facts, TrainingChoice())
    return sum(_adapter_parameters(facts, stage, adapters, 1)[:2])


@lru_cache(maxsize=65536)
def _adapter_parameters(facts: ModelFacts, stage: Stage, adapters: LoraChoice, tp: int) -> tuple[float, float, float]:
    """(adapters of a tensor-parallel rank, of all routed experts, adapted weights of the rank). Column-split matrices
    have a whole A, row-split ones a whole B. Layers of a stage count as the mean of their kind."""
    moe_layers = sum(map(facts.is_moe_layer, range(facts.layers)))
    of_dense = stage.dense_layers / max(1, facts.layers - moe_layers)
    of_moe = stage.moe_layers / max(1, moe_layers)
    dense, experts, weights = 0.0, 0.0, 0.0
    for kind in adapters.kinds:
        number = kind.dense * of_dense + kind.moe * of_moe
        a = kind.inputs / (tp if kind.split == "inputs" else 1)
        b = kind.outputs / (tp if kind.split == "outputs" else 1)
        if kind.split == "experts":
            experts += number * kind.rank * (a + b)
        else:
            dense += number * kind.rank * (a + b)
        weights += number * a * b
    return dense, experts, weights
