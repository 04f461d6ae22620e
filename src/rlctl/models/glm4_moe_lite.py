"""GLM-4.7-Flash: DeepSeek-V3 with a list of layers that have experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlctl.models import deepseek_v3
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import required

ARCHITECTURES = ("Glm4MoeLiteForCausalLM",)
DEFAULTS = {
    "max_position_embeddings": 202_752, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 4, "q_lora_rank": 768, "rms_norm_eps": 1e-5, "rope_interleave": True,
    "rope_theta": 10_000.0, "routed_scaling_factor": 1.8, "topk_group": 1,
}  # fmt: skip
"""Values of transformers' Glm4MoeLiteConfig for keys that config.json leaves out."""
TINY = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "num_key_value_heads": 4,
    "kv_lora_rank": 512, "q_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.8, "num_nextn_predict_layers": 0,
    "rope_interleave": True,
}  # fmt: skip
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {
    "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 2, "moe_intermediate_size": 48, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
    "routed_scaling_factor": 1.5, "norm_topk_prob": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
"""Values that differ from the defaults, for tests."""
UNMAPPED = ("attention_bias",)
"""A key that the published model does not set."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `Glm4MoeLiteForCausalLM` configuration."""
    read = deepseek_v3.facts(config | {"first_k_dense_replace": 1})
    types = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (required(config, "num_hidden_layers") - 1)
    assert read.moe is not None
    dense = tuple(layer for layer, kind in enumerate(types) if kind == "dense")
    return replace(read, family="glm4_moe_lite", moe=replace(read.moe, dense_layers=dense))


weights = deepseek_v3.weights
tiny_like = deepseek_v3.tiny_like
