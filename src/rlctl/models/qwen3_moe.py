"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3's attention, a softmax router and experts without a shared one."""

from __future__ import annotations

from typing import Any

from rlctl.models import parts
from rlctl.models.facts import ModelFacts, MoeFacts
from rlctl.models.hf_config import base_facts, refuse, required
from rlctl.models.matrices import ModelWeights

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
DEFAULTS = {
    "decoder_sparse_step": 1, "max_position_embeddings": 32_768, "norm_topk_prob": False, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
}  # fmt: skip
"""Values of transformers' Qwen3MoeConfig for keys that config.json leaves out."""
TINY = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "num_hidden_layers": 2,
}  # fmt: skip
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {
    "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
    "decoder_sparse_step": 2,
}  # fmt: skip
"""Values that differ from the defaults, for tests."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `Qwen3MoeForCausalLM` configuration; layers without experts follow from step and list."""
    refuse(
        bool(config.get("use_sliding_window")), "use_sliding_window: true", "rlctl trains Qwen3 with full attention."
    )
    refuse(bool(config.get("attention_bias")), "attention_bias: true", "no published Qwen3 has biases.")
    step, listed = config["decoder_sparse_step"], set(config.get("mlp_only_layers") or ())
    layers = range(required(config, "num_hidden_layers"))
    moe = MoeFacts(
        experts=required(config, "num_experts", "num_local_experts"),
        experts_per_token=required(config, "num_experts_per_tok"),
        expert_intermediate=required(config, "moe_intermediate_size"),
        dense_layers=tuple(i for i in layers if i in listed or (i + 1) % step),
        normalize_topk=bool(config["norm_topk_prob"]),
    )
    return base_facts("qwen3_moe", config, qk_norm=True, moe=moe)


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    attention = (*parts.norms(), *parts.attention(facts))
    sparse = (*attention, parts.router(), *parts.experts())
    dense = (*attention, *parts.dense_mlp())
    layers = tuple(sparse if facts.is_moe_layer(i) else dense for i in range(facts.layers))
    return ModelWeights(facts, parts.outer(facts), layers)


def tiny_like(facts: ModelFacts) -> dict[str, Any]:
    """Routing and dense layers of the tiny model are of the same kinds."""
    moe = facts.moe
    assert moe is not None
    return {"norm_topk_prob": moe.normalize_topk, "mlp_only_layers": [0] if moe.dense_layers else []}
