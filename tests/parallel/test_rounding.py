"""What a policy computes with are its float32 weights, rounded by the one rule, under every layout and on both
backends."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.backends.base import Dtype
from rlctl.config.parallel import ParallelSpec
from rlctl.settings.training import LoraConfig
from support.parallel_cases import WEIGHT, Case, model_of
from support.pool import Pools, Published, slowly
from support.reference_policy import make_batch, reference_weights, run_reference
from support.rounding_cases import run_changed_backend, run_critic, run_export, run_float16, run_rounded

MEGATRON = {
    "one": Case(),
    "host": Case(optimizer_offload=True),
    "dp2": Case(parallel=ParallelSpec(dp=2)),
    "ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2)),
    "tp2": Case("llama-tied", ParallelSpec(tp=2)),
    "pp2": Case("llama-tied", ParallelSpec(pp=2)),
    "dp2-host-overlap": Case(
        parallel=ParallelSpec(dp=2),
        optimizer_offload=True,
        ddp={"overlap_param_gather": True, "overlap_grad_reduce": True},
    ),
}
DTENSOR = {
    "fsdp-one": Case(backend="dtensor"),
    "fsdp-dp2": Case("llama-tied", ParallelSpec(dp=2), backend="dtensor"),
    "fsdp-tp2": Case("qwen3", ParallelSpec(tp=2), backend="dtensor"),
    "fsdp-ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2), backend="dtensor"),
}


@pytest.mark.parametrize(
    "case", [*slowly(MEGATRON, "dp2", guards=("host", "ep2")), *slowly(DTENSOR, "fsdp-dp2", guards=("fsdp-one",))]
)
def test_a_policy_computes_with_the_rounded_weights(pools: Pools, published: Published, case: Case) -> None:
    case = replace(case, dtype="bfloat16")
    model = model_of(case, published)
    for before, *after in pools(case.parallel.world_size).run(run_rounded, case, model, make_batch()):
        assert before[0]
        for same, differing, values in after:
            assert same
            assert differing > 0.01 * values


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_another_backend_gives_the_same_bits(pools: Pools, published: Published, tmp_path: Path, world: int) -> None:
    case = Case("llama-tied", ParallelSpec(dp=world), "bfloat16")
    places = [tmp_path / name for name in ("megatron", "dtensor")]
    for place in places:
        place.mkdir()
    found = pools(world).run(
        run_changed_backend, case, published(case.kind), reference_weights(case.kind), make_batch(), places
    )
    for held, back, masters, again in found:
        assert held.keys() == back.keys()
        assert all(torch.equal(value, back[name]) for name, value in held.items())
        assert all(torch.equal(value, again[name]) for name, value in masters.items())


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_a_critic_computes_with_the_rounded_weights(pools: Pools, published: Published, backend: str) -> None:
    case = Case("llama-tied", dtype="bfloat16", backend=backend)
    model = model_of(case, published)
    ((result, (same, differing, values)),) = pools(1).run(run_critic, case, model, make_batch())
    assert same
    assert differing > 0.01 * values
    assert abs(result.rounded.carried - 1) < 0.1


@pytest.mark.parametrize(
    ("backend", "dtype", "rank"),
    [
        ("megatron", "bfloat16", 4),
        ("megatron", "float16", 0),
        ("dtensor", "bfloat16", 0),
        ("dtensor", "float16", 4),
        *(pytest.param("megatron", *one, marks=pytest.mark.slow) for one in (("bfloat16", 0), ("float16", 4))),
        *(pytest.param("dtensor", *one, marks=pytest.mark.slow) for one in (("bfloat16", 4), ("float16", 0))),
    ],
)
def test_an_export_is_what_the_engine_held(
    pools: Pools, published: Published, tmp_path: Path, backend: str, dtype: Dtype, rank: int
) -> None:
    """Bit for bit, merged adapters too; and so is a policy that generates from the checkpoint."""
    case, directory = Case("qwen3", dtype=dtype, lora=LoraConfig(rank=rank), backend=backend), published("qwen3")
    if backend == "megatron" and rank:  # a run of Megatron's begins with a checkpoint that was converted to its dtype
        directory = shutil.copytree(directory, tmp_path / "base")
        weights = load_file(directory / "model.safetensors")
        narrow = {name: value.to(getattr(torch, dtype)) for name, value in weights.items()}
        save_file(narrow, directory / "model.safetensors", {"format": "pt"})
    ((held, again),) = pools(1).run(run_export, case, directory, reference_weights(case.kind), make_batch(), tmp_path)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == held.keys() == again.keys()
    assert {value.dtype for value in exported.values()} == {getattr(torch, dtype)}
    assert [name for name, value in exported.items() if not torch.equal(value, held[name])] == []
    assert [name for name, value in again.items() if not torch.equal(value, held[name])] == []


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_float16_trains_with_a_loss_scale_and_is_finer_than_bfloat16(
    pools: Pools, published: Published, backend: str
) -> None:
    expected = run_reference("llama", make_batch(), WEIGHT)
    errors = {}
    for dtype in ("bfloat16", "float16"):
        case = Case(dtype=dtype, backend=backend)
        (found,) = pools(1).run(run_float16, case, model_of(case, published), make_batch())
        logprobs, (first, broken, last) = found
        errors[dtype] = torch.cat([(value - expected.logprobs[key]).abs() for key, value in logprobs.items()]).mean()
        assert (first.skipped, broken.skipped, last.skipped) == (False, True, False)
        assert abs(first.loss - expected.losses[0]) < 0.02 * abs(expected.losses[0])
        assert abs(first.grad_norm - expected.norms[0]) < 0.05 * expected.norms[0]
        scales = [result.loss_scale for result in (first, broken, last)]
        assert scales == ([65536.0, 65536.0, 32768.0] if dtype == "float16" else [None, None, None])
        assert broken.rounded is None
        for result in (first, last):
            assert abs(result.rounded.carried - 1) < 0.1
            assert 0 < result.rounded.changed_step <= 1
    assert errors["float16"] < errors["bfloat16"] / 4
