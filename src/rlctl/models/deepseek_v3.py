"""DeepSeek-V3, R1 and Moonlight: latent attention, sigmoid router with correction bias, shared experts, dense first
layers.

Multi-token-prediction layers follow the last layer. Published files repeat embedding and head for each; rlctl reads the
model's and writes the copies on export.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlctl.models import parts
from rlctl.models.facts import MlaFacts, ModelFacts, MoeFacts
from rlctl.models.hf_config import base_facts, refuse, required, rope_facts
from rlctl.models.matrices import ModelWeights, Role, Weight

ARCHITECTURES = ("DeepseekV3ForCausalLM",)
DEFAULTS = {
    "first_k_dense_replace": 3, "max_position_embeddings": 4096, "n_group": 8, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "rms_norm_eps": 1e-6,
    "rope_interleave": True, "rope_theta": 10_000.0, "routed_scaling_factor": 2.5, "topk_group": 4,
}  # fmt: skip
"""Values of transformers' DeepseekV3Config for keys that config.json leaves out."""
TINY = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
    "kv_lora_rank": 512, "q_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
    "moe_layer_freq": 1, "rope_interleave": True,
}  # fmt: skip
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {
    "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "norm_topk_prob": False,
}  # fmt: skip
"""Values that differ from the defaults, for tests."""
ATTENTION = parts.LAYER + "self_attn."


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `DeepseekV3ForCausalLM` configuration. `head_dim` belongs to queries and keys."""
    refuse(bool(config.get("attention_bias")), "attention_bias: true", "no published DeepSeek-V3 has biases.")
    refuse(config.get("moe_layer_freq", 1) != 1, "a moe_layer_freq other than 1", "rlctl knows DeepSeek's own pattern.")
    refuse(not config["rope_interleave"], "rope_interleave: false", "Megatron-Core and vLLM rotate pairs of neighbors.")
    score = config.get("scoring_func", "sigmoid")
    refuse(score != "sigmoid", f"scoring_func: {score}", "transformers computes this model type with sigmoid.")
    method = config.get("topk_method", "noaux_tc")
    refuse(method != "noaux_tc", f"topk_method: {method}", "transformers chooses experts by noaux_tc.")
    mla = MlaFacts(
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=required(config, "kv_lora_rank"),
        qk_nope_head_dim=required(config, "qk_nope_head_dim"),
        qk_rope_head_dim=required(config, "qk_rope_head_dim"),
        v_head_dim=required(config, "v_head_dim"),
    )
    rope = rope_facts(config)
    refuse(
        rope.kind not in ("default", "yarn"), f"rope type {rope.kind}", "vLLM computes a DeepSeek-V3 with yarn alone."
    )
    return base_facts(
        "deepseek_v3",
        config,
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        kv_heads=required(config, "num_attention_heads"),
        rope=replace(rope, interleaved=True),
        mla=mla,
        moe=moe_facts(config),
        mtp_layers=config.get("num_nextn_predict_layers") or 0,
    )


def moe_facts(config: dict[str, Any]) -> MoeFacts:
    """Experts of a configuration with DeepSeek-V3's keys for them."""
    width = required(config, "moe_intermediate_size")
    return MoeFacts(
        experts=required(config, "n_routed_experts", "num_local_experts"),
        experts_per_token=required(config, "num_experts_per_tok"),
        expert_intermediate=width,
        shared_expert_intermediate=width * (config.get("n_shared_experts") or 0),
        dense_layers=tuple(range(config["first_k_dense_replace"])),
        score="sigmoid",
        normalize_topk=bool(config["norm_topk_prob"]),
        expert_bias=True,
        groups=config.get("n_group") or 1,
        topk_groups=config.get("topk_group") or 1,
        scaling=float(config["routed_scaling_factor"]),
    )


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    return weights_with(facts, latent_attention(facts))


