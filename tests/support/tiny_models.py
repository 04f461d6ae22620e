"""A tiny random Llama and Qwen3-MoE of the tests, whose values do not depend on rlctl's own weight maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rlctl.apps.tiny_model import llama_config, write_json, write_tokenizer


def write_tiny_llama(directory: Path, *, tied: bool = False, seed: int = 0, **overrides: Any) -> Path:
    """Write config, fp32 weights and tokenizer of a random Llama into `directory` and return it.

    Hidden 128, 2 layers, 4 heads, 2 KV heads, head size 32, FFN 256, vocabulary 512; `overrides` replace config keys.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = llama_config(tied=tied) | overrides
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    rng = np.random.default_rng(seed)
    tensors = {name: random_tensor(rng, name, shape) for name, shape in llama_shapes(config).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    return directory


def write_tiny_qwen3_moe(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Qwen3-MoE: the sizes of the tiny Llama, 4 experts of width 64 of which a token takes 2."""
    directory.mkdir(parents=True, exist_ok=True)
    config = llama_config(tied=False) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **overrides,
    }
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    rng = np.random.default_rng(seed)
    tensors = {name: random_tensor(rng, name, shape) for name, shape in qwen3_moe_shapes(config).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    return directory


def qwen3_moe_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint's tensors: the Llama's with head norms, and experts for its MLP."""
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    shapes = {name: shape for name, shape in llama_shapes(config).items() if ".mlp." not in name}
    for index in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_norm": (config["head_dim"],),
            "self_attn.k_norm": (config["head_dim"],),
            "mlp.gate": (config["num_experts"], hidden),
        }
        for expert in range(config["num_experts"]):
            layer[f"mlp.experts.{expert}.gate_proj"] = (width, hidden)
            layer[f"mlp.experts.{expert}.up_proj"] = (width, hidden)
            layer[f"mlp.experts.{expert}.down_proj"] = (hidden, width)
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint's tensors."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms near 1; matrices large enough that attention and logits are far from uniform, so that errors show."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    return 1 + 0.1 * noise if len(shape) == 1 else 0.08 * noise
