"""What the configuration passes through arrives in Megatron's own configuration objects of a running worker."""

from __future__ import annotations

import pytest

from rlctl.backends.base import PolicySpec
from rlctl.backends.megatron.args import optimizer_values, transformer_values
from rlctl.backends.megatron.compat import make_config
from rlctl.errors import ConfigError
from rlctl.methods.configuration import resolve
from support.parallel_cases import run_built_configs
from support.pool import Pools
from support.reference_policy import facts


def spec_with(*sets: str) -> PolicySpec:
    config = resolve(sets=sets, environment={}).config
    return PolicySpec(
        facts("qwen3moe"),
        optimizer=config.optimizer,
        threads=1,
        megatron=config.megatron.passed,
        ddp=config.ddp.passed,
    )


def test_fields_reach_the_worker_and_others_stay(pools: Pools) -> None:
    plain = pools(1).run(run_built_configs, spec_with())[0]
    passed = pools(1).run(
        run_built_configs,
        spec_with(
            "megatron.moe_router_dtype=fp64",
            "megatron.moe_per_layer_logging=true",
            "ddp.overlap_grad_reduce=true",  # without it Megatron itself drops the size
            "ddp.bucket_size=4096",
            "ddp.grad_reduce_in_fp32=false",
            "optimizer.decoupled_weight_decay=false",
            "optimizer.adam_beta2=0.95",
        ),
    )[0]
    assert (plain[0]["moe_router_dtype"], passed[0]["moe_router_dtype"]) == ("fp32", "fp64")
    changed = {key for key in plain[0] if plain[0][key] != passed[0].get(key)}
    assert changed == {"moe_router_dtype", "moe_per_layer_logging"}
    assert passed[1].bucket_size == 4096
    assert (plain[1].grad_reduce_in_fp32, passed[1].grad_reduce_in_fp32) == (True, False)
    assert (plain[2].decoupled_weight_decay, passed[2].decoupled_weight_decay) == (True, False)
    assert passed[2].adam_beta2 == 0.95


def test_data_types_and_enumerations_are_given_as_words() -> None:
    import torch
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    spec = spec_with("megatron.attention_backend=unfused")
    values = transformer_values(spec, te=False) | {"activation_func": torch.nn.functional.silu}
    config = make_config(TransformerConfig, values, spec.megatron, "megatron")
    assert config.attention_backend is AttnBackend.unfused
    assert config.params_dtype is torch.float32
    assert make_config(OptimizerConfig, optimizer_values(spec), {}, "optimizer").params_dtype is torch.float32


def test_what_megatron_refuses_is_said_in_its_words() -> None:
    from megatron.core.optimizer import OptimizerConfig

    spec = spec_with("optimizer.exp_avg_dtype=bf16")  # only for the precision-aware optimizer
    with pytest.raises(ConfigError, match="exp_avg_dtype can only be fp32"):
        make_config(OptimizerConfig, optimizer_values(spec), spec.optimizer.passed, "optimizer")
