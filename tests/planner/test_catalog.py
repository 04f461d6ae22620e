"""The catalog's facts, checked by what they add up to: the parameter counts that the models' publishers state."""

from __future__ import annotations

import re
from math import prod

import pytest

from rlctl.checkpoints.hf.model_facts import known_facts
from rlctl.models.catalog import CatalogEntry, entries, facts_of, lookup, near
from rlctl.models.facts import MoeFacts
from rlctl.models.families import weights_of
from rlctl.planner.costs.parameters import count, layer_parameters
from support.rows import every_row

# Billions of parameters as the hub's safetensors headers or the model's report state them (MTP layers left out).
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6.738,
    "meta-llama/Llama-2-13b-hf": 13.016,
    "meta-llama/Llama-2-70b-hf": 68.977,
    "meta-llama/Meta-Llama-3-8B": 8.030,
    "meta-llama/Meta-Llama-3-70B": 70.554,
    "meta-llama/Llama-3.1-8B": 8.030,
    "meta-llama/Llama-3.1-70B": 70.554,
    "meta-llama/Llama-3.1-405B": 405.85,
    "meta-llama/Llama-3.2-1B": 1.236,
    "meta-llama/Llama-3.2-3B": 3.213,
    "meta-llama/Llama-3.3-70B-Instruct": 70.554,
    "HuggingFaceTB/SmolLM2-135M": 0.1345,
    "HuggingFaceTB/SmolLM2-360M": 0.3618,
    "HuggingFaceTB/SmolLM2-1.7B": 1.711,
    "deepseek-ai/deepseek-llm-7b-chat": 6.910,
    "Qwen/Qwen2.5-0.5B": 0.494,
    "Qwen/Qwen2.5-1.5B": 1.544,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.777,
    "Qwen/Qwen2.5-3B": 3.086,
    "Qwen/Qwen2.5-7B": 7.616,
    "Qwen/Qwen2.5-Math-7B": 7.616,
    "Qwen/Qwen2.5-14B": 14.770,
    "Qwen/Qwen2.5-32B": 32.764,
    "Qwen/Qwen2.5-72B": 72.706,
    "Qwen/Qwen2.5-Math-1.5B": 1.544,
    "Qwen/Qwen2.5-Math-72B": 72.706,
    "Qwen/Qwen2.5-Coder-32B": 32.764,
    "Qwen/QwQ-32B": 32.764,
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B": 1.721,
    "Qwen/Qwen3-4B": 4.022,
    "Qwen/Qwen3-8B": 8.191,
    "Qwen/Qwen3-14B": 14.768,
    "Qwen/Qwen3-32B": 32.762,
    "Qwen/Qwen3-30B-A3B": 30.532,
    "Qwen/Qwen3-235B-A22B": 235.094,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480.155,
    "allenai/OLMoE-1B-7B-0125": 6.919,
    "deepseek-ai/DeepSeek-V3": 671.026,
    "moonshotai/Moonlight-16B-A3B": 15.960,
    "moonshotai/Kimi-K2-Instruct": 1026.0,
    "mistralai/Mistral-7B-v0.1": 7.242,
    "mistralai/Mistral-7B-v0.3": 7.248,
    "mistralai/Mistral-Nemo-Base-2407": 12.248,
    "mistralai/Ministral-8B-Instruct-2410": 8.020,
    "mistralai/Mistral-Small-Instruct-2409": 22.247,
    "mistralai/Mistral-Small-24B-Base-2501": 23.572,
    "mistralai/Mistral-Large-Instruct-2407": 122.610,
    "mistralai/Mixtral-8x7B-v0.1": 46.703,
    "mistralai/Mixtral-8x22B-v0.1": 140.621,
    "openai/gpt-oss-20b": 20.91,
    "openai/gpt-oss-120b": 116.83,
    "google/gemma-3-270m": 0.268,
    "google/gemma-3-1b-it": 0.99989,
    "google/gemma-3-4b-it": 3.880,
    "google/gemma-3-12b-it": 11.766,
    "google/gemma-3-27b-it": 27.009,
    "zai-org/GLM-4.5": 352.8,
    "zai-org/GLM-4.7-Flash": 29.94,
    "zai-org/GLM-Z1-9B-0414": 9.400,
    "MiniMaxAI/MiniMax-M2": 228.7,
    "MiniMaxAI/MiniMax-M2.7": 228.7,
    "HuggingFaceTB/SmolLM3-3B": 3.075,
    "ibm-granite/granite-3.3-8b-instruct": 8.171,
    "ibm-granite/granite-3.3-2b-instruct": 2.534,
    "allenai/OLMo-2-1124-7B": 7.299,
    "ByteDance-Seed/Seed-OSS-36B-Base": 36.151,
}
# The same of models that the catalog has the configuration of: the parts for images or sound are left out.
BY_CONFIGURATION = {
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16": 31.58,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": 120.67,
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2": 12.31,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 8.89,
    "Qwen/Qwen3.5-35B-A3B-Base": 34.66,
    "Qwen/Qwen3.5-397B-A17B": 396.35,
    "Qwen/Qwen3.5-9B": 8.95,
    "zai-org/GLM-5.1": 743.9,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79.67,
    "deepseek-ai/DeepSeek-V2-Lite": 15.706,
    "google/gemma-2-2b": 2.614,
    "google/gemma-2-9b": 9.242,
    "google/gemma-2-27b": 27.227,
    "LGAI-EXAONE/EXAONE-4.0-32B": 32.003,
    "microsoft/phi-4": 14.66,
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": 49.12,
    "tiiuae/Falcon-H1-7B-Instruct": 7.585654880,
    "google/gemma-4-31B-it": 30.70,
    "google/gemma-4-26B-A4B-it": 25.23,
}
# Parameters of all parts, as the hub states them, and the text model that the language part is like.
WHOLE = {
    "Qwen/Qwen2.5-VL-3B-Instruct": (3_754_622_976, "Qwen/Qwen2.5-3B"),
    "Qwen/Qwen2.5-VL-7B-Instruct": (8_292_166_656, "Qwen/Qwen2.5-7B"),
    "Qwen/Qwen3-VL-2B-Instruct": (2_127_532_032, "Qwen/Qwen3-1.7B"),
    "Qwen/Qwen3-VL-4B-Thinking": (4_437_815_808, "Qwen/Qwen3-4B"),
    "Qwen/Qwen3-VL-8B-Instruct": (8_767_123_696, "Qwen/Qwen3-8B"),
    "google/gemma-3-4b-it": (4_300_079_472, "google/gemma-3-4b-it"),
    "google/gemma-3-12b-it": (12_187_325_040, "google/gemma-3-12b-it"),
    "google/gemma-3-27b-it": (27_432_406_640, "google/gemma-3-27b-it"),
}
# Every published size that has to be known, base models and those tuned from them.
QWEN25 = ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
SIZES = [
    *(f"meta-llama/Llama-3.1-{size}{kind}" for size in ("8B", "70B", "405B") for kind in ("", "-Instruct")),
    *(f"meta-llama/Llama-3.2-{size}{kind}" for size in ("1B", "3B") for kind in ("", "-Instruct")),
    "meta-llama/Llama-3.3-70B-Instruct",
    *(f"Qwen/Qwen2.5-{size}{kind}" for size in QWEN25 for kind in ("", "-Instruct")),
    *(f"Qwen/Qwen2.5-Coder-{size}{kind}" for size in QWEN25[:-1] for kind in ("", "-Instruct")),
    *(f"Qwen/Qwen2.5-Math-{size}{kind}" for size in ("1.5B", "7B", "72B") for kind in ("", "-Instruct")),
    *(f"Qwen/Qwen3-{size}{kind}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "30B-A3B") for kind in ("", "-Base")),
    *(f"Qwen/Qwen3-{size}" for size in ("32B", "235B-A22B", "30B-A3B-Instruct-2507", "235B-A22B-Thinking-2507")),
    *(f"deepseek-ai/DeepSeek-{name}" for name in ("V3", "V3-Base", "V3-0324", "R1", "R1-0528")),
    *(f"moonshotai/Moonlight-16B-A3B{kind}" for kind in ("", "-Instruct")),
    *(f"mistralai/Mixtral-{size}{kind}-v0.1" for size in ("8x7B", "8x22B") for kind in ("", "-Instruct")),
    *(f"mistralai/Mistral-7B-{name}" for name in ("v0.1", "Instruct-v0.1", "Instruct-v0.2", "v0.3", "Instruct-v0.3")),
    *(f"mistralai/Mistral-Nemo-{name}-2407" for name in ("Base", "Instruct")),
    *(f"mistralai/Mistral-Small-{name}" for name in ("Instruct-2409", "24B-Base-2501", "24B-Instruct-2501")),
    *(f"openai/gpt-oss-{size}" for size in ("20b", "120b")),
    *(f"google/gemma-3-{size}{kind}" for size in ("1b", "4b", "12b", "27b") for kind in ("-pt", "-it")),
]
ACTIVE = {  # Active billions as published, embedding lookup left out.
    "Qwen/Qwen3-30B-A3B": 3.35 - 0.31,
    "Qwen/Qwen3-235B-A22B": 22.2 - 0.62,
    "deepseek-ai/DeepSeek-V3": 37.55 - 0.93,
    "openai/gpt-oss-120b": 5.13,
}


def test_parameters_match_the_published_total() -> None:
    def check(name: str, billions: float) -> None:
        facts = lookup(name)
        assert facts is not None
        assert count(facts).total / 1e9 == pytest.approx(billions, rel=0.01)

    every_row(PUBLISHED.items(), check)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_model_that_reads_images_has_the_published_total(name: str) -> None:
    parameters, like = WHOLE[name]
    whole, text, alike = known_facts(name, images=True), known_facts(name), lookup(like)
    assert whole is not None
    assert text is not None
    assert alike is not None
    assert whole.vision is not None
    assert count(whole).total == weights_of(whole).parameters == parameters
    assert count(text).total == count(alike).total


@pytest.mark.slow
def test_gemma_4_has_the_published_sizes() -> None:
    """8 billion parameters of E4B with embeddings and encoders, as its model card states: about 150 million of images
    and 300 million of sound."""
    whole, text = known_facts("google/gemma-4-E4B-it", images=True), known_facts("google/gemma-4-E4B-it")
    assert whole is not None
    assert text is not None
    assert weights_of(whole).parameters / 1e9 == pytest.approx(8.0, rel=0.01)
    assert count(whole).seeing / 1e6 == pytest.approx(150, rel=0.15)
    sound = weights_of(whole).parameters - weights_of(text).parameters - count(whole).seeing
    assert sound / 1e6 == pytest.approx(300, rel=0.05)


def test_every_published_size_is_known_under_its_own_name() -> None:
    def check(name: str) -> None:
        facts = lookup(name)
        assert facts is not None
        assert any(name in entry.names for entry in entries())
        size = name.rpartition("/")[2].lower().replace("-a", "-").replace("gpt-oss", "")
        stated = re.search(r"(\d+(?:\.\d+)?)b\b", size)
        if stated and "mixtral" not in size:  # the size in a name is a marketed one
            assert count(facts).total / 1e9 == pytest.approx(float(stated[1]), rel=0.3)

    every_row(SIZES, check)


def test_a_field_that_facts_do_not_have_is_an_error() -> None:
    with pytest.raises(TypeError, match="layerz"):
        facts_of({"family": "llama", "layerz": 2})


def test_active_parameters_match_the_published_number() -> None:
    def check(name: str, billions: float) -> None:
        facts = lookup(name)
        assert facts is not None
        assert count(facts).active / 1e9 == pytest.approx(billions, rel=0.03)

    every_row(ACTIVE.items(), check)


def test_mtp_layer_of_deepseek_v3_is_the_difference_to_the_685b_on_the_hub() -> None:
    facts = lookup("deepseek-ai/DeepSeek-V3")
    assert facts is not None
    parts = count(facts)
    assert (parts.total + parts.mtp) / 1e9 == pytest.approx(684.5 - 1.85, rel=0.005)  # the hub repeats both embeddings


@pytest.mark.parametrize("name", ["unsloth/llama-3.1-8b", "Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B-Instruct"])
def test_lookup_ignores_case_and_organization(name: str) -> None:
    assert lookup(name) is lookup("meta-llama/Llama-3.1-8B")


def test_unknown_names_give_none_and_near_matches() -> None:
    assert lookup("Qwen/Qwen3-31B") is None
    assert lookup("no/such-model") is None
    assert "Qwen/Qwen3-32B" in near("Qwen/Qwen3-31B")
    assert near("Qwen/Qwen3-8b-Instrct")[0] == "Qwen/Qwen3-8B"  # there is no Qwen3-8B-Instruct
    assert near("HuggingFaceTB/SmolLM2-135M-Instrct")[0] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert near("someone/a-model-that-nobody-knows") == []


def test_no_name_describes_two_models() -> None:
    names = [name.rsplit("/", 1)[-1].lower() for entry in entries() for name in entry.names]
    assert len(names) == len(set(names))


def test_sizes_are_consistent() -> None:
    def check(entry: CatalogEntry) -> None:
        facts = entry.facts
        assert facts is not None
        assert facts.heads % facts.kv_heads == 0
        assert all(0 <= layer < facts.layers for layer in facts.full_attention_layers or ())
        if facts.moe is not None:
            assert facts.moe.experts_per_token < facts.moe.experts
            assert facts.moe.topk_groups <= facts.moe.groups

    every_row([entry for entry in entries() if entry.facts], check)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "billions"), BY_CONFIGURATION.items())
def test_a_configuration_makes_a_model_of_the_published_size(name: str, billions: float) -> None:
    facts = known_facts(name)
    assert facts is not None
    copies = {
        tensor.name: facts.moe.experts if facts.moe and "{expert}" in tensor.name else 1 for tensor in facts.listed
    }
    total = sum(prod(t.shape) * max(1, len(t.layers)) * copies[t.name] for t in facts.listed)
    total = total if facts.listed else count(facts).total  # a family with a file lists no tensors
    assert total / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.slow
def test_experts_that_are_published_in_one_tensor_are_experts() -> None:
    """Gemma 4 26B-A4B: 3.8 billion of its 25.2 are active, the table of embeddings among them."""
    facts = known_facts("google/gemma-4-26B-A4B-it")
    assert facts is not None
    assert facts.moe == MoeFacts(128, 8, 704)
    found, expert = count(facts), 3 * facts.hidden * 704
    assert (found.experts, found.total) == (30 * 128 * expert, pytest.approx(25.23e9, rel=0.001))
    assert found.active == found.total - 30 * (128 - 8) * expert == pytest.approx(3.8e9, rel=0.02)
    assert layer_parameters(facts, True).experts == 128 * expert
