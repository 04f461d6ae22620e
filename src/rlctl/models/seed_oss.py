"""Seed-OSS: Llama's architecture with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from rlctl.models import llama
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts

ARCHITECTURES = ("SeedOssForCausalLM",)
DEFAULTS = {
    "attention_bias": True, "head_dim": 128, "max_position_embeddings": 524_288, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
}  # fmt: skip
"""Values of transformers' SeedOssConfig for keys that config.json leaves out."""
TINY = {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_bias": True}
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {"attention_bias": False, "head_dim": 32}
"""Values that differ from the defaults, for tests."""
UNMAPPED = ("attention_out_bias", "mlp_bias")
"""Keys that no published Seed-OSS sets."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `SeedOssForCausalLM` configuration."""
    return base_facts("seed_oss", config, qkv_bias=bool(config["attention_bias"]))


weights = llama.weights
