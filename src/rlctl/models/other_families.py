"""A model whose family has no file here: a list of its tensors takes the place of a family file's names.

The list comes from transformers (`checkpoints/hf/model_facts.py`). Each tensor is one matrix, and how tensor
parallelism divides it is not known.
"""

from __future__ import annotations

from functools import cache

from rlctl.models.facts import ModelFacts
from rlctl.models.matrices import ModelWeights, Role, Weight

ROLES = {
    "model.norm.weight": Role.FINAL_NORM,
    "mlp.gate.weight": Role.ROUTER,
    "mlp.router.gate.weight": Role.ROUTER,  # AfMoE's
    "mlp.gate.wg.weight": Role.ROUTER,  # HunYuan-MoE's
    "block_sparse_moe.router.weight": Role.ROUTER,  # GraniteMoeSWA's
}
"""By name, in a layer without the layer's: the matrices that the planner has to know and transformers does not tell."""


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    once: list[Weight] = []
    layers: list[list[Weight]] = [[] for _ in range(facts.layers)]
    for tensor in facts.listed:
        role = Role(tensor.role) if tensor.role else ROLES.get(tensor.name.split("{layer}.")[-1], Role.OTHER)
        weight = Weight(role, tensor.name, tuple(map(str, tensor.shape)))
        for own in (layers[layer] for layer in tensor.layers) if tensor.layers else (once,):
            own.append(weight)
    return ModelWeights(facts, tuple(once), tuple(map(tuple, layers)))


@cache
def module_names(facts: ModelFacts) -> dict[str, str]:
    """Published tensor -> the parameter of transformers' modules that holds it, where that has another name."""
    experts = range(facts.moe.experts if facts.moe else 1)
    found: dict[str, str] = {}
    for tensor in facts.listed:
        for layer in (tensor.layers or (0,)) if tensor.module else ():
            own = tensor.module.format(layer=layer)
            found |= {tensor.name.format(layer=layer, expert=expert): own for expert in experts}
    return found
