"""Keys that config.json leaves out mean what they mean for transformers' class of the model type."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlctl.errors import InputError
from rlctl.models.families import FAMILIES, facts_from_hf_config

SIZES = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 264, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FULL: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                  "norm_topk_prob": True, "decoder_sparse_step": 2},
    "mistral": {"head_dim": 32, "sliding_window": 16},
    "mixtral": EXPERTS | {"head_dim": 32, "sliding_window": 16, "rms_norm_eps": 1e-4},
    "deepseek_v3": {
        "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "n_shared_experts": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
        "norm_topk_prob": False,
    },
    "gemma3": {"head_dim": 32, "sliding_window": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": False},
    "gpt_oss": EXPERTS | {"head_dim": 32, "sliding_window": 16, "rms_norm_eps": 1e-4},
}  # fmt: skip
"""Values that are not the defaults, as far as they can be others."""
TYPES = {"gemma3": "gemma3_text"}


def written(made: Any, family: str) -> dict[str, Any]:
    """The config.json that transformers writes of a configuration, with every key."""
    title = type(made).__name__.removesuffix("Config").removesuffix("Text")
    return json.loads(made.to_json_string(use_diff=False)) | {"architectures": [f"{title}ForCausalLM"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_key_may_be_left_out_as_for_transformers(family: str) -> None:
    """With the key left out, the facts are those of the file that transformers writes once it has read the rest; or the
    key is named."""
    from transformers import AutoConfig

    kind = type(AutoConfig.for_model(TYPES.get(family, family)))
    whole = written(kind(**(SIZES | FULL[family])), family)
    different = {}
    for left_out in whole.keys() - {"architectures", "model_type"}:
        shorter = {key: value for key, value in whole.items() if key != left_out}
        try:
            found: Any = facts_from_hf_config(shorter)
        except InputError as refusal:
            assert left_out in refusal.message, refusal  # noqa: PT017 - the others are compared
            continue
        if found != (wanted := facts_from_hf_config(written(kind.from_dict(dict(shorter)), family))):
            different[left_out] = (found, wanted)
    assert not different


def test_a_key_that_is_null_says_what_null_says() -> None:
    from transformers import MistralConfig

    config = written(MistralConfig(**SIZES, head_dim=32), "mistral")
    assert facts_from_hf_config(config | {"sliding_window": None}).sliding_window is None
    assert facts_from_hf_config(config | {"head_dim": None}).head_dim == MistralConfig(**SIZES).head_dim
