"""The layers that PEFT (0.21) gives adapters where `target_modules` is unset, by model type. Torch-free."""

from __future__ import annotations

from rlctl.models.transformers_classes import type_of

_Q_V = ("q_proj", "v_proj")
TARGETS = {
    **dict.fromkeys(
        ("opt", "gptj", "gpt_neo", "llama", "mistral", "stablelm", "gemma", "gemma2", "gemma3_text",
         "qwen2", "qwen3"),
        _Q_V,
    ),
    **dict.fromkeys(("bloom", "gpt_neox", "chatglm"), ("query_key_value",)),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    "mpt": ("Wqkv",),
    "falcon": ("query_key_value",),
    "codegen": ("qkv_proj",),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "rwkv": ("key", "value", "receptance", "output"),
}  # fmt: skip
"""`TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING` of peft/utils/constants.py: its language models, without
Mixtral, for which PEFT finds no layers (`_convert_peft_config_moe` makes an empty list of the unset one)."""
OF_FILES = {"gemma3": "gemma3_text"}
"""Families of rlctl whose file has another name than the model type."""


def peft_targets(family: str) -> tuple[str, ...]:
    """Return PEFT's default targets of a family (a file's name or transformers' class); empty: it has none."""
    return TARGETS.get(family if family in TARGETS else OF_FILES.get(family) or type_of(family), ())
