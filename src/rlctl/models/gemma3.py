"""Gemma 3, text: four norms a layer whose tensors hold the gain minus one, windowed layers, two rotary bases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlctl.models import parts
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts, refuse, rope_of
from rlctl.models.matrices import ModelWeights, Role, Weight

ARCHITECTURES = ("Gemma3ForCausalLM",)


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `Gemma3ForCausalLM` configuration (the text models; 4B and larger are published with images)."""
    refuse(bool(config.get("attention_bias")), "attention_bias: true", "no published Gemma 3 has biases.")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        refuse(config.get(key) is not None, key, "no published Gemma 3 caps logits.")
    parameters = config.get("rope_parameters") or {}
    full = parameters.get("full_attention") or config.get("rope_scaling") or {}
    return base_facts(
        "gemma3",
        config,
        rope=rope_of(full, config.get("rope_theta") or 1_000_000.0),
        window_rope=rope_of(parameters.get("sliding_attention") or {}, config.get("rope_local_base_freq")),
        attention_scale=float(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        scaled_embeddings=True,
        qk_norm=True,
        activation="gelu_tanh",
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        sliding_window=config.get("sliding_window"),
        full_attention_layers=full_layers(config),
    )


def full_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Layers without the window, from `layer_types` or the pattern that older configurations give."""
    types = config.get("layer_types")
    if types:
        return tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    return tuple(i for i in range(config["num_hidden_layers"]) if (i + 1) % every == 0)


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
