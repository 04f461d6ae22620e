"""Tiny random models of every family, in the published layout, at sizes that vLLM's CPU kernels take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from support.tiny_models import llama_config, write_json, write_tokenizer

LAYERS = 2
BASE = llama_config(tied=False)
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "head_dim": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **MOE, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "num_hidden_layers": 2,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": None,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **LATENT, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 64, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0, "moe_layer_freq": 1, "rope_interleave": True,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "tie_word_embeddings": True,
        "sliding_window": 64, "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"], "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"],
        "attention_bias": True, "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 256,
        },
    },
}  # fmt: skip


def write_tiny_family(directory: Path, family: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write config, fp32 weights and tokenizer of a random model of `family` into `directory` and return it."""
    from rlctl.models.families import facts_from_hf_config, weights_of

    directory.mkdir(parents=True, exist_ok=True)
    config = BASE | FAMILIES[family] | overrides
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    weights = weights_of(facts_from_hf_config(config))
    rng = np.random.default_rng(seed)
    centred = {w.tensor for layer in range(config["num_hidden_layers"]) for w in weights.layer(layer) if w.offset}
    centred |= {w.tensor for w in weights.outer if w.offset}
    tensors = {name: _random(rng, name, shape, name in centred) for name, shape in weights.tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    return directory


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...], centred: bool) -> np.ndarray:
    """Gains near 1, biases near 0, and matrices large enough that an error in one shows in log-probs."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return (0.0 if centred else 1.0) + 0.1 * noise
    return 0.08 * noise


def tiny_family_facts(directory: Path) -> Any:
    from rlctl.models.families import facts_from_hf_config

    return facts_from_hf_config(json.loads((directory / "config.json").read_text()))
