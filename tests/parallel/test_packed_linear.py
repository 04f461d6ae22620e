"""Adapters over packed linear layers: the numbers of the dequantized model, in the memory of the packed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from rlctl.backends.base import PolicySpec
from rlctl.backends.clients import only_result
from rlctl.backends.dtensor.lora import AdaptedPackedLinear
from rlctl.backends.dtensor.packed_linear import PackedLinear, load_packed, pack_layers
from rlctl.backends.lookup import policy_backend
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.hf.transformers_model import meta_model
from rlctl.config.parallel import ParallelSpec
from rlctl.errors import ConfigError
from rlctl.settings.training import LoraConfig, OptimizerConfig
from rlctl.weights.adapter_sites import sites
from support.lora_cases import LORA, policy_of
from support.packed_cases import run_packed
from support.parallel_cases import of_family
from support.parallel_families import make_batch
from support.pool import Pools
from support.quantized_bases import write_quantized


def test_a_packed_layer_computes_as_the_dequantized_one(tmp_path: Path) -> None:
    """Products and gradients of the input bit for bit; with adapters as in float64."""
    packed, plain = write_quantized(tmp_path, "awq")
    facts, weights = facts_in(packed), load_file(plain / "model.safetensors")
    inner = meta_model(packed, None)
    pack_layers(inner, facts, torch.bfloat16)
    inner.to_empty(device="cpu")
    load_packed(inner, packed)
    layer: Any = inner.get_submodule("model.layers.1.mlp.down_proj")
    assert type(layer) is PackedLinear
    other = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=torch.bfloat16)
    other.weight.data.copy_(weights["model.layers.1.mlp.down_proj.weight"])
    inputs = torch.randn(2, 5, layer.in_features).bfloat16()
    ours, theirs = (inputs.clone().requires_grad_() for _ in range(2))
    out, expected = layer(ours), other(theirs)
    assert torch.equal(out, expected)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    expected.backward(gradient)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)
    adapted: Any = layer
    adapted.__class__ = AdaptedPackedLinear
    adapted.sites = ((sites(facts, LORA).by_param["model.layers.1.mlp.down_proj.weight"], slice(None)),)  # scale 2
    a, b = (nn.Parameter(torch.randn(size).bfloat16()) for size in ((3, layer.in_features), (layer.out_features, 3)))
    adapted.lora_a, adapted.lora_b = a, b
    exact = F.linear(inputs.double(), other.weight.double() + 2.0 * b.double() @ a.double())
    assert ((adapted(inputs) - exact).abs() <= 0.02 * exact.abs() + 0.02 * exact.abs().mean()).all()


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize("dp", [1, 2])
def test_adapters_are_trained_over_packed_layers(pools: Pools, dp: int, tmp_path: Path) -> None:
    """Base and gradients are the plain model's bit for bit. The reference is the base, and no tensor more."""
    packed, plain = write_quantized(tmp_path, "pack-quantized", symmetric=False)
    facts, run = facts_in(packed), tmp_path / "run"
    case, batch = of_family(facts, ParallelSpec(dp=dp), dtype="bfloat16"), make_batch()
    base = pools(dp).run(run_packed, case, plain, facts_in(plain), batch, None)
    adapted = pools(dp).run(run_packed, case, plain, facts_in(plain), batch, policy_of(tmp_path / "plain-run", plain))
    ranks = pools(dp).run(run_packed, case, packed, facts, batch, policy_of(run, packed))
    for theirs, ours in zip(base, ranks, strict=True):
        assert ours["added"] == 0
        for key, logprobs in theirs["before"].items():
            assert torch.equal(ours["before"][key], logprobs)
            assert torch.equal(ours["reference"][key], logprobs)
            assert not torch.equal(ours["after"][key], logprobs)
            assert torch.equal(ours["loaded"][key], ours["after"][key])
    (first, second), (wanted, after) = (
        [only_result([rank["results"][step] for rank in side]) for step in range(2)] for side in (ranks, adapted)
    )
    assert (first.loss, first.grad_norm) == (wanted.loss, wanted.grad_norm)
    # Over plain layers adapters are merged into weights of bfloat16 for the second step, which rounds their sum.
    assert second.loss == pytest.approx(after.loss, abs=5e-3)
    assert second.grad_norm == pytest.approx(after.grad_norm, rel=0.1)
    # 4 bits of a code, and 3 bytes of scale and zero point for 32 weights
    weights = {name: value.numel() for name, value in load_file(plain / "model.safetensors").items()}
    sizes = {name.removeprefix("inner."): size for name, size in ranks[0]["packed"].items()}
    projections = {name.removesuffix(".weight"): n for name, n in weights.items() if name.endswith("_proj.weight")}
    assert sizes == {name: count // 2 + 3 * count // 32 for name, count in projections.items()}
    assert sum(rank["added"] for rank in base) == 4 * sum(weights.values())  # a policy of all weights copies them


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora": LoraConfig()}, r"weights are packed \(pack-quantized\), so that only adapters train"),
        ({"parallel": ParallelSpec(tp=2)}, r"training\.tp: packed layers are not divided"),
        ({"dtype": "float32"}, r"set model\.dtype=bfloat16"),
    ],
)
def test_settings_without_a_packed_form_are_refused(changes: dict, reason: str, tmp_path: Path) -> None:
    facts = facts_in(write_quantized(tmp_path, "pack-quantized")[0])
    values = {"parallel": ParallelSpec(), "dtype": "bfloat16", "lora": LORA} | changes
    spec = PolicySpec(facts, optimizer=OptimizerConfig(), temperature=1.0, **values)
    with pytest.raises(ConfigError, match=reason):
        policy_backend("dtensor").require(spec)
    with pytest.raises(ConfigError, match=r"megatron trains no packed layers \(pack-quantized\)"):
        policy_backend("megatron").require(spec)
