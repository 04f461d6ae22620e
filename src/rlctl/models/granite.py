"""Granite 3 and dense Granite of later generations: Llama's weights, with factors on embeddings, attention scores,
residual branches and logits."""

from __future__ import annotations

from typing import Any

from rlctl.models import llama
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts

ARCHITECTURES = ("GraniteForCausalLM",)
DEFAULTS = {
    "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "max_position_embeddings": 2048,
    "residual_multiplier": 1.0, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
}  # fmt: skip
"""Values of transformers' GraniteConfig for keys that config.json leaves out."""
TINY = {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_multiplier": 0.125,
    "embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.22,
}  # fmt: skip
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {
    "attention_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.25,
}  # fmt: skip
"""Values that differ from the defaults, for tests."""
UNMAPPED = ("attention_bias", "mlp_bias")
"""Keys that no published Granite sets."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `GraniteForCausalLM` configuration."""
    return base_facts(
        "granite",
        config,
        attention_scale=float(config["attention_multiplier"]),
        embedding_scale=float(config["embedding_multiplier"]),
        residual_scale=float(config["residual_multiplier"]),
        logits_scale=float(config["logits_scaling"]),
    )


weights = llama.weights


def tiny_like(facts: ModelFacts) -> dict[str, Any]:
    """Factors of the tiny model are the model's; the factor of attention scores depends on the head's size."""
    return {
        "attention_multiplier": facts.attention_scale,
        "embedding_multiplier": facts.embedding_scale,
        "logits_scaling": facts.logits_scale,
        "residual_multiplier": facts.residual_scale,
    }
