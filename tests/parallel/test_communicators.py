"""The plan counts the groups that a rank really uses, each of which has a communicator of NCCL on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.config.parallel import ParallelSpec
from rlctl.planner.choice import TrainingChoice
from rlctl.planner.costs.communicators import communicators
from support.parallel_cases import Case, model_of, of_modules, run_communicators
from support.pool import Pools, Published, slowly
from support.reference_policy import facts, make_batch

CASES = {
    "dp2": Case(parallel=ParallelSpec(dp=2), dtype="bfloat16"),
    "tp2": Case(parallel=ParallelSpec(tp=2)),
    "pp2": Case(parallel=ParallelSpec(pp=2)),
    "tied-pp2": Case("llama-tied", ParallelSpec(pp=2)),
    "cp2-dp2": Case(parallel=ParallelSpec(cp=2, dp=2)),
    "ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2)),
    "expert-bias": Case("deepseek", ParallelSpec(tp=2, dp=2, ep=2, etp=1)),
    "expert-tp2": Case("qwen3moe", ParallelSpec(tp=2, dp=2, ep=2)),
    "modules-dp2": of_modules(dp=2),
    "modules-tp2": of_modules(tp=2),
    "modules-replicate2": of_modules(dp=4, replicate=2),
    "modules-cp2": of_modules(dp=2, cp=2),
    "modules-dp2-tp2": of_modules(dp=2, tp=2),
    "modules-cp2-tp2": of_modules(cp=2, tp=2),
    "modules-ep2": of_modules("qwen3moe", dp=2, ep=2),
    "modules-dp4-ep2": of_modules("qwen3moe", dp=4, ep=2),
    "modules-replicate2-ep2": of_modules("qwen3moe", dp=4, ep=2, replicate=2),
}


@pytest.mark.parametrize("case", slowly(CASES, "tied-pp2", guards=("expert-bias", "modules-dp2-tp2")))
def test_the_plan_counts_the_groups_that_a_step_and_a_save_use(
    pools: Pools, published: Published, tmp_path: Path, case: Case
) -> None:
    """Torch counts the collectives and messages of each group."""
    ranks = pools(case.parallel.world_size).run(
        run_communicators, case, model_of(case, published), make_batch(), tmp_path
    )
    sharding = "full" if case.backend == "dtensor" else "optimizer"
    planned = communicators(facts(case.kind), TrainingChoice(case.parallel, sharding=sharding))
    assert max(len(used) for used in ranks) == planned, ranks
