"""A model whose family has no file here: a list of its tensors takes the place of a family file's names.

The list comes from transformers (`checkpoints/hf/transformers_model.py`). Each tensor is one matrix, and how tensor
parallelism divides it is not known.
"""

from __future__ import annotations

from rlctl.models.facts import ModelFacts
from rlctl.models.matrices import ModelWeights, Role, Weight

ROLES = {
    "model.embed_tokens.weight": Role.EMBEDDING,
    "model.norm.weight": Role.FINAL_NORM,
    "lm_head.weight": Role.HEAD,
    "mlp.gate.weight": Role.ROUTER,
    "mlp.router.gate.weight": Role.ROUTER,  # AfMoE's
    "mlp.gate.wg.weight": Role.ROUTER,  # HunYuan-MoE's
    "block_sparse_moe.router.weight": Role.ROUTER,  # GraniteMoeSWA's
    "mlp.experts.{expert}.gate_proj.weight": Role.EXPERT_GATE,
    "mlp.experts.{expert}.up_proj.weight": Role.EXPERT_UP,
    "mlp.experts.{expert}.down_proj.weight": Role.EXPERT_DOWN,
}
"""By name, in a layer without the layer's: the matrices that experts and the planner have to know."""


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    once: list[Weight] = []
    layers: list[list[Weight]] = [[] for _ in range(facts.layers)]
    for tensor in facts.listed:
        role = ROLES.get(tensor.name.split("{layer}.")[-1], Role.OTHER)
        weight = Weight(role, tensor.name, tuple(map(str, tensor.shape)))
        for own in (layers[layer] for layer in tensor.layers) if tensor.layers else (once,):
            own.append(weight)
    return ModelWeights(facts, tuple(once), tuple(map(tuple, layers)))
