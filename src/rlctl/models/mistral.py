"""Mistral 7B, Nemo, Small and Large: Llama's weights; the first 7B has a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from rlctl.models import parts
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts
from rlctl.models.matrices import ModelWeights

ARCHITECTURES = ("MistralForCausalLM",)


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `MistralForCausalLM` configuration."""
    window = config.get("sliding_window")
    windowed = {"sliding_window": window, "full_attention_layers": ()} if window else {}
    return base_facts("mistral", config, **windowed)


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    layer = (*parts.norms(), *parts.attention(facts), *parts.dense_mlp())
    return ModelWeights(facts, parts.outer(facts), (layer,) * facts.layers)
