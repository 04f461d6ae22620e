"""Phi-3 and Phi-4: Llama's architecture with q, k and v in one tensor, gate and up in another, and a rotated share of
each head. Models with `longrope` count as models without a file."""

from __future__ import annotations

from typing import Any

from rlctl.models import parts
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts, rope_facts, rope_kind
from rlctl.models.matrices import ModelWeights

ARCHITECTURES = ("Phi3ForCausalLM",)
DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0}
"""Values of transformers' Phi3Config for keys that config.json leaves out."""
TINY = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}  # fmt: skip
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {"sliding_window": 16, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
"""Values that differ from the defaults, for tests."""


def covers(config: dict[str, Any]) -> bool:
    """Whether rotary frequencies are plain: `longrope` has others for long rows."""
    return rope_kind(config) == "default"


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `Phi3ForCausalLM` configuration."""
    window = config.get("sliding_window")
    windowed = {"sliding_window": window, "full_attention_layers": ()} if window else {}
    return base_facts("phi3", config, rope=rope_facts(config, partial=True), **windowed)


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    layer = (*parts.norms(), *parts.fused_attention(), *parts.fused_mlp())
    return ModelWeights(facts, parts.outer(facts), (layer,) * facts.layers)
