"""A tiny random model of a supported family, in the published layout, with its own tokenizer.

Rehearsals and tests run on them. They are written without torch, and vLLM's CPU kernels support their sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlctl.checkpoints.hf.reward_models import SCORE, scorer_class
from rlctl.config.files import write_json
from rlctl.models.facts import ModelFacts
from rlctl.models.families import facts_from_hf_config, families, weights_of
from rlctl.models.families import family as known_family

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

VARIANTS: dict[str, dict[str, Any]] = {
    "llama-tied": {"tie_word_embeddings": True},
    "llama-dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
}
"""Keys beyond a tiny Llama's, for variants of it."""
FAMILIES: dict[str, dict[str, Any]] = {family.name: family.tiny for family in families()} | VARIANTS


def write_tiny_family(directory: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write config, fp32 weights and tokenizer of a random model of `family` into `directory` and return it."""
    keys = VARIANTS.get(family) or known_family(family).tiny
    write_tiny_model(directory, llama_config(tied=False) | keys | overrides, seed=seed)
    write_tokenizer(directory)
    return directory


def write_tiny_model(directory: Path, config: dict[str, Any], *, seed: int = 0, scores: bool = False) -> ModelFacts:
    """Write the configuration and random fp32 weights into `directory`, and return the facts of the model; with
    `scores` a reward model of the same kind."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    facts = facts_from_hf_config(config)
    weights = weights_of(facts)
    rng = np.random.default_rng(seed)
    centred = {w.tensor for layer in range(config["num_hidden_layers"]) for w in weights.layer(layer) if w.offset}
    centred |= {w.tensor for w in weights.outer if w.offset}
    tensors = {name: _random(rng, name, shape, name in centred) for name, shape in weights.tensors.items()}
    if scores:
        tensors.pop("lm_head.weight", None)
        tensors[SCORE] = _random(rng, SCORE, (1, facts.hidden), centred=False)
        write_json(directory / "config.json", config | {"architectures": [scorer_class(config)], "num_labels": 1})
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return facts


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...], centred: bool) -> np.ndarray:
    """Gains near 1, biases near 0, and matrices large enough that an error in one shows in log-probs."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return (0.0 if centred else 1.0) + 0.1 * noise
    return 0.08 * noise


def tiny_config(facts: ModelFacts, *, layers: int = 2, vocab: int = VOCAB_SIZE) -> dict[str, Any]:
    """Return the configuration of a model of the family of `facts`, with attention, experts and rotary embeddings of
    the same kinds."""
    model_family = known_family(facts.family)
    config = llama_config(tied=facts.tied_embeddings) | model_family.tiny
    config |= {
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": facts.max_length,
        "rms_norm_eps": facts.norm_eps,
    }
    if facts.mla is None and facts.kv_heads == facts.heads:
        config["num_key_value_heads"] = config["num_attention_heads"]
    if facts.sliding_window is None:
        config |= {"sliding_window": None} if "sliding_window" in config else {}
    else:
        config["sliding_window"] = min(64, facts.sliding_window)
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][layer % 2] for layer in range(layers)]
    config["rope_parameters"] = facts.rope.parameters
    if facts.window_rope is not None:
        windowed = facts.window_rope.parameters
        config["rope_parameters"] = {
            "full_attention": config["rope_parameters"], "sliding_attention": windowed
        }  # fmt: skip
    return config | model_family.tiny_like(facts)


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


def write_tokenizer(directory: Path) -> None:
    """Train a byte-level BPE tokenizer of exactly 512 tokens and save it with its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
