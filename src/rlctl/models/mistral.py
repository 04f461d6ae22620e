"""Mistral 7B, Nemo, Small and Large: Llama's weights; the first 7B has a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from rlctl.models import llama
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts

ARCHITECTURES = ("MistralForCausalLM",)


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `MistralForCausalLM` configuration."""
    window = config.get("sliding_window")
    windowed = {"sliding_window": window, "full_attention_layers": ()} if window else {}
    return base_facts("mistral", config, **windowed)


weights = llama.weights
