"""Tiny random vision-language models of each family, with processor, tokenizer and chat template, and drawn images.

Rehearsals and tests run on them. transformers makes model and processor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE, PATCH, HIDDEN = 64, 8, 64
"""Side of the square that the tower reads, of its patches, and the hidden size of both parts, in float32."""
WORDS = ("user assistant system what color is the square", " red green blue yellow one two three four image")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
QWEN = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}  # fmt: skip
SOFT_TOKENS = 70
"""The maximum tokens of a gemma4 image: its processor's smallest setting. It enlarges images to about this number."""
MIXED_LAYERS = ["linear_attention", "full_attention"]
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
FAMILIES: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "gemma3": (
        "<start_of_image>",
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        [],
    ),
    "gemma4": (
        "<|image|>",
        {
            "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
            "boa_token": "<|audio>", "eoa_token": "<audio|>",
        },
        ["<|video|>"],
    ),
    "idefics3": (
        "<image>",
        {"image_token": "<image>"},
        ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *TILES],
    ),
    "smolvlm": (
        "<image>",
        {
            "image_token": "<image>", "video_token": "<video>", "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>",
        },
        TILES,
    ),
    "qwen2_5_vl": (QWEN_IMAGE, QWEN, []),
    "qwen3_vl": (QWEN_IMAGE, QWEN, []),
    "qwen3_5": (QWEN_IMAGE, QWEN, []),
    "qwen3_5_moe": (QWEN_IMAGE, QWEN, []),
    "internvl": (
        "<IMG_CONTEXT>",
        {
            "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
            "video_token": "<video>",
        },
        [],
    ),
}  # fmt: skip
"""Family -> what its chat template writes for an image, the tokens that its processor names, and its other tokens."""


def write_vision_model(
    directory: Path,
    family: str = "idefics3",
    *,
    tie: bool = True,
    hidden: int = HIDDEN,
    tiles: int = 2,
    patch: int = PATCH,
    words: Sequence[str] = WORDS,
    seed: int = 0,
) -> Path:
    """Save a random float32 model with all its files in the published form. `tiles`: idefics3 and smolvlm enlarge
    images to this many sides of the tower and cut them into tiles; `words`: texts whose words are tokens."""
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    tokenizer = vision_tokenizer(directory, family, words)
    model = AutoModelForImageTextToText.from_config(vision_config(family, tokenizer, hidden, tie, patch)).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    if family == "gemma3":
        _with_published_names(directory / "model.safetensors")
    vision_processor(family, tokenizer, tiles, patch).save_pretrained(directory)
    return directory


