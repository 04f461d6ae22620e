"""The plan that the search finds, against all that there are, and against those that cannot be run."""

from __future__ import annotations

import pytest

from rlctl.planner.inputs.cluster import make_cluster
from rlctl.planner.inputs.request import Workload
from rlctl.planner.search import feasible_plans
from rlctl.planner.search.feasible_plans import score
from support.catalog_models import make_plan, model

LARGE = Workload(256, 16, 8192)


@pytest.mark.parametrize(
    ("name", "gpu", "nodes", "workload"),
    [
        ("Qwen/Qwen3-30B-A3B", "h100", 1, Workload(32, 8)),
        ("meta-llama/Llama-3.1-8B", "h100", 1, Workload(32, 8)),
        ("Qwen/Qwen3-32B", "h100", 2, Workload()),
        pytest.param("Qwen/Qwen3-30B-A3B", "l40s", 4, Workload(), marks=pytest.mark.slow),
        pytest.param("Qwen/Qwen3-235B-A22B", "h100", 16, LARGE, marks=pytest.mark.slow),
    ],
)
def test_no_combination_of_halves_is_better_than_the_plan(
    monkeypatch: pytest.MonkeyPatch, name: str, gpu: str, nodes: int, workload: Workload
) -> None:
    """The search combines the best layouts of each half; here every layout that fits is combined with every other."""
    facts, cluster = model(name), make_cluster(gpu, nodes)
    made = make_plan(facts, cluster, workload)
    monkeypatch.setattr(feasible_plans, "_worth_combining", lambda candidates, *_: candidates)
    best = make_plan(facts, cluster, workload)
    assert score(made) <= 1.001 * score(best)


@pytest.mark.parametrize(
    ("name", "gpu", "nodes", "workload"),
    [
        ("Qwen/Qwen3-235B-A22B", "h100", 16, LARGE),  # the preset moe-large
        ("Qwen/Qwen3-235B-A22B", "h200", 8, LARGE),
        ("Qwen/Qwen3-30B-A3B", "h100", 2, Workload()),
        ("deepseek-ai/DeepSeek-V3", "b200", 32, Workload(256, 16, 4096)),
        ("Qwen/Qwen3-32B", "h100", 2, Workload()),
    ],
)
def test_the_plan_that_runs_is_as_fast_as_the_best_plan(name: str, gpu: str, nodes: int, workload: Workload) -> None:
    facts, cluster = model(name), make_cluster(gpu, nodes)
    made = make_plan(facts, cluster, workload)
    assert made.runnable
    assert made.total_s <= 1.02 * make_plan(facts, cluster, workload, prefer_runnable=False).total_s
