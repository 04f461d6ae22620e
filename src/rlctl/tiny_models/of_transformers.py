"""A tiny random model of a class of transformers, for families without a file in rlctl.

Rehearsals, the table of models (`docs/models.py`) and tests run on them. Sizes are those that vLLM's CPU kernels take.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from rlctl.models.facts import ModelFacts
from rlctl.models.transformers_classes import built_as, type_of
from rlctl.tiny_models.text import VOCAB_SIZE, write_tokenizer

WINDOW = 8
LAYERS, EXPERTS = 2, 4
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "num_layers": LAYERS, "n_layers": LAYERS, "n_layer": LAYERS, "n_heads": 4, "n_head": 4, "d_model": 128,
    "n_embd": 128, "n_inner": 256, "n_positions": 1024, "n_ctx": 1024, "ffn_dim": 256, "sliding_window": WINDOW,
    "kv_channels": 32, "partial_rotary_factor": 0.5, "num_experts": EXPERTS, "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "state_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "kv_lora_rank": 512, "q_lora_rank": 64,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
"""Sizes under the names that configurations have for them, where their defaults are not None."""
ALWAYS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
          "tie_word_embeddings": False, "initializer_range": 0.1}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "head_dim": 64}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16}
LLAMA_4 = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 256,
    "interleave_moe_layer_step": 2,
}
NEMOTRON = {
    "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 1, "chunk_size": 16,
    "moe_shared_expert_intermediate_size": 64, "num_hidden_layers": 3, "layer_types": None,
    "layer_norm_epsilon": 1e-5, "rms_norm_eps": 1e-5,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "youtu"), LATENT | {"partial_rotary_factor": None}),
    **dict.fromkeys(("deepseek_v3", "mistral4"), LATENT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), LATENT | {"index_topk": 4}),
    "apertus": {"hidden_act": "xielu"},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True, "tie_word_embeddings": True},
    "cohere2": {"logit_scale": 0.5, "tie_word_embeddings": True},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 6, 4]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, "max_seq_len": 1024,
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "deepseek_v2": LATENT | {
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    },
    "dots1": {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
              "topk_group": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_shared_experts": 1, "use_bias": False},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 256},
    "gemma2": {"query_pre_attn_scalar": 24, "tie_word_embeddings": True, "final_logit_softcapping": 2.0},
    "gemma3_text": {"query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "laurel_rank": 8,
        "hidden_size_per_layer_input": 16, "intermediate_size": [256] * 4,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "tie_word_embeddings": True, "num_hidden_layers": 4,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 64, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16, "tie_word_embeddings": True,
        "final_logit_softcapping": 2.0, "num_hidden_layers": 4,
    },
    "gemma4_text:experts": {
        "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 64, "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True, "enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2,
        "moe_intermediate_size": 64, "num_kv_shared_layers": 0, "final_logit_softcapping": 2.0,
    },
    "glm4": {"attention_bias": True},
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": LATENT | {"partial_rotary_factor": None, "first_k_dense_replace": 1},
    "gpt_oss": {
        "rms_norm_eps": 1e-5,  # vLLM has no other
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 128, "truncate": False,
        },
    },
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1, "logits_scaling": 2.0,
    },
    "granitemoehybrid": MAMBA | {
        "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64, "mamba_n_groups": 1,
    },
    "granitemoehybrid:dense": {
        "layer_types": ["attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 64, "position_embedding_type": "rope",
    },
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True, "qk_norm": True},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32, "num_experts": EXPERTS, "moe_topk": 2, "moe_intermediate_size": 64},
    "jamba": {
        "num_experts": EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "kimi_linear": LATENT | {"linear_head_dim": 32, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {
        "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 256, "attention_chunk_size": 1024,
        "interleave_moe_layer_step": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 1, "chunk_size": 16},
    "ministral": {"head_dim": 32},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "swa_head_dim": 32, "swa_v_head_dim": 32, "v_head_dim": 32,
        "layernorm_epsilon": 1e-6, "sliding_window_size": WINDOW,
    },
    "minicpm3": LATENT | {"scale_emb": 12},
    "ministral3": {
        "sliding_window": None, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 32},
    "nemotron_h": NEMOTRON | {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "nemotron_h:steps": NEMOTRON | {"layers_block_type": ["linear_attention", "full_attention", "mlp"],
                                    "time_step_min": 1e-9},
    "nemotron_h:experts": NEMOTRON | {"layers_block_type": ["linear_attention", "full_attention", "moe"]},
    "olmoe": {"rms_norm_eps": 1e-5},  # vLLM has no other for queries and keys
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2},
    "phi": {"hidden_act": "gelu_new"},
    "phimoe": {"sliding_window": None},
    "phi3": {"sliding_window": None, "partial_rotary_factor": 1.0},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 16,
    },
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "smollm3": {"no_rope_layer_interval": 2},
    "solar_open": {"head_dim": 32, "partial_rotary_factor": None},
    "starcoder2": {"use_bias": True},
    "zaya": {"router_hidden_size": 32, "num_experts_per_tok": 1, "rope_parameters": None},
}  # fmt: skip
"""Keys beyond the sizes, by model type (`type:variant` for other kinds of layers); None leaves a key out."""


def variant_of(facts: ModelFacts) -> str:
    """Return the name of the tiny model that stands for a family without a file; empty: transformers has none."""
    name = type_of(facts.family)
    variant = f"{name}:{'experts' if facts.moe else 'dense'}"
    return variant if variant in MORE else name


def tiny_class_config(name: str, vocab: int = VOCAB_SIZE, **keys: Any) -> Any:
    """Return transformers' configuration of a tiny model with layers of each kind that the type has by default. `name`
    is a model type or one of its variants (`MORE`), `keys` are further ones."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name.partition(":")[0]]
    defaults = kind().to_dict()
    defaults |= {other: defaults.get(name) for other, name in getattr(kind, "attribute_map", {}).items()}
    values = {key: value for key, value in SIZES.items() if defaults.get(key)}
    if "rope_type" not in (defaults.get("rope_parameters") or {"rope_type": ""}):
        values.pop("rope_parameters", None)  # it has one for each kind of layer
    kinds = list(dict.fromkeys(defaults.get("layer_types") or ()))
    if kinds and not isinstance(getattr(kind, "layer_types", None), property):
        values["layer_types"] = (kinds * LAYERS)[: max(LAYERS, len(kinds))]
        values["num_hidden_layers"] = len(values["layer_types"])
    values |= {key: value for key, value in ALWAYS.items() if key in defaults or key != "initializer_range"}
    values |= {key: vocab for key in ("vocab_size", "vocab_size_per_layer_input") if key in defaults}
    values |= MORE.get(name, {}) | {key: value for key, value in keys.items() if key in defaults}
    return kind(**{key: copy.deepcopy(value) for key, value in values.items() if value is not None})  # it may change it


def tiny_class_model(name: str, seed: int = 0, **sizes: Any) -> Any:
    """Return a random float32 model whose norms and biases matter; `sizes` as of `tiny_class_config`."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = tiny_class_config(name, **sizes)
    config._attn_implementation = "eager"  # the default leaves out caps of scores
    model = getattr(transformers, built_as(name.partition(":")[0]))(config).float().eval()
    with torch.no_grad():
        stored = model.state_dict().keys()
        for path, value in (*model.named_parameters(), *model.named_buffers()):
            named = any(word in path for word in ("norm", "bias", "sinks", "layer_scalar", "output_scale"))
            if named and path in stored and value.is_floating_point():
                value.add_(torch.randn_like(value) * 0.2)
    return model


def write_tiny_class(directory: Path, name: str, **sizes: Any) -> None:
    """Write a tiny random model as transformers publishes it, and a tokenizer of 512 tokens."""
    tiny_class_model(name, **sizes).save_pretrained(directory)
    write_tokenizer(directory)
