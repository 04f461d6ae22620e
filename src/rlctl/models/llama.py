"""Llama 2, 3, 3.1, 3.2, 3.3 and what shares their architecture (SmolLM2, TinyLlama, Yi): facts and weight map."""

from __future__ import annotations

from typing import Any

from rlctl.models import parts
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts
from rlctl.models.matrices import ModelWeights

ARCHITECTURES = ("LlamaForCausalLM",)
DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
"""Values of transformers' LlamaConfig for keys that config.json leaves out."""
TINY: dict[str, Any] = {}
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL: dict[str, Any] = {}
"""Values that differ from the defaults, for tests."""
UNMAPPED = ("attention_bias", "mlp_bias")
"""Keys of models that were saved as a Llama (Bielik, Qwen2.5)."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `LlamaForCausalLM` configuration (either spelling of its rope scaling)."""
    return base_facts("llama", config)


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    layer = (*parts.norms(), *parts.attention(facts), *parts.dense_mlp())
    return ModelWeights(facts, parts.outer(facts), (layer,) * facts.layers)
