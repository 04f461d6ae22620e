"""GLM-4-0414 and GLM-Z1: norms around attention and MLP, neighbors rotated as pairs in half of each head, gate and up
in one tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlctl.models import parts
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts, rope_facts
from rlctl.models.matrices import ModelWeights, Role, Weight

ARCHITECTURES = ("Glm4ForCausalLM",)
DEFAULTS = {
    "attention_bias": True, "head_dim": 128, "max_position_embeddings": 131_072, "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "rope_theta": 10_000.0,
}  # fmt: skip
"""Values of transformers' Glm4Config for keys that config.json leaves out."""
TINY = {
    "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {"attention_bias": False, "head_dim": 32, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-5}
"""Values that differ from the defaults, for tests."""
NORMS = {
    Role.ATTENTION_NORM: "input_layernorm", Role.POST_ATTENTION_NORM: "post_self_attn_layernorm",
    Role.MLP_NORM: "post_attention_layernorm", Role.POST_MLP_NORM: "post_mlp_layernorm",
}  # fmt: skip


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `Glm4ForCausalLM` configuration."""
    rope = replace(rope_facts(config, partial=True), interleaved=True)
    return base_facts("glm4", config, rope=rope, qkv_bias=bool(config["attention_bias"]))


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    norms = (Weight(role, f"{parts.LAYER}{name}.weight", ("hidden",)) for role, name in NORMS.items())
    layer = (*norms, *parts.attention(facts), *parts.fused_mlp())
    return ModelWeights(facts, parts.outer(facts), (layer,) * facts.layers)


def tiny_like(facts: ModelFacts) -> dict[str, Any]:
    """The tiny model has biases if the model has."""
    return {"attention_bias": facts.qkv_bias}
