"""Tiny random models for the tests: a Llama with a trained byte-level tokenizer, written without importing torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog answers with a question: what is the sum of both?",
    "user assistant system: calculate the following, state the answer at the end of your response, and show each step.",
    "A model reads tokens and writes tokens; rewards say which of the answers were right, and weights follow.",
    "In the beginning there was a tensor, then there were shards of it, and every shard knew where it came from.",
    "Language models predict one word after another; reinforcement learning changes which continuation becomes likely.",
    "Parallel workers exchange gradients, synchronise parameters, checkpoint progress, resume without losing anything.",
    "Mathematics, geography, literature, chemistry and history lessons begin on Monday morning at half past seven.",
    "Please explain briefly why water boils at lower temperatures on high mountains, using simple everyday language.",
    "Seventeen engineers measured bandwidth between neighbouring machines before choosing how to divide their work.",
    *(
        f"What is {a} + {b}? The answer is {a + b}. What is {b} - {a}? It is {b - a}."
        for a in range(12)
        for b in (3, 7)
    ),
]


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


def llama_config(*, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }


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


def write_tokenizer(directory: Path) -> None:
    """Train a byte-level BPE tokenizer of exactly 512 tokens and save it with its chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the corpus is too small for the vocabulary"
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "tokenizer_config.json", settings)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
