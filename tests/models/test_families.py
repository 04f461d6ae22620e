"""A configuration that rlctl cannot train is told apart: models of images or sound, encoder-decoders, unknown ones."""

from __future__ import annotations

from typing import Any

import pytest

from rlctl.errors import InputError
from rlctl.models.families import facts_from_hf_config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"depth": 32}}, "takes images"),
        ({"architectures": ["LlavaNextForConditionalGeneration"]}, "takes images"),
        ({"architectures": ["NewModelForCausalLM"], "vision_config": {"depth": 2}}, "takes images"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder-decoder"),
        ({"architectures": ["LamaForCausalLM"]}, "Unknown architecture `LamaForCausalLM`"),
    ],
)
def test_a_model_of_another_kind_is_not_an_unknown_one(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        facts_from_hf_config(config)


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts_per_tok"])
def test_a_family_with_experts_has_at_least_one(key: str) -> None:
    config = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    with pytest.raises(InputError, match=f"`{key}` is 0; expected a positive whole number"):
        facts_from_hf_config(config | {"intermediate_size": 64, key: 0})