def weights_with(facts: ModelFacts, attention: tuple[Weight, ...]) -> ModelWeights:
    """Every matrix of a model with DeepSeek-V3's experts, and the tensor that holds it."""
    attention = (*parts.norms(), *attention)
    bias = Weight(Role.EXPERT_BIAS, parts.LAYER + "mlp.gate.e_score_correction_bias", ("experts",))
    shared = parts.shared_experts() if facts.moe and facts.moe.shared_expert_intermediate else ()
    sparse = (*attention, parts.router(), bias, *parts.experts(), *shared)
    dense = (*attention, *parts.dense_mlp())
    layers = [sparse if facts.is_moe_layer(i) else dense for i in range(facts.layers)]
    layers += [(*multi_token_prediction(), *sparse)] * facts.mtp_layers
    copies = {}
    for layer in range(facts.layers, facts.layers + facts.mtp_layers):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"model.layers.{layer}.shared_head.head.weight"] = "lm_head.weight"
    return ModelWeights(facts, parts.outer(facts), tuple(layers), copies)


def latent_attention(facts: ModelFacts) -> tuple[Weight, ...]:
    """Down- and up-projections of queries (Moonlight: one projection) and of keys with values."""
    query = (
        Weight(Role.MLA_Q_DOWN, ATTENTION + "q_a_proj.weight", ("q_rank", "hidden")),
        Weight(Role.MLA_Q_NORM, ATTENTION + "q_a_layernorm.weight", ("q_rank",)),
        Weight(Role.MLA_Q_UP, ATTENTION + "q_b_proj.weight", ("mla_q", "q_rank")),
    )
    if facts.mla is None or facts.mla.q_lora_rank is None:
        query = (Weight(Role.MLA_Q, ATTENTION + "q_proj.weight", ("mla_q", "hidden")),)  # type: ignore[assignment]
    return (
        *query,
        Weight(Role.MLA_KV_DOWN, ATTENTION + "kv_a_proj_with_mqa.weight", ("kv_rank+rope", "hidden")),
        Weight(Role.MLA_KV_NORM, ATTENTION + "kv_a_layernorm.weight", ("kv_rank",)),
        Weight(Role.MLA_KV_UP, ATTENTION + "kv_b_proj.weight", ("mla_kv", "kv_rank")),
        Weight(Role.O, ATTENTION + "o_proj.weight", ("hidden", "o")),
    )


def multi_token_prediction() -> tuple[Weight, ...]:
    """Weights that a multi-token-prediction layer has in addition to another's (DeepSeek-V3 report, section 2.2)."""
    return (
        Weight(Role.MTP_EMBEDDING_NORM, parts.LAYER + "enorm.weight", ("hidden",)),
        Weight(Role.MTP_HIDDEN_NORM, parts.LAYER + "hnorm.weight", ("hidden",)),
        Weight(Role.MTP_PROJECTION, parts.LAYER + "eh_proj.weight", ("hidden", "2*hidden")),
        Weight(Role.MTP_FINAL_NORM, parts.LAYER + "shared_head.norm.weight", ("hidden",)),
    )


def tiny_like(facts: ModelFacts) -> dict[str, Any]:
    """Attention, routing and further layers of the tiny model are of the same kinds."""
    latent = 64 if facts.mla is not None and facts.mla.q_lora_rank else None
    return routing_like(facts) | {"q_lora_rank": latent, "rope_interleave": facts.rope.interleaved}


def routing_like(facts: ModelFacts) -> dict[str, Any]:
    """Routing and further layers of the tiny model are of the same kinds."""
    moe = facts.moe
    assert moe is not None
    return {
        "n_group": min(2, moe.groups),
        "topk_group": 1,
        "n_shared_experts": 1 if moe.shared_expert_intermediate else 0,
        "first_k_dense_replace": 1 if moe.dense_layers else 0,
        "norm_topk_prob": moe.normalize_topk,
        "routed_scaling_factor": moe.scaling,
        "num_nextn_predict_layers": min(1, facts.mtp_layers),
    }
