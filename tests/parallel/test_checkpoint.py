"""A saved policy goes on as if nothing had happened: bitwise under the same parallelism, within rounding under
another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.backends.clients import only_result
from rlctl.config.parallel import ParallelSpec
from support.parallel_cases import (
    Case,
    assemble,
    run_checkpoint,
    run_checkpoint_files,
    run_checkpoint_memory,
    run_checkpoint_of_no_step,
)
from support.pool import Pools, slowly
from support.reference_policy import hf_model, make_batch, megatron_weights, reference_weights

SAME = {
    "alone": Case(),
    "tied-tp2": Case("llama-tied", ParallelSpec(tp=2)),
    "dp2": Case(parallel=ParallelSpec(dp=2)),
    "pp2": Case(parallel=ParallelSpec(pp=2)),
    "ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2)),
}
CHANGED = {
    "tp2-to-dp2": (Case(parallel=ParallelSpec(tp=2)), Case(parallel=ParallelSpec(dp=2))),
    "tp2-to-pp2": (Case("llama-tied", ParallelSpec(tp=2)), Case("llama-tied", ParallelSpec(pp=2))),
    "dp2-to-cp2": (Case(parallel=ParallelSpec(dp=2)), Case(parallel=ParallelSpec(cp=2))),
    "pp2-to-vpp2": (Case(parallel=ParallelSpec(pp=2)), Case(parallel=ParallelSpec(pp=2, vpp=2), packing=False)),
    "ep2-to-tp2": (Case("qwen3moe", ParallelSpec(dp=2, ep=2)), Case("qwen3moe", ParallelSpec(tp=2))),
    "tp2-to-ep2": (Case("deepseek", ParallelSpec(tp=2)), Case("deepseek", ParallelSpec(dp=2, ep=2))),
}


def run(pools: Pools, before: Case, after: Case, directory: Path, by_megatron: bool = False) -> tuple:
    directory.mkdir()
    weights = megatron_weights(before.kind, hf_model(before.kind).state_dict())
    pool = pools(before.parallel.world_size)
    ranks = pool.run(run_checkpoint, before, after, weights, make_batch(), directory, by_megatron)
    straight, resumed = (only_result([result for rank in ranks for result in rank[i]]) for i in (0, 2))
    kept, loaded = (assemble([rank[i] for rank in ranks])[0] for i in (1, 3))
    return straight, resumed, kept, loaded


@pytest.mark.parametrize("case", slowly(SAME, "pp2", guards=("tied-tp2", "ep2")))
def test_same_parallelism_is_bitwise(pools: Pools, case: Case, tmp_path: Path) -> None:
    straight, resumed, kept, loaded = run(pools, case, case, tmp_path / "policy")
    assert straight == resumed
    for name, value in kept.items():
        assert torch.equal(loaded[name], value), name


@pytest.mark.parametrize("case", slowly({"dp2": SAME["dp2"], "ep2": SAME["ep2"]}, "ep2"))
def test_data_parallel_ranks_write_the_weights_together(pools: Pools, case: Case, tmp_path: Path) -> None:
    """Of 12 bytes a weight in float32, 4 are held by both ranks: one rank would write 8 and the other one 4."""
    weights = megatron_weights(case.kind, hf_model(case.kind).state_dict())
    ranks = pools(2).run(run_checkpoint_files, case, weights, make_batch(), tmp_path)
    for sizes in zip(*(sizes for sizes, _, _ in ranks), strict=True):
        assert max(sizes) < 1.2 * min(sizes), sizes
    kept, loaded = (assemble([rank[i] for rank in ranks])[0] for i in (1, 2))
    assert kept.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], value) for name, value in kept.items())


HOSTED = Case(dtype="bfloat16", optimizer_offload=True)


@pytest.mark.parametrize(
    "case", slowly({"alone": Case(), "dp2": SAME["dp2"], "ep2": SAME["ep2"], "hosted": HOSTED}, "ep2", "hosted")
)
def test_a_policy_that_has_taken_no_step_is_saved(pools: Pools, case: Case, tmp_path: Path) -> None:
    weights = megatron_weights(case.kind, hf_model(case.kind).state_dict())
    (tmp_path / "policy").mkdir()
    pool = pools(case.parallel.world_size)
    ranks = pool.run(run_checkpoint_of_no_step, case, weights, make_batch(), tmp_path / "policy")
    straight, saved, loaded = ([rank[run] for rank in ranks] for run in range(3))
    plain = assemble([params for _, params in straight])[0]
    for others in (saved, loaded):
        assert [result for result, _ in others] == [result for result, _ in straight]
        after = assemble([params for _, params in others])[0]
        assert all(torch.equal(after[name], value) for name, value in plain.items())


@pytest.mark.parametrize(
    ("before", "after"), slowly(CHANGED, guards=("tp2-to-pp2", "dp2-to-cp2", "pp2-to-vpp2", "tp2-to-ep2"))
)
def test_other_parallelism_is_within_rounding(pools: Pools, before: Case, after: Case, tmp_path: Path) -> None:
    assert_goes_on(*run(pools, before, after, tmp_path / "policy"))


def test_whole_tensors_as_megatron_gathers_them_are_read_as_well(pools: Pools, tmp_path: Path) -> None:
    case = Case("qwen3moe", ParallelSpec(dp=2, ep=2))  # two optimizers, and then one
    after = Case("qwen3moe", ParallelSpec(tp=2))
    assert_goes_on(*run(pools, case, after, tmp_path / "policy", by_megatron=True))


def assert_goes_on(straight: Any, resumed: Any, kept: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    assert abs(straight.loss - resumed.loss) < 1e-6
    assert abs(straight.grad_norm / resumed.grad_norm - 1) < 1e-5
    assert kept.keys() == loaded.keys()
    for name, value in kept.items():
        assert (loaded[name] - value).abs().max() < 1e-6, name


@pytest.mark.parametrize("kind", ["llama", "qwen3moe"])
def test_no_rank_gathers_states_of_others_for_a_checkpoint(pools: Pools, kind: str, tmp_path: Path) -> None:
    case = Case(kind, ParallelSpec(dp=2), "bfloat16")
    for held, own, memory in pools(2).run(run_checkpoint_memory, case, reference_weights(kind), make_batch(), tmp_path):
        (saving, gathered), (loading, read) = memory
        assert gathered == read == 0
        # On a CPU the snapshot is of the same memory; on a device it is on the host. Descriptions and what Python has
        # not collected yet are some hundred thousand bytes; the other rank's states would be as many as `own`.
        assert saving < held + 1.5 * own
        assert loading < held + 0.3 * own
