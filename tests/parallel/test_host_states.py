"""The optimizer's states in host memory between steps: bit for bit what they are on the device, and not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlctl.config.parallel import ParallelSpec
from rlctl.settings.training import LoraConfig
from support.host_state_cases import run_counted, run_resumed, run_steps
from support.parallel_cases import Case
from support.pool import Pools, slowly
from support.reference_policy import make_batch, reference_weights

STEPS = {
    "float32": Case(),
    "bfloat16": Case(dtype="bfloat16"),
    "experts-bfloat16-ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2), "bfloat16"),
    "dp2-bfloat16": Case(parallel=ParallelSpec(dp=2), dtype="bfloat16"),
}
MORE_STEPS = {
    "experts-float32": Case("qwen3moe"),
    "dp2-float32-overlap": Case(
        parallel=ParallelSpec(dp=2), ddp={"overlap_param_gather": True, "overlap_grad_reduce": True}
    ),
    "tp2-bfloat16": Case("llama-tied", ParallelSpec(tp=2), "bfloat16"),
    "pp2-bfloat16": Case("llama-tied", ParallelSpec(pp=2), "bfloat16"),
    "vpp2-float32": Case(parallel=ParallelSpec(pp=2, vpp=2), packing=False),
    "adapters": Case(dtype="bfloat16", lora=LoraConfig(rank=2)),
    "frozen-router": Case("qwen3moe", ParallelSpec(dp=2, ep=2), freeze_router=True),
}
RESUMES = {
    "bfloat16": (Case(dtype="bfloat16"), Case(dtype="bfloat16")),
    "tp2-to-pp2": (Case("llama-tied", ParallelSpec(tp=2)), Case("llama-tied", ParallelSpec(pp=2))),
    "ep2-to-tp2": (
        Case("qwen3moe", ParallelSpec(dp=2, ep=2), "bfloat16"),
        Case("qwen3moe", ParallelSpec(tp=2), "bfloat16"),
    ),
    "dp2": (
        Case(parallel=ParallelSpec(dp=2), dtype="bfloat16"),
        Case(parallel=ParallelSpec(dp=2), dtype="bfloat16"),
    ),
}


@pytest.mark.parametrize("case", slowly(STEPS | MORE_STEPS, guards=STEPS))
def test_states_in_host_memory_change_no_bit(pools: Pools, case: Case) -> None:
    arguments = reference_weights(case.kind), make_batch(), 64 * 1024, True
    for there, here in pools(case.parallel.world_size).run(run_steps, case, *arguments):
        results, params, states, counts, unchanged, on_device, _ = there
        assert on_device > 0
        assert here[5] == 0
        assert here[6] > 1  # parts
        assert unchanged
        assert here[4]
        assert here[0] == results
        assert here[3] == counts == {2.0}
        assert [name for name, _ in params] == [name for name, _ in here[1]]
        assert all(torch.equal(one, other) for (_, one), (_, other) in zip(params, here[1], strict=True))
        for (number, one), (same, other) in zip(states, here[2], strict=True):
            assert number == same
            assert one.keys() == other.keys() == {"param", "exp_avg", "exp_avg_sq"}
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("before", "after"), slowly(RESUMES, guards=("bfloat16", "tp2-to-pp2")))
def test_checkpoints_are_the_same_and_either_goes_on_with_the_other(
    pools: Pools, before: Case, after: Case, tmp_path: Path
) -> None:
    directories = [tmp_path / "device", tmp_path / "host"]
    for directory in directories:
        directory.mkdir()
    pool = pools(before.parallel.world_size)
    ranks = pool.run(run_resumed, before, after, reference_weights(before.kind), make_batch(), directories)
    written = [sorted(path.name for path in directory.iterdir()) for directory in directories]
    assert written[0] == written[1]
    for name in written[0]:
        if name.endswith(".distcp"):
            assert (directories[0] / name).read_bytes() == (directories[1] / name).read_bytes(), name
    for usual, *others in ranks:
        for result, params, states, left in others:
            assert left == 0
            assert result == usual[0]
            assert all(torch.equal(one, other) for (_, one), (_, other) in zip(usual[1], params, strict=True))
            for (_, one), (_, other) in zip(usual[2], states, strict=True):
                assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_count_of_steps_by_param_group_goes_up_once_a_step(pools: Pools) -> None:
    ((steps, parts),) = pools(1).run(run_counted, Case(), reference_weights("llama"), make_batch())
    assert min(parts) > 2
    assert steps == [2, 2]
