"""Rotary frequencies and attention factors of every family and every spelling in config.json, compared with the rotary
embedding that transformers builds of the same file."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rlctl.backends.megatron.modules import frequencies_of
from rlctl.errors import InputError
from rlctl.models.facts import RopeFacts
from rlctl.models.families import facts_from_hf_config
from support.rows import every_row

SIZES = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 264, "max_position_embeddings": 512,
}  # fmt: skip
MLA = {
    "head_dim": 16, "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "mistral": ("Mistral", {}),
    "mixtral": ("Mixtral", EXPERTS),
    "gpt_oss": ("GptOss", EXPERTS),
    "deepseek_v3": ("DeepseekV3", MLA),
    "gemma3": ("Gemma3", {"model_type": "gemma3_text"}),
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
OTHER_BASE = {"rope_type": "default", "rope_theta": 3e5}
NO_ORIGINAL = {"rope_type": "yarn", "factor": 4.0}
EVERYWHERE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta": {"rope_theta": 5e5},
    "null scaling": {"rope_theta": 5e5, "rope_scaling": None},
    "yarn": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}},
    "own theta": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "rope_theta": 7e4, **YARN}},
    "yarn without original": {"rope_scaling": NO_ORIGINAL},
    "attention factor": {"rope_scaling": {"rope_type": "yarn", "attention_factor": 1.3, **YARN}},
    "mscale": {"rope_scaling": {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.0, **YARN}},
    "one mscale": {"rope_scaling": {"rope_type": "yarn", "mscale": 0.7, **YARN}},
    "betas": {"rope_scaling": {"rope_type": "yarn", "beta_fast": 16, "beta_slow": 2, **YARN}},
}
FLAT: dict[str, dict[str, Any]] = {
    "parameters": {"rope_parameters": OTHER_BASE},
    "parameters over theta": {"rope_theta": 5e5, "rope_parameters": OTHER_BASE},
    "yarn in parameters": {"rope_parameters": {"rope_type": "yarn", **YARN}},
    "older name": {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}},
    "both keys": {"rope_parameters": OTHER_BASE, "rope_scaling": {"rope_type": "yarn", **YARN}},
    "both keys and theta": {"rope_theta": 5e5, "rope_parameters": OTHER_BASE, "rope_scaling": NO_ORIGINAL},
    "empty scaling": {"rope_parameters": {"rope_type": "yarn", **YARN}, "rope_scaling": {}},
    "original outside": {"original_max_position_embeddings": 256, "rope_scaling": {"rope_type": "yarn", **YARN}},
    "whole": {"rope_scaling": {"rope_type": "yarn", "truncate": False, **YARN}},
}
OTHER_KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 3.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "both with llama3": {"rope_parameters": OTHER_BASE, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3 without original": {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    },
    "llama3, original outside": {"original_max_position_embeddings": 256, "rope_scaling": {"type": "llama3", **LLAMA3}},
}
NESTED: dict[str, dict[str, Any]] = {
    "both kinds": {"rope_parameters": {"full_attention": OTHER_BASE, "sliding_attention": {"rope_theta": 2e4}}},
    "one kind": {"rope_parameters": {"full_attention": {"rope_type": "yarn", **YARN}}},
    "older name in a kind": {"rope_parameters": {"full_attention": {"type": "linear", "factor": 8.0}}},
    "scaling on top": {
        "rope_parameters": {"full_attention": {"rope_theta": 3e5}},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "window scaled": {"rope_parameters": {"sliding_attention": NO_ORIGINAL}},
    "older spelling": {
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
}  # fmt: skip
CASES = [
    (family, name, edit)
    for family in FAMILIES
    for name, edit in (
        EVERYWHERE
        | (NESTED if family == "gemma3" else FLAT)
        | ({} if family in ("gemma3", "deepseek_v3") else OTHER_KINDS)
    ).items()
]


def config_json(family: str, edit: dict[str, Any]) -> dict[str, Any]:
    title, more = FAMILIES[family]
    return {"architectures": [f"{title}ForCausalLM"], "model_type": family} | copy.deepcopy(SIZES | more | edit)


def transformers_rotary(family: str, edit: dict[str, Any]) -> Any:
    """The rotary embedding of transformers' model."""
    from importlib import import_module

    from transformers import AutoConfig

    title = FAMILIES[family][0]
    values = config_json(family, edit)
    config = AutoConfig.for_model(values.pop("model_type"))
    config = type(config).from_dict(values)
    return getattr(import_module(f"transformers.models.{family}.modeling_{family}"), f"{title}RotaryEmbedding")(config)


def require_same(ours: RopeFacts, width: int, frequencies: torch.Tensor, factor: float) -> None:
    torch.testing.assert_close(frequencies_of(ours, width), frequencies, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_are_those_of_transformers(family: str) -> None:
    every_row([case for case in CASES if case[0] == family], check_frequencies)


def check_frequencies(family: str, name: str, edit: dict[str, Any]) -> None:
    facts, truth = facts_from_hf_config(config_json(family, edit)), transformers_rotary(family, edit)
    width = facts.mla.qk_rope_head_dim if facts.mla else facts.head_dim
    if family != "gemma3":
        require_same(facts.rope, width, truth.inv_freq, truth.attention_scaling)
        return
    for kind, ours in (("full_attention", facts.rope), ("sliding_attention", facts.window_rope)):
        if kind in truth.layer_types:
            assert ours is not None
            frequencies, factor = (getattr(truth, f"{kind}_{part}") for part in ("inv_freq", "attention_scaling"))
            require_same(ours, width, frequencies, factor)


REFUSED = {
    "partial_rotary_factor": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "partial_rotary_factor: 0.25": {"partial_rotary_factor": 0.25, "rope_scaling": {"rope_type": "yarn", **YARN}},
    "for `full_attention` layers": {"rope_parameters": {"full_attention": {"rope_type": "yarn", **YARN}}},
    "lacks `factor`": {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}},
    "lacks `low_freq_factor`": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "two rope types": {"rope_scaling": {"rope_type": "yarn", "type": "linear", **YARN}},
    "rope type `longrope`": {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_spelling_that_engines_read_differently_is_refused(words: str) -> None:
    def check(family: str) -> None:
        with pytest.raises(InputError, match=words):
            facts_from_hf_config(config_json(family, REFUSED[words]))

    every_row([family for family in FAMILIES if family != "gemma3"], check)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"rope_parameters": OTHER_BASE}, "rope_parameters: Gemma 3 has"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "two rope types"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "truncate": False, **YARN}}}, "truncate"),
    ],
)
def test_a_gemma_whose_parameters_would_not_be_read_is_refused(edit: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        facts_from_hf_config(config_json("gemma3", edit))
