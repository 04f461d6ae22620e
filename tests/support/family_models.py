"""Tiny random models of transformers, of every family."""

from __future__ import annotations

import copy
from typing import Any

import torch

VOCAB, WINDOW = 251, 5
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
BASE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attn_implementation": "eager", "initializer_range": 0.1,
    "rope_parameters": PLAIN,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
WINDOWED = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    "qwen2": ("Qwen2", {"head_dim": None}),
    "qwen2-yarn": ("Qwen2", {"head_dim": None, "rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-moe": ("Qwen3Moe", MOE | {"head_dim": 32, "mlp_only_layers": [], "decoder_sparse_step": 1}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-windowed": ("Mistral", {"sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "deepseek-v3": (
        "DeepseekV3",
        LATENT
        | {"q_lora_rank": 32, "head_dim": None}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "moonlight": ("DeepseekV3", LATENT | {"q_lora_rank": None, "head_dim": None}),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": WINDOW, "layer_types": WINDOWED, "rope_parameters": GEMMA_ROPE,
            "query_pre_attn_scalar": 24, "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "layer_types": WINDOWED,
            "intermediate_size": 64, "rope_parameters": YARN | {"truncate": False}, "swiglu_limit": 1.0,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, **IDS}),
    "seed-oss": ("SeedOss", {**IDS}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1, "logits_scaling": 2.0},
    ),
    "phi3": (
        "Phi3",
        {"sliding_window": WINDOW, **IDS, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    ),
    "glm4": ("Glm4", {"attention_bias": True, **IDS}),
    "glm4-moe": (
        "Glm4Moe",
        MOE | {
            "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 4, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, **IDS,
        },
    ),
    "olmo2": ("Olmo2", {"initializer_range": 0.2, **IDS}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": WINDOW, "layer_types": WINDOWED, "initializer_range": 0.2, **IDS,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
        },
    ),
    "olmoe": ("Olmoe", MOE | {"intermediate_size": 64, **IDS}),
    "minimax-m2": (
        "MiniMaxM2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "rotary_dim": 8, **IDS},
    ),
    "ernie4-5": ("Ernie4_5", {**IDS}),
    "glm4-flash": ("Glm4MoeLite", LATENT | {"q_lora_rank": 32, "head_dim": None, **IDS}),
}  # fmt: skip
ALIKE = frozenset({"seed-oss", "ernie4-5", "olmo2", "olmoe", "smollm3", "glm4", "glm4-flash"})
"""Families whose attention, experts and tensors are of kinds that others have, too."""

