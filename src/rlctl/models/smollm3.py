"""SmolLM3: Llama's weights, without rotary embedding in every fourth layer."""

from __future__ import annotations

from typing import Any

from rlctl.models import llama
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts, required

ARCHITECTURES = ("SmolLM3ForCausalLM",)
DEFAULTS = {
    "max_position_embeddings": 32_768, "no_rope_layer_interval": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "rope_theta": 2_000_000.0, "tie_word_embeddings": True,
}  # fmt: skip
"""Values of transformers' SmolLM3Config for keys that config.json leaves out."""
TINY = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layer_interval": 2}
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {"no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False}
"""Values that differ from the defaults, for tests."""
UNMAPPED = ("attention_bias", "mlp_bias", "use_sliding_window")
"""Keys that no published SmolLM3 sets."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `SmolLM3ForCausalLM` configuration."""
    layers, every = required(config, "num_hidden_layers"), config["no_rope_layer_interval"]
    rotary = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(layers)]  # 0: none
    return base_facts("smollm3", config, no_rope_layers=tuple(layer for layer in range(layers) if not rotary[layer]))


weights = llama.weights
