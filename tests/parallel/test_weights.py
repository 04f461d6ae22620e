"""Loading a Hugging Face directory gives every rank the weights that the hand-written map gives it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlctl.checkpoints.conversion.hf_megatron import hf_to_megatron
from rlctl.config.parallel import ParallelSpec
from support.parallel_cases import Case, assemble, run_held, run_load_hf
from support.pool import Pools, covering, slowly
from support.reference_policy import hf_model, megatron_weights

CASES = {
    "alone": Case(),
    "tied-tp2": Case("llama-tied", ParallelSpec(tp=2)),
    "tied-pp2": Case("llama-tied", ParallelSpec(pp=2)),
    "vpp2": Case(parallel=ParallelSpec(pp=2, vpp=2)),
    "qwen2-tp2": Case("qwen2", ParallelSpec(tp=2)),
    "qwen3-tp2": Case("qwen3", ParallelSpec(tp=2)),
    "qwen3moe-ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2)),
    "qwen3moe-tp2": Case("qwen3moe", ParallelSpec(tp=2)),
    "deepseek-tp2": Case("deepseek", ParallelSpec(tp=2)),
    "deepseek-pp2": Case("deepseek", ParallelSpec(pp=2)),
    "deepseek-ep2": Case("deepseek", ParallelSpec(dp=2, ep=2)),
}


@pytest.mark.parametrize("name", ["tied-pp2", "qwen2-tp2", "deepseek-ep2"])
def test_load_a_megatron_checkpoint(pools: Pools, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = hf_model(case.kind)
    model.save_pretrained(tmp_path / "hf")
    hf_to_megatron(tmp_path / "hf", tmp_path / "ckpt")
    params, _ = assemble(pools(case.parallel.world_size).run(run_load_hf, case, tmp_path / "ckpt"))
    for name, value in megatron_weights(case.kind, model.state_dict()).items():
        assert torch.equal(params[name], value), name


@pytest.mark.parametrize("case", slowly(CASES, *covering(CASES)))
def test_load_hf(pools: Pools, case: Case, tmp_path: Path) -> None:
    model = hf_model(case.kind)
    model.save_pretrained(tmp_path)
    params, spread = assemble(pools(case.parallel.world_size).run(run_load_hf, case, tmp_path))
    expected = megatron_weights(case.kind, model.state_dict())
    assert spread == 0
    assert params.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(params[name], value), name


def test_a_router_bias_is_not_rounded_in_bfloat16(pools: Pools, tmp_path: Path) -> None:
    model = hf_model("deepseek")
    biases = {name: value for name, value in model.state_dict().items() if name.endswith("e_score_correction_bias")}
    for value in biases.values():
        value.copy_(torch.randn(value.shape))
    model.save_pretrained(tmp_path)
    (held,) = pools(1).run(run_held, Case("deepseek", dtype="bfloat16"), tmp_path)
    found = {name: value for name, value in held.items() if name.endswith("expert_bias")}
    assert len(found) == len(biases) > 0
    assert all(value.dtype == torch.float32 for value in found.values())
    assert sorted(map(torch.Tensor.tolist, found.values())) == sorted(map(torch.Tensor.tolist, biases.values()))
    assert {value.dtype for name, value in held.items() if name not in found} == {torch.bfloat16}