EIGHT = LATENT | {"q_lora_rank": None, "head_dim": None, "n_routed_experts": 8, "routed_scaling_factor": 1.25}
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "raw-scores": ("DeepseekV3", EIGHT | {"norm_topk_prob": False}),
    "one-expert": ("DeepseekV3", EIGHT | {"num_experts_per_tok": 1}),
    "one-raw": ("DeepseekV3", EIGHT | {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "three-of-two-groups": ("DeepseekV3", EIGHT | {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}),
    "two-of-three-groups": ("DeepseekV3", EIGHT | {"n_group": 4, "topk_group": 3, "norm_topk_prob": False}),
    "all-groups": ("DeepseekV3", EIGHT | {"n_group": 4, "topk_group": 4}),
    "one-softmax": ("Qwen3Moe", MOE | {"num_experts_per_tok": 1}),
    "one-raw-softmax": ("Qwen3Moe", MOE | {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "one-of-mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": None}),
}
"""Models whose routers Megatron-Core alone does not compute, or only under some of its options."""

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": WINDOW, "query_pre_attn_scalar": 24, "tie_word_embeddings": True,
            "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0,
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.5, "use_qk_norm": True, "tie_word_embeddings": True, "pad_token_id": 0}),
    "qwen2-moe": (
        "Qwen2Moe",
        MOE | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW, "use_bias": True}),
    "granite-moe-swa": (
        "GraniteMoeSWA",
        {
            "sliding_window": WINDOW, "layer_types": WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2,
            "pad_token_id": 0,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["attention"] * 4, "num_local_experts": 0, "num_experts_per_tok": 0,
            "shared_intermediate_size": 64, "position_embedding_type": "rope", "pad_token_id": 0,
        },
    ),
    "minicpm3": (
        "MiniCPM3",
        {
            "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "v_head_dim": 16, "scale_emb": 12, "pad_token_id": 0,
        },
    ),
    "phi": ("Phi", {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5}),
    "gpt2": ("GPT2", {"tie_word_embeddings": True}),
    "gpt-bigcode": ("GPTBigCode", {"multi_query": True}),
    "gpt-neox": ("GPTNeoX", {}),
    "opt": ("OPT", {"word_embed_proj_dim": 32, "ffn_dim": 128, "tie_word_embeddings": True}),
    "granite-moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "dots1": ("Dots1", {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
                        "topk_group": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1}),
    "ministral3": ("Ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}, "sliding_window": None}),
    "exaone4": ("Exaone4", {"sliding_window": WINDOW, "layer_types": WINDOWED}),
    "hunyuan": ("HunYuanDenseV1", {"pad_token_id": 0}),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 64, "pad_token_id": 0}),
    "ernie-moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1, "use_bias": True},
    ),
    "bitnet": ("BitNet", {"pad_token_id": 0}),
    "persimmon": ("Persimmon", {"pad_token_id": 0}),
    "gemma3n": (
        "Gemma3n",
        {
            "layer_types": WINDOWED, "num_kv_shared_layers": 2, "sliding_window": WINDOW, "laurel_rank": 8,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB + 1, "intermediate_size": [128] * 4,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "tie_word_embeddings": True, "pad_token_id": 0,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "apertus": ("Apertus", {"hidden_act": "xielu", "pad_token_id": 0}),
    "gemma4": (
        "Gemma4",
        {
            "sliding_window": WINDOW, "layer_types": WINDOWED, "global_head_dim": 32, "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB + 1, "hidden_size_per_layer_input": 16, "tie_word_embeddings": True,
            "final_logit_softcapping": 2.0, "rope_parameters": None,
        },
    ),
    "gemma4-moe": (
        "Gemma4",
        {
            "sliding_window": WINDOW, "layer_types": WINDOWED[:2], "num_hidden_layers": 2,
            "global_head_dim": 32, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True,
            "rope_parameters": None, "enable_moe_block": True, "num_experts": 4,
            "top_k_experts": 2, "moe_intermediate_size": 48, "num_kv_shared_layers": 0, "final_logit_softcapping": 2.0,
        },
    ),
}  # fmt: skip
"""Families without a file in `models/`, for which rollouts are packed."""
SEPARATE: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("StableLm", {"use_qkv_bias": True, "qk_layernorm": True}),
    "phimoe-windowed": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "phi3-longrope": (
        "Phi3",
        {
            "pad_token_id": 0, "max_position_embeddings": 256, "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5] * 4,
                "long_factor": [2.0] * 8, "original_max_position_embeddings": 64, "factor": 4.0,
            },
        },
    ),
    "falcon": (
        "Falcon",
        {"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": True},
    ),
    "falcon-alibi": (  # transformers adds the slopes twice in its eager attention
        "Falcon",
        {
            "attn_implementation": "sdpa", "head_dim": None, "alibi": True, "multi_query": True,
            "parallel_attn": False, "bias": True,
        },
    ),
    "gptj": ("GPTJ", {"rotary_dim": 8}),
    "codegen": ("CodeGen", {"rotary_dim": 8}),
    "gpt-neo": (
        "GPTNeo",
        {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    ),
    "bloom": ("Bloom", {"tie_word_embeddings": True}),
    "mpt": ("Mpt", {"tie_word_embeddings": True}),
    "mamba": ("Mamba", {"state_size": 8}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2, "pad_token_id": 0}),
    "lfm2-moe": (
        "Lfm2Moe",
        MOE | {"layer_types": ["conv", "full_attention"] * 2, "pad_token_id": 0, "num_dense_layers": 1},
    ),
    "bamba": (
        "Bamba",
        {
            "attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8,
            "mamba_chunk_size": 8, "pad_token_id": 0,
        },
    ),
    "falcon-h1": (
        "FalconH1",
        {
            "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_ssm": 128, "mamba_chunk_size": 8,
            "pad_token_id": 0,
        },
    ),
    "granite-hybrid-mamba": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2,
            "shared_intermediate_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8,
            "mamba_chunk_size": 8, "pad_token_id": 0,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        MOE | {
            "layer_types": ["linear_attention", "full_attention"] * 2, "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "jamba": (
        "Jamba",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
            "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False, "pad_token_id": 0,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "num_local_experts": 2, "intermediate_size_mlp": 128, "attention_chunk_size": 8, "pad_token_id": 0,
            "interleave_moe_layer_step": 2,
        },
    ),
    "minimax": (
        "MiniMax",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 4, "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "zaya": (
        "Zaya",
        {
            "moe_intermediate_size": 64, "num_experts": 4, "router_hidden_size": 32, "pad_token_id": 0,
            "rope_parameters": None,
        },
    ),
    "deepseek-v4": (
        "DeepseekV4",
        {
            "num_key_value_heads": 1, "q_lora_rank": 32, "moe_intermediate_size": 64, "num_experts_per_tok": 2,
            "n_routed_experts": 4, "hc_mult": 2, "sliding_window": 8, "o_groups": 2, "o_lora_rank": 16,
            "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "rope_parameters": None,
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "ssm_state_size": 8,
            "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8, "n_routed_experts": 4,
            "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 32, "num_experts_per_tok": 2,
            "pad_token_id": 0,
        },
    ),
    "kimi-linear": (
        "KimiLinear",
        LATENT | {
            "layer_types": ["linear_attention", "full_attention"] * 2, "linear_head_dim": 16, "linear_num_heads": 4,
            "num_local_experts": 4, "n_shared_experts": 1, "pad_token_id": 0, "head_dim": None,
        },
    ),
    "olmo-hybrid": (
        "OlmoHybrid",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
            "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "pad_token_id": 0,
        },
    ),
    "nemotron": ("Nemotron", {"pad_token_id": 0}),
    "jetmoe": (
        "JetMoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "kv_channels": 16},
    ),
    "recurrent-gemma": ("RecurrentGemma", {"attention_window_size": 8, "lru_width": 64, "pad_token_id": 0}),
    "deepseek-v32": (
        "DeepseekV32",
        LATENT | {
            "q_lora_rank": 32, "head_dim": 8, "index_n_heads": 32, "index_head_dim": 16, "index_topk": 4,
            "pad_token_id": 0,
        },
    ),
    "roberta": ("Roberta", {"is_decoder": True, "pad_token_id": 1}),  # positions begin at 2
    "hrm": (
        "HrmText",
        {
            "H_cycles": 1, "L_cycles": 2, "prefix_lm": False, "num_hidden_layers": 2, "num_key_value_heads": 4,
            "pad_token_id": 0,
        },
    ),
}  # fmt: skip
"""Families without a file in `models/`, each rollout of which is a sequence of its own."""


