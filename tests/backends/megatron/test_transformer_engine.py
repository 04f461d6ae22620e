"""What a policy is made of on GPUs with TransformerEngine: what can be known of it without either."""

from __future__ import annotations

import dataclasses
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from rlctl.backends.base import PolicySpec
from rlctl.backends.megatron import args
from rlctl.backends.megatron.backend import policy_world, refuse_wrong_numbers
from rlctl.config.parallel import ParallelSpec
from rlctl.errors import ConfigError
from rlctl.models.catalog import lookup
from rlctl.settings.training import LoraConfig


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where TransformerEngine is installed; nothing of it is imported."""
    monkeypatch.setattr(args, "find_spec", lambda name: ModuleSpec(name, None))


def spec(model: str, device: str = "cuda", **more: Any) -> PolicySpec:
    facts = lookup(model)
    assert facts is not None
    return PolicySpec(facts, device=device, **({"dtype": "bfloat16"} | more))  # type: ignore[arg-type]


def test_its_layers_are_used_on_gpus_where_it_is_installed(installed: None) -> None:
    assert args.has_transformer_engine(spec("Qwen/Qwen3-8B"))
    for other in (
        spec("Qwen/Qwen3-8B", device="cpu"),
        spec("Qwen/Qwen3-8B", lora=LoraConfig(rank=8)),
        spec("Qwen/Qwen3-8B", megatron={"transformer_impl": "local"}),
    ):
        assert not args.has_transformer_engine(other)
        refuse_wrong_numbers(other)


def test_experts_are_grouped_with_it_and_layouts_know_their_names(installed: None) -> None:
    policy = spec("Qwen/Qwen3-30B-A3B", parallel=ParallelSpec(dp=8, ep=8))
    assert args.transformer_values(policy, te=True)["moe_grouped_gemm"]
    assert not args.transformer_values(policy, te=False)["moe_grouped_gemm"]
    params = policy_world(policy, "te").layout(0).params
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    assert {f"{name}{expert}" for expert in range(16)} <= params.keys()
    assert f"{name}16" not in params
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in params
    apart = dataclasses.replace(policy, megatron={"moe_grouped_gemm": False})
    assert not args.transformer_values(apart, te=True)["moe_grouped_gemm"]
    for other, layers in ((apart, "te"), (policy, "local")):
        params = policy_world(other, layers).layout(0).params  # type: ignore[arg-type]
        assert "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight" in params


def test_experts_with_biases_are_not_grouped(installed: None) -> None:
    policy = spec("openai/gpt-oss-20b", megatron={"moe_grouped_gemm": True})
    assert not args.groups_experts(policy, te=True)
    with pytest.raises(ConfigError, match="experts with biases"):
        refuse_wrong_numbers(policy)


def test_float8_is_taken_with_it_in_bfloat16_and_rows_are_whole_blocks(installed: None) -> None:
    parallel = ParallelSpec(tp=2, cp=2)
    policy = spec("Qwen/Qwen3-8B", parallel=parallel, megatron={"fp8": "hybrid"})
    refuse_wrong_numbers(policy)
    assert (parallel.row_multiple, policy.row_multiple) == (8, 64)  # 16 tokens of a row on each rank
    microscaled = dataclasses.replace(policy, megatron={"fp8": "e4m3", "fp8_recipe": "mxfp8"})
    assert microscaled.row_multiple == 128
    blocks = dataclasses.replace(policy, megatron={"fp8": "hybrid", "fp8_recipe": "blockwise"})
    assert blocks.row_multiple == 512  # sequence parallel parts are gathered in blocks of 128 tokens
    assert dataclasses.replace(blocks, parallel=ParallelSpec(cp=2)).row_multiple == 32
    assert spec("Qwen/Qwen3-8B", parallel=parallel).row_multiple == parallel.row_multiple
    for other, said in (
        (dataclasses.replace(policy, dtype="float32"), "need model.dtype bfloat16"),
        (dataclasses.replace(policy, lora=LoraConfig(rank=8)), "adapters"),
        (dataclasses.replace(policy, megatron={"fp8": "hybrid", "fp8_param": True}), "weights in model.dtype"),
    ):
        with pytest.raises(ConfigError, match=said):
            refuse_wrong_numbers(other)


def test_norms_are_not_computed_again_under_delayed_scaling(installed: None) -> None:
    policy = spec("Qwen/Qwen3-8B", recompute="selective", megatron={"fp8": "hybrid"})
    assert args.transformer_values(policy, te=True)["recompute_modules"] == ["core_attn"]
    current = dataclasses.replace(policy, megatron={"fp8": "hybrid", "fp8_recipe": "tensorwise"})
    assert args.transformer_values(current, te=True)["recompute_modules"] == ["core_attn", "layernorm"]
    usual = dataclasses.replace(policy, megatron={})
    assert args.transformer_values(usual, te=True)["recompute_modules"] == ["core_attn", "layernorm"]


@pytest.mark.parametrize("gpus_here", [True, False])
def test_float8_is_refused_without_it_unless_the_gpus_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch, gpus_here: bool
) -> None:
    monkeypatch.setattr(args, "find_spec", lambda name: None)
    monkeypatch.setattr(args.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if gpus_here else None)
    policy = spec("Qwen/Qwen3-8B", megatron={"fp8": "hybrid"})
    assert args.has_transformer_engine(policy) is not gpus_here
    assert not args.has_transformer_engine(dataclasses.replace(policy, megatron={}))
    if not gpus_here:
        refuse_wrong_numbers(policy)
        return
    with pytest.raises(ConfigError, match="TransformerEngine"):
        refuse_wrong_numbers(policy)


@pytest.mark.parametrize(
    ("stages", "device", "batched"), [(2, "cuda", False), (3, "cuda", True), (4, "cuda", True), (4, "cpu", False)]
)
def test_virtual_stages_exchange_as_is_right_for_their_number(stages: int, device: str, batched: bool) -> None:
    policy = spec("Qwen/Qwen3-8B", device, parallel=ParallelSpec(pp=stages, vpp=3))
    values = args.transformer_values(policy, te=False)
    assert (values["batch_p2p_comm"], values["overlap_p2p_comm"]) == (batched, not batched)
    assert values["variable_seq_lengths"]


def test_stages_without_virtual_ones_take_the_default() -> None:
    values = args.transformer_values(spec("Qwen/Qwen3-8B", parallel=ParallelSpec(pp=4)), te=False)
    assert not {"batch_p2p_comm", "overlap_p2p_comm"} & values.keys()
