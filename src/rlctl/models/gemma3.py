"""Gemma 3, text: four norms a layer whose tensors hold the gain minus one, windowed layers, two rotary bases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlctl.models import parts
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts, full_layers, refuse, required, ropes_by_kind
from rlctl.models.matrices import ModelWeights, Role, Weight

ARCHITECTURES = ("Gemma3ForCausalLM",)
DEFAULTS = {
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
    "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10_000.0,
    "rope_theta": 1_000_000.0, "sliding_window": 4096, "sliding_window_pattern": 6, "tie_word_embeddings": True,
}  # fmt: skip
"""Values of transformers' Gemma3TextConfig for keys that config.json leaves out."""
TINY = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "tie_word_embeddings": True,
    "sliding_window": 64, "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention"], "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {"head_dim": 32, "sliding_window": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": False}
"""Values that differ from the defaults, for tests."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `Gemma3ForCausalLM` configuration (the text models; 4B and larger are published with images)."""
    refuse(bool(config.get("attention_bias")), "attention_bias: true", "no published Gemma 3 has biases.")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        refuse(config.get(key) is not None, key, "no published Gemma 3 caps logits.")
    mutual = bool(config.get("use_bidirectional_attention"))
    refuse(mutual, "use_bidirectional_attention: true", "rlctl trains causal models.")
    full, windowed = ropes_by_kind(config, "Gemma 3", config["rope_theta"], config["rope_local_base_freq"])
    return base_facts(
        "gemma3",
        config,
        rope=full,
        window_rope=windowed,
        attention_scale=float(config["query_pre_attn_scalar"]) ** -0.5,
        embedding_scale=required(config, "hidden_size") ** 0.5,
        qk_norm=True,
        activation="gelu_tanh",
        sliding_window=config.get("sliding_window"),
        full_attention_layers=full_layers(config),
    )


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it; all norms hold their gain minus one."""
    norms = (
        Weight(Role.ATTENTION_NORM, parts.LAYER + "input_layernorm.weight", ("hidden",)),
        Weight(Role.POST_ATTENTION_NORM, parts.LAYER + "post_attention_layernorm.weight", ("hidden",)),
        Weight(Role.MLP_NORM, parts.LAYER + "pre_feedforward_layernorm.weight", ("hidden",)),
        Weight(Role.POST_MLP_NORM, parts.LAYER + "post_feedforward_layernorm.weight", ("hidden",)),
    )
    layer = _shifted((*norms, *parts.attention(facts), *parts.dense_mlp()))
    return ModelWeights(facts, _shifted(parts.outer(facts)), (layer,) * facts.layers)


def _shifted(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    return tuple(replace(w, offset=1.0) if w.role.value.endswith("norm") else w for w in weights)