def configuration(family: str, vocab: int = VOCAB, **more: Any) -> tuple[str, Any]:
    """transformers' class of models and the configuration of a family; `more` is set in it."""
    import transformers

    name, changes = (FAMILIES | ROUTERS | OTHERS | SEPARATE)[family]
    given = copy.deepcopy(BASE | changes | {"vocab_size": vocab} | more)  # a configuration may change what it is given
    text = "Text" if name in ("Gemma3", "Gemma3n", "Gemma4", "Llama4") else ""
    values = {k: v for k, v in given.items() if v is not None or k == "q_lora_rank" or k == "sliding_window"}
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return f"{name}{head}", getattr(transformers, f"{name}{text}Config")(**values)


def hf_model(family: str, vocab: int = VOCAB) -> Any:
    """A random float32 model whose norms, biases and sinks matter."""
    import transformers

    name, config = configuration(family, vocab)
    torch.manual_seed(1)
    return randomised(getattr(transformers, name)(config))


def randomised(model: Any) -> Any:
    """The model in float32, with norms, biases and sinks that matter."""
    model, stored = model.float().eval(), model.state_dict().keys()
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            named = any(word in name for word in ("norm", "bias", "sinks", "layer_scalar", "output_scale"))
            if named and name in stored and value.is_floating_point():
                value.add_(torch.randn_like(value) * 0.2)
    return model
