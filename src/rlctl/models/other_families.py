"""A model without a family file: a list of tensors from transformers (`checkpoints/hf/published_tensors.py`). Each is
one matrix, with unknown tensor parallelism."""

from __future__ import annotations

from rlctl.models.facts import ModelFacts
from rlctl.models.matrices import MatrixInTensor, ModelWeights, Role, Weight

ROLES = {
    "model.norm.weight": Role.FINAL_NORM,
    "mlp.gate.weight": Role.ROUTER,
    "mixer.gate.weight": Role.ROUTER,  # Nemotron-H's
    "mlp.router.gate.weight": Role.ROUTER,  # AfMoE's
    "mlp.gate.wg.weight": Role.ROUTER,  # HunYuan-MoE's
    "block_sparse_moe.gate.weight": Role.ROUTER,  # Phi-MoE's and MiniMax'
    "block_sparse_moe.router.weight": Role.ROUTER,  # GraniteMoeSWA's
}
"""By name within a layer: the matrices that the planner needs and transformers does not reveal."""


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    once: list[Weight] = []
    layers: list[list[Weight]] = [[] for _ in range(facts.layers)]
    for tensor in facts.listed:
        role = Role(tensor.role) if tensor.role else ROLES.get(tensor.name.split("{layer}.")[-1], Role.OTHER)
        stored = None  # the box is the tensor
        if tensor.tensor_shape:
            axes = tuple(range(len(tensor.shape)))
            stored = MatrixInTensor(_dims(tensor.tensor_shape), axes, _dims(tensor.tensor_start))
        weight = Weight(role, tensor.name, _dims(tensor.shape), stored, dtype=tensor.dtype)
        for indices in (layers[layer] for layer in tensor.layers) if tensor.layers else (once,):
            indices.append(weight)
    return ModelWeights(facts, tuple(once), tuple(map(tuple, layers)))


def _dims(shape: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(map(str, shape))
