"""Qwen3, dense: Llama's architecture with a norm on each head's query and key."""

from __future__ import annotations

from typing import Any

from rlctl.models import parts
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts, refuse
from rlctl.models.matrices import ModelWeights

ARCHITECTURES = ("Qwen3ForCausalLM",)
DEFAULTS = {
    "head_dim": 128, "max_position_embeddings": 32_768, "num_key_value_heads": 32, "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}  # fmt: skip
"""Values of transformers' Qwen3Config for keys that config.json leaves out."""
TINY = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {"head_dim": 32}
"""Values that differ from the defaults, for tests."""
UNMAPPED = ("attention_bias",)
"""A key that no published Qwen3 sets."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `Qwen3ForCausalLM` configuration."""
    refuse(
        bool(config.get("use_sliding_window")), "use_sliding_window: true", "rlctl trains Qwen3 with full attention."
    )
    return base_facts("qwen3", config, qk_norm=True)


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    layer = (*parts.norms(), *parts.attention(facts), *parts.dense_mlp())
    return ModelWeights(facts, parts.outer(facts), (layer,) * facts.layers)
