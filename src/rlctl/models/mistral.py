"""Mistral 7B, Nemo, Small and Large: Llama's weights; the first 7B has a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from rlctl.models import llama
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts

ARCHITECTURES = ("MistralForCausalLM",)
DEFAULTS = {
    "max_position_embeddings": 131_072, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
    "sliding_window": 4096,
}  # fmt: skip
"""Values of transformers' MistralConfig for keys that config.json leaves out."""
TINY = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {"head_dim": 32, "sliding_window": 16}
"""Values that differ from the defaults, for tests."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `MistralForCausalLM` configuration."""
    window = config.get("sliding_window")
    windowed = {"sliding_window": window, "full_attention_layers": ()} if window else {}
    return base_facts("mistral", config, **windowed)


weights = llama.weights
