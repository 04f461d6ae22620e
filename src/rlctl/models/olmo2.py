"""OLMo 2: norms after attention and MLP and none before, and of queries and keys over all heads together."""

from __future__ import annotations

from typing import Any

from rlctl.models import parts
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts
from rlctl.models.matrices import ModelWeights, Role, Weight

ARCHITECTURES = ("Olmo2ForCausalLM",)
DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0}
"""Values of transformers' Olmo2Config for keys that config.json leaves out."""
TINY = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {"rms_norm_eps": 1e-4}
"""Values that differ from the defaults, for tests."""
UNMAPPED = ("attention_bias",)
"""A key that no published OLMo 2 sets."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of an `Olmo2ForCausalLM` configuration."""
    return base_facts("olmo2", config, qk_norm=True, wide_qk_norm=True)


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    norms = (
        Weight(Role.POST_ATTENTION_NORM, parts.LAYER + "post_attention_layernorm.weight", ("hidden",)),
        Weight(Role.POST_MLP_NORM, parts.LAYER + "post_feedforward_layernorm.weight", ("hidden",)),
    )
    layer = (*norms, *parts.attention(facts), *parts.dense_mlp())
    return ModelWeights(facts, parts.outer(facts), (layer,) * facts.layers)
