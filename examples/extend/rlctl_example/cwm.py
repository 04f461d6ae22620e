"""A model family: Code World Model, which is Llama with a sliding window in three of four layers."""

from __future__ import annotations

from typing import Any

from rlctl.models import llama
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts, required

ARCHITECTURES = ("CwmForCausalLM",)
DEFAULTS = {
    "head_dim": 128, "max_position_embeddings": 131_072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0, "sliding_window": 8192,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
"""Values of transformers' CwmConfig for keys that config.json leaves out."""
TINY = {
    "architectures": ["CwmForCausalLM"], "model_type": "cwm", "sliding_window": 64,
    "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {"head_dim": 32, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
"""Values that differ from the defaults, for tests."""
UNMAPPED = ("mlp_bias",)
"""A key that the published model does not set."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `CwmForCausalLM` configuration."""
    layers, types = range(required(config, "num_hidden_layers")), config.get("layer_types")
    full = [types[layer] == "full_attention" if types else layer % 4 == 0 for layer in layers]
    return base_facts(
        "cwm",
        config,
        sliding_window=config.get("sliding_window"),
        full_attention_layers=tuple(layer for layer in layers if full[layer]),
    )


weights = llama.weights
