"""A tiny random model of each type of causal language model that transformers has, where nothing else here has one."""

from __future__ import annotations

import copy
from typing import Any

from support.family_models import BASE, WINDOW, randomised

SMALL: dict[str, Any] = {
    "num_layers": 4, "n_layers": 4, "n_layer": 4, "n_heads": 4, "n_head": 4, "d_model": 64, "n_embd": 64,
    "n_inner": 128, "n_positions": 512, "n_ctx": 512, "ffn_dim": 128, "sliding_window": WINDOW, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "kv_channels": 16, "partial_rotary_factor": 0.5, "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "state_size": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
"""Sizes under the names that configurations have for them, where their defaults are not None."""
LATENT = {"num_key_value_heads": 4, "head_dim": None}
PLAIN = [
    "afmoe", "arcee", "aria_text", "biogpt", "cohere2", "cohere2_moe", "ctrl", "cwm", "diffllama", "doge",
    "ernie4_5", "exaone_moe", "flex_olmo", "gemma", "glm", "gpt-sw3", "gpt_neox_japanese", "granite_swa",
    "granitemoeshared", "helium", "hy_v3", "hy_v4", "hyperclovax", "inkling_text", "jais2", "laguna", "mellum",
    "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "ministral", "modernbert-decoder", "nanochat", "olmo",
    "openai-gpt", "vaultgemma", "xglm",
]  # fmt: skip
TRAINED: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN},
    **dict.fromkeys(("axk1", "axk2", "glm_moe_dsa", "youtu"), LATENT),
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, "max_seq_len": 512,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 16,
    },
    "solar_open": {"head_dim": 16, "partial_rotary_factor": None},
    "glm4_moe_lite": LATENT | {"partial_rotary_factor": None},
    "falcon_mamba": {"layer_types": None},
}  # fmt: skip
"""By model type, what is added to the sizes; None leaves a key to transformers."""


def causal_model(model_type: str, vocab: int) -> Any:
    """A random float32 model with a vocabulary of that size."""
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = transformers.CONFIG_MAPPING[model_type]
    default = kind()
    known = {*default.to_dict(), *getattr(kind, "attribute_map", {})}
    sizes = BASE | {key: value for key, value in SMALL.items() if key == "pad_token_id" or getattr(default, key, None)}
    values = {key: value for key, value in (sizes | {"vocab_size": vocab}).items() if key in known}
    values |= {key: BASE[key] for key in ("attn_implementation", "tie_word_embeddings", "initializer_range")}
    if "rope_type" not in (getattr(default, "rope_parameters", None) or {"rope_type": ""}):
        values.pop("rope_parameters", None)  # it has one for each kind of layer
    if kinds := list(dict.fromkeys(getattr(default, "layer_types", None) or ())):
        values["layer_types"] = (kinds * 4)[: values["num_hidden_layers"]]
    values |= TRAINED[model_type]
    torch.manual_seed(1)
    made = kind(**{key: copy.deepcopy(value) for key, value in values.items() if value is not None})  # it may change it
    return randomised(getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])(made))
