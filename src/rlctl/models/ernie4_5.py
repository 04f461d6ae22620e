"""Dense ERNIE 4.5: Llama's weights, with pairs of neighbors rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlctl.models import llama
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts, rope_facts

ARCHITECTURES = ("Ernie4_5ForCausalLM",)
DEFAULTS = {
    "head_dim": 128, "max_position_embeddings": 131_072, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0, "tie_word_embeddings": True,
}  # fmt: skip
"""Values of transformers' Ernie4_5Config for keys that config.json leaves out."""
TINY = {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "use_bias": False}
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {"head_dim": 32, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
"""Values that differ from the defaults, for tests."""
UNMAPPED = ("use_bias",)
"""A key that no published ERNIE 4.5 sets."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of an `Ernie4_5ForCausalLM` configuration."""
    return base_facts("ernie4_5", config, rope=replace(rope_facts(config), interleaved=True))


weights = llama.weights
