"""A critic of transformers' modules is the same model under any sharding: against transformers with a head, torch AdamW
and plain loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from rlctl.backends.clients import only_result
from rlctl.config.parallel import ParallelSpec
from support.critic_cases import HEAD, Critics, reference_critic, require_columns_and_steps
from support.dtensor_critics import run_critic, run_critic_changed, run_critic_checkpoint
from support.parallel_cases import Case
from support.pool import Pool
from support.reference import Optim, close, make_batch, reference_weights

Pools = Callable[[int], Pool]
Published = Callable[[str], Path]
TOLERANCE = 1e-6


@cache
def reference(kind: str) -> Critics:
    return reference_critic(kind, make_batch())


def case_of(kind: str, recompute: str = "none", **sizes: int) -> Case:
    return Case(kind, ParallelSpec(**sizes), recompute=recompute)


CASES = {
    "alone": case_of("llama-tied"),
    "dp2": case_of("llama-tied", dp=2),
    "tp2": case_of("llama", "full", tp=2),
    "cp2": case_of("qwen3", "selective", cp=2),
    "replicate2": case_of("qwen2", dp=2, replicate=2),
    "ep2": case_of("qwen3moe", dp=2, ep=2),
    "mla-cp2": case_of("deepseek", cp=2),
    "tp2-dp2": case_of("qwen3", tp=2, dp=2),
    "tp2-cp2": case_of("llama-tied", tp=2, cp=2),
}
QUICK = ("dp2", "tp2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_values_advantages_and_steps_equal_transformers(pools: Pools, published: Published, name: str) -> None:
    case = CASES[name]
    ranks = pools(case.parallel.world_size).run(run_critic, case, published(case.kind), make_batch())
    expected = reference(case.kind)
    require_columns_and_steps(ranks, [rank.results for rank in ranks], expected)
    params, grads = ranks[0].params, ranks[0].grads
    assert params.keys() == expected.params.keys()
    for key, value in expected.params.items():
        assert close(params[key], value), (key, (params[key] - value).abs().max())
    first = only_result([rank.results[0] for rank in ranks])
    unclip = max(1.0, (first.grad_norm + 1e-6) / Optim().clip)  # clipping scales them in place
    assert grads[HEAD].abs().max() > 0
    for key, value in grads.items():
        assert close(value * unclip, expected.grads[key]), key


CHECKPOINTS = {
    "alone": (case_of("llama"), case_of("llama")),
    "dp2-to-tp2": (case_of("llama-tied", dp=2), case_of("llama-tied", tp=2)),
}


@pytest.mark.parametrize("name", [pytest.param("alone", marks=pytest.mark.slow), "dp2-to-tp2"])
def test_policy_and_critic_go_on_where_they_were_saved(
    pools: Pools, published: Published, name: str, tmp_path: Path
) -> None:
    before, after = CHECKPOINTS[name]
    directory = tmp_path / "policy"
    directory.mkdir()
    model = published(before.kind)
    ranks = pools(before.parallel.world_size).run(run_critic_checkpoint, before, after, model, make_batch(), directory)
    for part in range(2):
        straight, resumed = (only_result([pair[part] for rank in ranks for pair in rank[i]]) for i in (0, 1))
        if before == after:
            assert straight == resumed
        assert abs(straight.loss - resumed.loss) < 1e-6
    kept, loaded = ranks[0][2:]
    assert kept.keys() == loaded.keys()
    for key, value in kept.items():
        assert torch.equal(loaded[key], value) if before == after else close(loaded[key], value), key


CHANGED = {"alone": case_of("llama"), "dp2": case_of("llama-tied", dp=2), "ep2": case_of("deepseek", dp=2, ep=2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_a_run_with_a_critic_may_change_its_backend(
    pools: Pools, published: Published, name: str, tmp_path: Path
) -> None:
    """The loss and the gradients of the next step of both models agree within rounding."""
    case, places = CHANGED[name], [tmp_path / "first", tmp_path / "second"]
    weights = reference_weights(case.kind)
    ranks = pools(case.parallel.world_size).run(
        run_critic_changed, case, published(case.kind), weights, make_batch(), places
    )
    for part in range(2):
        straight, changed, back = (only_result([rank[i][part] for rank in ranks]) for i in range(3))
        for ours in (changed, back):
            assert abs(ours.loss - straight.loss) <= TOLERANCE
            assert ours.grad_norm == pytest.approx(straight.grad_norm, rel=1e-5)
