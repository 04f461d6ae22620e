"""MiniMax-M2: norms of queries and keys over all heads together, a rotated share of each head, a sigmoid router with
correction bias, experts called w1 (gate), w3 (up) and w2 (down)."""

from __future__ import annotations

from typing import Any

from rlctl.models import parts
from rlctl.models.facts import ModelFacts, MoeFacts
from rlctl.models.hf_config import base_facts, refuse, required, rope_facts
from rlctl.models.matrices import ModelWeights, Role, Weight

ARCHITECTURES = ("MiniMaxM2ForCausalLM",)
DEFAULTS = {
    "head_dim": 128, "max_position_embeddings": 196_608, "num_experts_per_tok": 8, "num_key_value_heads": 8,
    "num_local_experts": 256, "rms_norm_eps": 1e-6, "rope_theta": 5_000_000.0,
}  # fmt: skip
"""Values of transformers' MiniMaxM2Config for keys that config.json leaves out."""
TINY = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "num_local_experts": 8,
    "num_experts_per_tok": 2, "intermediate_size": 64, "rotary_dim": 16, "use_qk_norm": True,
    "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True,
}  # fmt: skip
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {
    "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Values that differ from the defaults, for tests."""
BLOCK = parts.LAYER + "block_sparse_moe."
PUBLISHED = {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True,
             "shared_intermediate_size": 0}  # fmt: skip
"""Keys that transformers does not read, because every published MiniMax-M2 has these values."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `MiniMaxM2ForCausalLM` configuration."""
    for key, value in PUBLISHED.items():
        given = config.get(key, value)
        refuse(given != value, f"{key}: {given}", f"transformers computes this model type with {value}.")
    if rotated := config.get("rotary_dim"):
        config = {"partial_rotary_factor": rotated / config["head_dim"]} | config
    moe = MoeFacts(
        experts=required(config, "num_local_experts", "num_experts"),
        experts_per_token=required(config, "num_experts_per_tok"),
        expert_intermediate=required(config, "intermediate_size"),
        score="sigmoid",
        expert_bias=True,
    )
    rope = rope_facts(config, partial=True)
    return base_facts("minimax_m2", config, rope=rope, qk_norm=True, wide_qk_norm=True, moe=moe)


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    bias = Weight(Role.EXPERT_BIAS, BLOCK + "e_score_correction_bias", ("experts",))
    experts = parts.experts(BLOCK + "experts.{expert}.", gate="w1", up="w3", down="w2")
    layer = (*parts.norms(), *parts.attention(facts), parts.router(BLOCK), bias, *experts)
    return ModelWeights(facts, parts.outer(facts), (layer,) * facts.layers)
