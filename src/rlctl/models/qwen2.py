"""Qwen2 and Qwen2.5: Llama's architecture with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from rlctl.models import parts
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts, refuse
from rlctl.models.matrices import ModelWeights

ARCHITECTURES = ("Qwen2ForCausalLM",)


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `Qwen2ForCausalLM` configuration."""
    refuse(
        bool(config.get("use_sliding_window")), "use_sliding_window: true", "rlctl trains Qwen2 with full attention."
    )
    return base_facts("qwen2", config, qkv_bias=True)


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    layer = (*parts.norms(), *parts.attention(facts), *parts.dense_mlp())
    return ModelWeights(facts, parts.outer(facts), (layer,) * facts.layers)
