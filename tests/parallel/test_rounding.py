"""What a policy computes with are its float32 weights, rounded by the one rule, under every layout and on both
backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlctl.config.parallel import ParallelSpec
from support.parallel_cases import WEIGHT, Case
from support.pool import Pool
from support.reference import make_batch, reference_weights, run_reference
from support.rounding_cases import run_changed_backend, run_float16, run_rounded

Pools = Callable[[int], Pool]
Published = Callable[[str], Path]
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


def cells(table: dict[str, Case], *quick: str) -> list:
    return [
        pytest.param(case, id=name, marks=() if name in quick else pytest.mark.slow) for name, case in table.items()
    ]


@pytest.mark.parametrize("case", [*cells(MEGATRON, "host", "dp2", "ep2"), *cells(DTENSOR, "fsdp-one", "fsdp-dp2")])
def test_a_policy_computes_with_the_rounded_weights(pools: Pools, published: Published, case: Case) -> None:
    case = replace(case, dtype="bfloat16")
    model = published(case.kind) if case.backend == "dtensor" else reference_weights(case.kind)
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
def test_float16_trains_with_a_loss_scale_and_is_finer_than_bfloat16(
    pools: Pools, published: Published, backend: str
) -> None:
    expected = run_reference("llama", make_batch(), WEIGHT)
    errors = {}
    for dtype in ("bfloat16", "float16"):
        model = published("llama") if backend == "dtensor" else reference_weights("llama")
        (found,) = pools(1).run(run_float16, Case(dtype=dtype, backend=backend), model, make_batch())
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
