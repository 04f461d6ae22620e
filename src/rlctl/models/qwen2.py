"""Qwen2 and Qwen2.5: Llama's architecture with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from rlctl.models import llama
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts, refuse

ARCHITECTURES = ("Qwen2ForCausalLM",)
DEFAULTS = {
    "max_position_embeddings": 32_768, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
}  # fmt: skip
"""Values of transformers' Qwen2Config for keys that config.json leaves out."""
TINY = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL: dict[str, Any] = {}
"""Values that differ from the defaults, for tests."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `Qwen2ForCausalLM` configuration."""
    refuse(
        bool(config.get("use_sliding_window")), "use_sliding_window: true", "rlctl trains Qwen2 with full attention."
    )
    return base_facts("qwen2", config, qkv_bias=True)


weights = llama.weights
