"""A configuration that rlctl cannot train is told apart: models of images or sound, encoder-decoders, models
without a head that writes, unknown ones."""

from __future__ import annotations

from typing import Any

import pytest

from rlctl.errors import InputError
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


def test_a_key_that_is_null_counts_as_absent() -> None:
    assert facts_from_hf_config(LLAMA | {"max_position_embeddings": None}) == facts_from_hf_config(LLAMA)
