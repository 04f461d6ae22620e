"""Mixtral 8x7B and 8x22B: Mistral's attention, eight experts a layer called w1 (gate), w3 (up) and w2 (down)."""

from __future__ import annotations

from typing import Any

from rlctl.models import parts
from rlctl.models.facts import ModelFacts, MoeFacts
from rlctl.models.hf_config import base_facts, required
from rlctl.models.matrices import ModelWeights

ARCHITECTURES = ("MixtralForCausalLM",)
DEFAULTS = {
    "max_position_embeddings": 131_072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
}  # fmt: skip
"""Values of transformers' MixtralConfig for keys that config.json leaves out."""
TINY = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": None,
}  # fmt: skip
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16, "rms_norm_eps": 1e-4,
}  # fmt: skip
"""Values that differ from the defaults, for tests."""
BLOCK = parts.LAYER + "block_sparse_moe."


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `MixtralForCausalLM` configuration."""
    moe = MoeFacts(
        experts=required(config, "num_local_experts", "num_experts"),
        experts_per_token=required(config, "num_experts_per_tok"),
        expert_intermediate=required(config, "intermediate_size"),
    )
    window = config.get("sliding_window")
    windowed = {"sliding_window": window, "full_attention_layers": ()} if window else {}
    return base_facts("mixtral", config, moe=moe, **windowed)


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    experts = parts.experts(BLOCK + "experts.{expert}.", gate="w1", up="w3", down="w2")
    layer = (*parts.norms(), *parts.attention(facts), parts.router(BLOCK), *experts)
    return ModelWeights(facts, parts.outer(facts), (layer,) * facts.layers)
