"""A configuration that rlctl cannot train is told apart: models of images or sound, encoder-decoders, models
without a head that writes, unknown ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlctl.errors import InputError
from rlctl.models.catalog import lookup
from rlctl.models.constraints import family_problem
from rlctl.models.facts import ListedTensor
from rlctl.models.families import facts_from_hf_config, other_architecture, sees


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"depth": 32}}, "takes images"),
        ({"architectures": ["LlavaNextForConditionalGeneration"]}, "takes images"),
        ({"architectures": ["NewModelForCausalLM"], "vision_config": {"depth": 2}}, "takes images"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder-decoder"),
        (
            {
                "architectures": ["Florence2ForConditionalGeneration"],
                "is_encoder_decoder": True,
                "vision_config": {"a": 1},
            },
            "encoder-decoder",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "`LlamaForSequenceClassification` has no output layer"),
        ({"architectures": ["Qwen2ForTokenClassification"]}, "has no output layer"),
        ({"architectures": ["Qwen2ForProcessRewardModel"]}, "has no output layer"),
        ({"architectures": ["LlamaModel"], "auto_map": {"AutoModel": "x.Y"}}, "has no output layer"),
        ({"architectures": ["BertModel"]}, "has no output layer"),
        ({"architectures": ["BertForMaskedLM"]}, "has no output layer"),
        ({"architectures": ["GPT2LMHeadModel"]}, "Unknown architecture"),
        ({"architectures": ["ChatGLMModel"], "auto_map": {"AutoModelForCausalLM": "x.Y"}}, "Unknown architecture"),
        ({"architectures": ["LamaForCausalLM"]}, "Unknown architecture `LamaForCausalLM`"),
    ],
)
def test_a_model_of_another_kind_is_not_an_unknown_one(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        facts_from_hf_config(config)
    assert other_architecture(config) == (config["architectures"][0] if "Unknown" in words else None)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "vocab_size": 512,
}  # fmt: skip
GEMMA = LLAMA | {"architectures": ["Gemma3ForCausalLM"]}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA | {"architectures": 3}, "a value of the wrong kind"),
        (GEMMA | {"rope_parameters": {"full_attention": "yarn"}}, "a value of the wrong kind"),
    ],
)
def test_a_value_that_no_model_has_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        facts_from_hf_config(config)
    assert not sees(config)


KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "attention_bias": False, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 131072, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6, "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
"""moonshotai/Kimi-K2-Instruct, without its quantization."""


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    assert other_architecture(KIMI_K2) is None
    assert facts_from_hf_config(KIMI_K2) == lookup("moonshotai/Kimi-K2-Instruct")


@pytest.mark.parametrize(
    "other",
    [
        {"architectures": ["SmolLM3ForCausalLM"], "use_sliding_window": True},
        {"architectures": ["GraniteForCausalLM"], "mlp_bias": True},
        {"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0},
        {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
    ],
)
def test_a_setting_that_a_file_does_not_map_leaves_the_model_to_transformers(other: dict[str, Any]) -> None:
    config = LLAMA | {"rms_norm_eps": 1e-6} | other
    assert other_architecture(config) == other["architectures"][0]
    with pytest.raises(InputError, match=list(other)[1] if "rope_scaling" not in other else "longrope"):
        facts_from_hf_config(config)


@pytest.mark.parametrize(
    ("family", "tensor", "reason"),
    [
        ("Qwen3NextForCausalLM", "linear_attn.A_log", "layers of a gated delta rule take no packed rows"),
        ("NemotronHForCausalLM", "mixer.A_log", "state-space layers need mamba-ssm and CUDA"),
        ("CohereForCausalLM", "self_attn.q_proj.weight", "has no weight map for the backend megatron;"),
    ],
)
def test_layers_that_megatron_core_does_not_train_are_named(family: str, tensor: str, reason: str) -> None:
    text = lookup("Qwen/Qwen2.5-7B")
    assert text is not None
    listed = (ListedTensor(f"model.layers.{{layer}}.{tensor}", (32,), layers=(0,)),)
    problem = family_problem(replace(text, family=family, listed=listed), "megatron")
    assert reason in str(problem)
    assert "--backend dtensor needs none" in str(problem)


def test_a_key_that_is_null_counts_as_absent() -> None:
    assert facts_from_hf_config(LLAMA | {"max_position_embeddings": None}) == facts_from_hf_config(LLAMA)
