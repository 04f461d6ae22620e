"""GLM-4.5 to 4.7 and Air: DeepSeek-V3's experts and router, grouped-query attention with biases and optional norms of
queries and keys, half of each head rotated.

Multi-token-prediction layers are published as DeepSeek-V3's.
"""

from __future__ import annotations

from typing import Any

from rlctl.models import deepseek_v3, parts
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts, rope_facts
from rlctl.models.matrices import ModelWeights

ARCHITECTURES = ("Glm4MoeForCausalLM",)
DEFAULTS = {
    "attention_bias": False, "first_k_dense_replace": 1, "max_position_embeddings": 131_072, "n_group": 1,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "routed_scaling_factor": 1.0,
    "topk_group": 1, "use_qk_norm": False,
}  # fmt: skip
"""Values of transformers' Glm4MoeConfig for keys that config.json leaves out."""
TINY = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {
    "head_dim": 32, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "n_shared_experts": 2, "first_k_dense_replace": 2, "n_group": 2, "topk_group": 2,
    "norm_topk_prob": False, "routed_scaling_factor": 1.5, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6,
}  # fmt: skip
"""Values that differ from the defaults, for tests."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `Glm4MoeForCausalLM` configuration."""
    return base_facts(
        "glm4_moe",
        config,
        rope=rope_facts(config, partial=True),
        qkv_bias=bool(config["attention_bias"]),
        qk_norm=bool(config["use_qk_norm"]),
        moe=deepseek_v3.moe_facts(config),
        mtp_layers=config.get("num_nextn_predict_layers") or 0,
    )


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    return deepseek_v3.weights_with(facts, parts.attention(facts))


def tiny_like(facts: ModelFacts) -> dict[str, Any]:
    """Attention, routing and further layers of the tiny model are of the same kinds."""
    return deepseek_v3.routing_like(facts) | {"attention_bias": facts.qkv_bias, "use_qk_norm": facts.qk_norm}