def _with_published_names(file: Path) -> None:
    """transformers saves a gemma3 that was not loaded under other names than the published models."""
    from safetensors.torch import load_file, save_file

    within = re.compile(r"^vision_tower\.(?!vision_model)")
    tensors = {within.sub("vision_tower.vision_model.", name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def vision_tokenizer(directory: Path, family: str, words: Sequence[str] = WORDS) -> Any:
    """Save and load a byte-level tokenizer with the tokens of a family; loading gives it attributes of their names."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    written, names, others = FAMILIES[family]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    raw.train_from_iterator([*words] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*names.values(), *others]})
    if family == "gemma3":  # vLLM looks these up in the vocabulary
        blank: Any = [AddedToken("\n" * lines, normalized=False) for lines in range(1, 5)]
        tokenizer.add_tokens(blank)
    tokenizer.chat_template = CHAT.replace("IMAGE", written)
    tokenizer.init_kwargs.pop("extra_special_tokens", None)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory, extra_special_tokens=names)


DELTA_RULE = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip


def vision_config(family: str, tokenizer: Any, hidden: int = HIDDEN, tie: bool = True, patch: int = PATCH) -> Any:
    """The configuration of a model of two layers, whose tower has two as well."""
    from transformers import AutoConfig

    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in FAMILIES[family][1].items()}
    text: dict[str, Any] = {
        "vocab_size": (len(tokenizer) + 63) // 64 * 64, "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2, "num_attention_heads": hidden // 32, "num_key_value_heads": 1, "head_dim": 32,
        "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    tower: dict[str, Any] = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": patch,
    }  # fmt: skip
    grid: dict[str, Any] = {"depth": 2, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_heads": 2,
                            "patch_size": patch, "out_hidden_size": hidden}  # fmt: skip
    qwen = {f"{name}_id": token for name, token in ids.items()}
    around: dict[str, Any]
    match family:
        case "gemma3":
            text |= {"query_pre_attn_scalar": 32, "sliding_window": 512}
            text |= {"layer_types": ["sliding_attention", "full_attention"]}
            tower |= {"vision_use_head": False}
            around = {"mm_tokens_per_image": image_tokens(patch), "eos_token_id": tokenizer.eos_token_id}
            around |= {f"{name}_index": token for name, token in ids.items()}
        case "gemma4":
            text |= {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 2}
            text |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 64}
            text |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": text["vocab_size"]}
            text["final_logit_softcapping"] = 30.0
            tower |= {"num_key_value_heads": 2, "head_dim": hidden // 2, "position_embedding_size": 128}
            tower |= {"pooling_kernel_size": 3, "use_clipped_linears": True, "default_output_length": SOFT_TOKENS}
            sound = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32}
            around = {f"{name}_id": token for name, token in ids.items() if name != "eoa_token"}
            around |= {"eoa_token_index": ids["eoa_token"], "audio_config": sound}
            around |= {"video_token_id": tokenizer.convert_tokens_to_ids("<|video|>")}
        case "idefics3" | "smolvlm":
            text |= {"model_type": "llama", "tie_word_embeddings": tie}  # vLLM reads the inner one
            around = {"image_token_id": ids["image_token"], "scale_factor": 2, "pad_token_id": tokenizer.pad_token_id}
        case "qwen2_5_vl":
            text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}}
            tower, around = grid | {"window_size": 4 * patch, "fullatt_block_indexes": [1]}, qwen
        case "qwen3_vl":
            rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
            text |= {"rope_parameters": rope}
            tower, around = grid | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}, qwen
        case "qwen3_5" | "qwen3_5_moe":
            rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
            text |= {"rope_parameters": rope | {"partial_rotary_factor": 0.25}, "layer_types": MIXED_LAYERS}
            text |= DELTA_RULE
            if family == "qwen3_5_moe":
                text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
                text |= {"shared_expert_intermediate_size": hidden}
            tower, around = grid | {"num_position_embeddings": 64}, qwen
        case _:
            text |= {"model_type": "qwen2", "tie_word_embeddings": tie}
            around = {"image_token_id": ids["context_image_token"], "image_seq_length": image_tokens(patch)}
    return AutoConfig.for_model(family, text_config=text, vision_config=tower, tie_word_embeddings=tie, **around)


def image_tokens(patch: int = PATCH) -> int:
    """Tokens of one pass of the tower, of families that pool 2 x 2 patches."""
    return (SIDE // patch // 2) ** 2


def vision_processor(family: str, tokenizer: Any, tiles: int = 2, patch: int = PATCH) -> Any:
    """The processor of a family, with sizes that fit the tower."""
    import transformers as t

    template, square = tokenizer.chat_template, {"height": SIDE, "width": SIDE}
    if family == "gemma3":
        looks = t.Gemma3ImageProcessorPil(size=square)
        return t.Gemma3Processor(looks, tokenizer, chat_template=template, image_seq_length=image_tokens(patch))
    if family == "gemma4":
        sizes: dict[str, Any] = {"patch_size": patch, "max_soft_tokens": SOFT_TOKENS, "pooling_kernel_size": 3}
        looks, videos = t.Gemma4ImageProcessorPil(**sizes), t.Gemma4VideoProcessor(**sizes)
        hears = t.Gemma4AudioFeatureExtractor()
        return t.Gemma4Processor(hears, looks, tokenizer, videos, chat_template=template, image_seq_length=SOFT_TOKENS)
    if family == "idefics3":
        looks = t.Idefics3ImageProcessorPil(size={"longest_edge": tiles * SIDE}, max_image_size={"longest_edge": SIDE})
        return t.Idefics3Processor(looks, tokenizer, image_seq_len=image_tokens(patch), chat_template=template)
    if family == "smolvlm":
        looks = t.SmolVLMImageProcessorPil(size={"longest_edge": tiles * SIDE}, max_image_size={"longest_edge": SIDE})
        videos = t.SmolVLMVideoProcessor()
        return t.SmolVLMProcessor(looks, tokenizer, videos, image_seq_len=image_tokens(patch), chat_template=template)
    if family == "internvl":
        looks = t.GotOcr2ImageProcessorPil(size=square, crop_to_patches=True, max_patches=4)
        videos = t.InternVLVideoProcessor()
        return t.InternVLProcessor(
            looks, tokenizer, videos, image_seq_length=image_tokens(patch), chat_template=template
        )
    areas = {"shortest_edge": (4 * patch) ** 2, "longest_edge": (2 * SIDE) ** 2}
    looks = t.Qwen2VLImageProcessorPil(size=areas, patch_size=patch)
    if family == "qwen2_5_vl":
        videos = t.Qwen2VLVideoProcessor(patch_size=patch)
        return t.Qwen2_5_VLProcessor(looks, tokenizer, videos, chat_template=template)
    videos = t.Qwen3VLVideoProcessor(patch_size=patch)
    return t.Qwen3VLProcessor(looks, tokenizer, videos, chat_template=template)


def square(color: str = "red", size: tuple[int, int] = (SIDE, SIDE)) -> Image:
    """A square of a color in the middle of a white image of (width, height) pixels."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", size, "white")
    width, height = size
    ImageDraw.Draw(image).rectangle([width // 4, height // 4, width * 3 // 4, height * 3 // 4], fill=color)
    return image
