"""What would train on wrong gradients without an error is refused by its name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlctl.backends.base import PolicySpec
from rlctl.backends.lookup import policy_backend
from rlctl.backends.megatron.backend import refuse_wrong_numbers
from rlctl.config.parallel import ParallelSpec
from rlctl.errors import ConfigError
from rlctl.models.catalog import lookup
from rlctl.models.facts import RopeFacts
from rlctl.settings.training import LoraConfig, OptimizerConfig, QuantizationConfig

FACTS = lookup("SmolLM2-135M")


def spec(parallel: ParallelSpec, device: str = "cpu", **megatron: object) -> PolicySpec:
    assert FACTS is not None
    return PolicySpec(FACTS, parallel, device=device, megatron=megatron)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parallel", "key", "value"),
    [
        (ParallelSpec(), "cross_entropy_loss_fusion", True),
        (ParallelSpec(), "attention_dropout", 0.1),
        (ParallelSpec(), "hidden_dropout", 0.1),
        (ParallelSpec(), "moe_input_jitter_eps", 1e-2),
        (ParallelSpec(), "moe_expert_capacity_factor", 1.0),
        (ParallelSpec(), "moe_router_force_load_balancing", True),
        (ParallelSpec(), "moe_aux_loss_coeff", [0.0, 0.01]),
        (ParallelSpec(), "moe_aux_loss_coeff", -0.01),
        (ParallelSpec(), "moe_z_loss_coeff", -1e-3),
        (ParallelSpec(), "fp8", "hybrid"),
        (ParallelSpec(), "fp8_param", True),
        (ParallelSpec(), "fp8_recipe", "blockwise"),
        (ParallelSpec(), "fp4", "e2m1"),
        (ParallelSpec(), "moe_grouped_gemm", True),
        (ParallelSpec(), "transformer_impl", "transformer_engine"),
        (ParallelSpec(), "transformer_impl", "inference_optimized"),
        (ParallelSpec(pp=2), "deallocate_pipeline_outputs", True),
        (ParallelSpec(pp=2, vpp=2), "overlap_p2p_comm", False),
        (ParallelSpec(pp=2, vpp=2), "batch_p2p_comm", True),
    ],
)
def test_wrong_numbers_are_refused_with_the_reason(parallel: ParallelSpec, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"megatron\.{key}.*: ") as error:
        refuse_wrong_numbers(spec(parallel, **{key: value}))
    assert error.value.hint


def test_what_is_right_elsewhere_is_not_refused_there() -> None:
    refuse_wrong_numbers(spec(ParallelSpec(pp=2), "cuda", deallocate_pipeline_outputs=True))
    refuse_wrong_numbers(spec(ParallelSpec(), deallocate_pipeline_outputs=True))
    refuse_wrong_numbers(spec(ParallelSpec(pp=2, vpp=2), overlap_p2p_comm=True, moe_aux_loss_coeff=0.0))


@pytest.mark.parametrize("kind", ["none", "sinkhorn", "seq_aux_loss", "global_aux_loss", ["aux_loss", "seq_aux_loss"]])
def test_a_load_balance_loss_needs_its_type_and_routers_that_learn(kind: object) -> None:
    moe = lookup("Qwen/Qwen3-30B-A3B")
    assert moe is not None
    given = {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 1e-3}
    for accepted in ({}, {"moe_router_load_balancing_type": "aux_loss"}):
        refuse_wrong_numbers(PolicySpec(moe, megatron=given | accepted))
    refuse_wrong_numbers(PolicySpec(moe, megatron={"moe_router_load_balancing_type": "none"}, freeze_router=True))
    with pytest.raises(ConfigError, match=r"megatron\.moe_router_load_balancing_type .*set it to aux_loss"):
        refuse_wrong_numbers(PolicySpec(moe, megatron=given | {"moe_router_load_balancing_type": kind}))
    for one in given:
        with pytest.raises(ConfigError, match=rf"megatron\.{one} .*training\.freeze_router"):
            refuse_wrong_numbers(PolicySpec(moe, megatron={one: 0.01}, freeze_router=True))


def test_router_replay_is_refused_where_no_router_would_ask() -> None:
    moe = lookup("Qwen/Qwen3-30B-A3B")
    assert FACTS is not None
    assert moe is not None
    refuse_wrong_numbers(PolicySpec(moe, router_replay=True))
    with pytest.raises(ConfigError, match=r"training\.router_replay is on, but the model has no experts"):
        refuse_wrong_numbers(PolicySpec(FACTS, router_replay=True))
    for key, value in (("moe_router_fusion", True), ("moe_router_load_balancing_type", "sinkhorn")):
        with pytest.raises(ConfigError, match=rf"megatron\.{key} .*training\.router_replay"):
            refuse_wrong_numbers(PolicySpec(moe, router_replay=True, megatron={key: value}))


@pytest.mark.parametrize("key", ["use_precision_aware_optimizer", "optimizer_cuda_graph"])
def test_states_in_host_memory_are_adams_own(key: str) -> None:
    assert FACTS is not None
    passed = OptimizerConfig(**{key: True})
    refuse_wrong_numbers(PolicySpec(FACTS, optimizer=passed))
    with pytest.raises(ConfigError, match=rf"optimizer\.{key} .*training\.optimizer_offload"):
        refuse_wrong_numbers(PolicySpec(FACTS, optimizer=passed, optimizer_offload=True))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dtype": "float32"}, "format is refused: weights are rounded from bfloat16"),
        ({"quantization": QuantizationConfig(format="nvfp4", tensors=("*router*",))}, "no linear layer of the model"),
        ({"parallel": ParallelSpec(tp=9)}, "block is refused: each rank has 170.667 of the inputs of model.layers.0"),
        ({"facts": lookup("gpt-oss-20b")}, "holds more than one matrix"),
        ({"megatron": {"fp8": "hybrid"}, "device": "cuda"}, "float8 products would round"),
    ],
)
def test_what_quantization_does_not_go_with_is_refused(more: dict, said: str) -> None:
    settings = QuantizationConfig(format="nvfp4")
    assert FACTS is not None
    whole = PolicySpec(FACTS, dtype="bfloat16", quantization=settings)
    refuse_wrong_numbers(whole)
    with pytest.raises(ConfigError, match=said):
        refuse_wrong_numbers(replace(whole, **more))


def test_an_attention_factor_that_megatron_cannot_compute_is_refused_before_anything_starts() -> None:
    yarn = RopeFacts(1e4, "yarn", {"factor": 4.0, "original_max_position_embeddings": 64.0})
    for scaled, words in (
        (replace(yarn, scaling=yarn.scaling | {"attention_factor": 0.9}), "attention factor of 0.9"),
        (yarn, "latent attention"),
    ):
        facts = lookup("deepseek-ai/DeepSeek-V3") if "latent" in words else FACTS
        assert facts is not None
        with pytest.raises(ConfigError, match=words):
            refuse_wrong_numbers(PolicySpec(replace(facts, rope=scaled)))
    gemma = lookup("google/gemma-3-1b-it")
    assert gemma is not None
    refuse_wrong_numbers(PolicySpec(replace(gemma, rope=yarn)))  # scores of each kind of layers have its own


def test_experts_that_are_published_in_one_tensor_have_no_adapters() -> None:
    """gpt-oss publishes the experts of a layer in one tensor, Qwen3-MoE in one for each."""
    stacked, single = lookup("openai/gpt-oss-20b"), lookup("Qwen/Qwen3-30B-A3B")
    assert stacked is not None
    assert single is not None
    lora = LoraConfig(rank=4, targets=("experts.gate_up_proj",))
    refuse_wrong_numbers(PolicySpec(replace(single, layers=1), lora=lora))
    with pytest.raises(ConfigError, match=r"targets is refused: .*experts\.gate_up_proj is published in one tensor"):
        refuse_wrong_numbers(PolicySpec(replace(stacked, layers=1), lora=lora))
    divided = PolicySpec(
        replace(stacked, layers=1), lora=lora, parallel=ParallelSpec(tp=2, etp=2, sequence_parallel=True)
    )
    with pytest.raises(ConfigError, match=r"training\.tp = 2 is refused: adapters on .*gate_up_proj") as caught:
        policy_backend("dtensor").require(divided)
    assert "megatron" not in str(caught.value.hint)
    assert "Set training.tp=1" in str(caught.value.hint)
    policy_backend("dtensor").require(replace(divided, parallel=ParallelSpec(ep=2, dp=2)))


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_a_router_with_an_adapter_is_not_frozen(backend: str) -> None:
    facts = lookup("Qwen/Qwen3-30B-A3B")
    assert facts is not None
    spec = PolicySpec(replace(facts, layers=1), lora=LoraConfig(rank=4, targets=("mlp.gate",)), freeze_router=True)
    with pytest.raises(ConfigError, match=r"training\.freeze_router is refused: .*adapter on the router .*mlp\.gate"):
        policy_backend(backend).require(spec)
    policy_backend(backend).require(replace(spec, freeze_router=False))
