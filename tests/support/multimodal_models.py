"""Tiny random models that take images as well as text, made and saved by transformers, with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlctl.config.files import write_json
from rlctl.tiny_models.text import VOCAB_SIZE, write_tokenizer
from support.family_models import GEMMA_ROPE, MOE, WINDOW

TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048,
    "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_TOWER = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
    "spatial_merge_size": 1, "num_position_embeddings": 4, "deepstack_visual_indexes": [0],
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
IMAGES = {"image_token_id": 510, "video_token_id": 509, "vision_start_token_id": 508, "vision_end_token_id": 507}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {
            "rope_parameters": GEMMA_ROPE, "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": WINDOW, "query_pre_attn_scalar": 24,
        },
        TOWER | {"model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4, "image_token_index": 510, "boi_token_index": 509, "eoi_token_index": 508},
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None},
        TOWER | {"model_type": "pixtral"},
        {"image_token_index": 510, "tie_word_embeddings": False},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"head_dim": None, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": MROPE},
        QWEN_TOWER,
        IMAGES | {"tie_word_embeddings": True},
    ),
    "qwen3_vl": ("Qwen3VL", {"rope_parameters": MROPE | {"mrope_interleaved": True}}, QWEN_TOWER, IMAGES),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        MOE | {"rope_parameters": MROPE | {"mrope_interleaved": True}, "moe_intermediate_size": 32},
        QWEN_TOWER,
        IMAGES,
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        },
        QWEN_TOWER,
        IMAGES,
    ),
    "llama4": (
        "Llama4",
        {
            "intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, "attention_chunk_size": 64, "no_rope_layers": [1, 0],
        },
        TOWER | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        {"image_token_index": 510, "boi_token_index": 509, "eoi_token_index": 508},
    ),
    "gemma4": (
        "Gemma4",
        {
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "global_head_dim": 32,
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB_SIZE, "num_kv_shared_layers": 0,
        },
        TOWER,
        {"audio_config": None, "image_token_id": 510},
    ),
}  # fmt: skip
"""Name -> transformers' prefix of its classes, and what is set in the text part, the tower and around them."""


def multimodal(name: str) -> Any:
    """A random float32 model whose norms and biases matter."""
    import transformers

    prefix, text, tower, around = MODELS[name]
    values = {key: value for key, value in (TEXT | text).items() if value is not None or key == "sliding_window"}
    config = getattr(transformers, f"{prefix}Config")(text_config=values, vision_config=tower, **around)
    torch.manual_seed(2)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for held, parameter in model.named_parameters():
            if not parameter.abs().sum().isfinite() or "experts" in held:
                parameter.normal_(0, 0.1)
            if any(word in held for word in ("norm", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def write_multimodal(directory: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """Save a random model with the files that a processor has, in several shards."""
    multimodal(name).to(dtype).save_pretrained(directory, max_shard_size="200KB")
    write_tokenizer(directory)
    write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0})
    write_json(directory / "preprocessor_config.json", {"image_processor_type": "SiglipImageProcessor"})
    return directory


IMAGE, IMAGE_SIDE, IMAGE_TOKENS = "<image>", 64, 16
MARKS = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]


def write_with_images(directory: Path) -> Path:
    """Save a random Idefics3, the family that needs no torchvision, with its processor. The most likely token is never
    one that stands for an image."""
    import transformers
    from transformers import AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration

    write_tokenizer(directory)
    special = [IMAGE, *MARKS, *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))]
    tokenizer = AutoTokenizer.from_pretrained(directory, extra_special_tokens={"image_token": IMAGE})
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    text = TEXT | {"model_type": "llama", "vocab_size": 576, "tie_word_embeddings": False}
    tower = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": IMAGE_SIDE, "patch_size": 8,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=text, vision_config=tower, image_token_id=image, scale_factor=2, tie_word_embeddings=False
    )
    torch.manual_seed(3)
    model = Idefics3ForConditionalGeneration(config).float()
    model.lm_head.weight.data[VOCAB_SIZE:] = 0.0
    model.save_pretrained(directory)
    edge = {"longest_edge": IMAGE_SIDE}
    looks = transformers.Idefics3ImageProcessorPil(size=edge, max_image_size=edge)
    transformers.Idefics3Processor(looks, tokenizer, image_seq_len=IMAGE_TOKENS).save_pretrained(directory)
    return directory
