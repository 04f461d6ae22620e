"""Muon under any parallelism is one process's Muon, on both backends, against float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from rlctl.backends.clients import only_result
from rlctl.config.parallel import ParallelSpec
from support.muon_reference import Float64Muon, run_in_rounds
from support.parallel_cases import WEIGHT, Case, assemble, model_of, run_checkpoint
from support.pool import Pools, Published, slowly
from support.reference_policy import Reference, close, make_batch, run_reference

MEGATRON = {
    "one": Case(),
    "tp2": Case("llama-tied", ParallelSpec(tp=2)),
    "pp2": Case("qwen2", ParallelSpec(pp=2)),
    "dp2": Case("qwen3", ParallelSpec(dp=2)),
    "ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2)),
    "mla-tp2": Case("deepseek", ParallelSpec(tp=2)),
    "etp2": Case("qwen3moe", ParallelSpec(tp=2, etp=2)),
    "experts-tp2": Case("qwen3moe", ParallelSpec(tp=2, ep=2, etp=1)),
    "vpp2": Case("qwen3", ParallelSpec(pp=2, vpp=2), packing=False),
    "host-dp2": Case(parallel=ParallelSpec(dp=2), optimizer_offload=True),
}
DTENSOR = {
    "fsdp-one": Case(backend="dtensor"),
    "fsdp-host": Case(parallel=ParallelSpec(dp=2), optimizer_offload=True, backend="dtensor"),
    "fsdp2": Case("qwen3moe", ParallelSpec(dp=2), backend="dtensor"),
    "fsdp-tp2": Case("qwen3", ParallelSpec(tp=2), backend="dtensor"),
    "fsdp-ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2), backend="dtensor"),
    "fsdp-mla": Case("deepseek", ParallelSpec(dp=2), backend="dtensor"),
    "replicate2": Case("llama-tied", ParallelSpec(dp=2, replicate=2), backend="dtensor"),
}


@cache
def reference(kind: str) -> Reference:
    return run_reference(kind, make_batch(), WEIGHT, hidden=Float64Muon)


def muon(case: Case) -> Case:
    return replace(case, optimizer="muon")


@pytest.mark.parametrize("case", [*slowly(MEGATRON, "tp2", "ep2"), *slowly(DTENSOR, "fsdp2")])
def test_two_steps_equal_float64_muon_in_one_process(pools: Pools, published: Published, case: Case) -> None:
    model, expected = model_of(case, published), reference(case.kind)
    ranks = pools(case.parallel.world_size).run(run_in_rounds, 8192, muon(case), model, make_batch())
    assert all(rounds > 1 for rounds, _ in ranks)
    params, spread = assemble([piece.params for _, piece in ranks])
    assert spread == 0
    theirs = expected.module_params if case.backend == "dtensor" else expected.params
    for name, value in params.items():
        assert close(value, theirs[name], 1e-6), (name, (value - theirs[name]).abs().max())


RESUMES = {
    "dp2": (Case(parallel=ParallelSpec(dp=2), dtype="bfloat16"), None),
    "ep2": (Case("qwen3moe", ParallelSpec(dp=2, ep=2)), None),
    "host": (Case(parallel=ParallelSpec(dp=2), dtype="bfloat16", optimizer_offload=True), None),
    "fsdp2": (Case("qwen3moe", ParallelSpec(dp=2), backend="dtensor"), None),
    "tp2-to-pp2": (Case("llama-tied", ParallelSpec(tp=2)), Case("llama-tied", ParallelSpec(pp=2))),
    "fsdp2-to-tp2": (
        Case("qwen3", ParallelSpec(dp=2), backend="dtensor"),
        Case("qwen3", ParallelSpec(tp=2), backend="dtensor"),
    ),
}
"""By name: the layout before a save and, if another, after it."""


@pytest.mark.parametrize(("before", "after"), slowly(RESUMES, "dp2", "fsdp2"))
def test_a_resume_continues_with_the_same_bits(
    pools: Pools, published: Published, tmp_path: Path, before: Case, after: Case | None
) -> None:
    """Under the same layout; under another one within rounding."""
    model, pool = model_of(before, published), pools(before.parallel.world_size)
    ranks = pool.run(run_checkpoint, muon(before), muon(after or before), model, make_batch(), tmp_path)
    straight, kept, resumed, params, _ = zip(*ranks, strict=True)
    # The share of the movement since the start begins anew.
    results = [replace(only_result([rank[0] for rank in step]), rounded=None) for step in (straight, resumed)]
    wholes = [assemble(list(pieces))[0] for pieces in (kept, params)]
    if after is None:
        assert results[0] == results[1]
        assert all(torch.equal(value, wholes[1][name]) for name, value in wholes[0].items())
    assert all(close(value, wholes[1][name], 1e-6) for name, value in wholes[0].items())
