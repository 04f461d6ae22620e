"""A critic under any parallelism is the same model: against transformers with a head, torch AdamW and plain loops."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from rlctl.backends.clients import only_result
from rlctl.config.parallel import ParallelSpec
from support.critic_cases import (
    HEAD,
    Critics,
    reference_critic,
    require_columns_and_steps,
    run_critic,
    run_critic_changed,
    run_critic_checkpoint,
    run_loaded,
)
from support.parallel_cases import Case, assemble, model_of, of_modules
from support.pool import Pools, Published, slowly
from support.reference_policy import Optim, close, hf_model, make_batch, reference_weights

TOLERANCE = 1e-6


@cache
def reference(kind: str) -> Critics:
    return reference_critic(kind, make_batch())


CASES = {
    "alone": Case("llama-tied"),
    "tp2": Case(parallel=ParallelSpec(tp=2)),
    "dp2": Case("llama-tied", ParallelSpec(dp=2)),
    "pp2": Case("llama-tied", ParallelSpec(pp=2)),
    "cp2": Case(parallel=ParallelSpec(cp=2)),
    "ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2)),
}
MORE_CASES = {
    "not-packed": Case(packing=False),
    "recompute-full": Case("qwen3", recompute="full"),
    "optimizer-offload": Case(optimizer_offload=True),
    "tp2-no-sp": Case("llama-tied", ParallelSpec(tp=2, sequence_parallel=False), share_prompts=False),
    "vpp2": Case("qwen2", ParallelSpec(pp=2, vpp=2), packing=False),
    "mla-tp2": Case("deepseek", ParallelSpec(tp=2)),
    "tp2-pp2": Case("llama-tied", ParallelSpec(tp=2, pp=2)),
    "tp2-cp2": Case("qwen3", ParallelSpec(tp=2, cp=2), share_prompts=False),
    "ep2-tp2-etp1": Case("qwen3moe", ParallelSpec(tp=2, dp=2, ep=2, etp=1)),
    "pp2-dp2": Case(parallel=ParallelSpec(pp=2, dp=2), packing=False),
}


MODULES = {
    "fsdp-alone": of_modules("llama-tied"),
    "fsdp-dp2": of_modules("llama-tied", dp=2),
    "fsdp-tp2": of_modules("llama", "full", tp=2),
    "fsdp-cp2": of_modules("qwen3", "selective", cp=2),
    "fsdp-replicate2": of_modules("qwen2", dp=2, replicate=2),
    "fsdp-ep2": of_modules("qwen3moe", dp=2, ep=2),
    "fsdp-mla-cp2": of_modules("deepseek", cp=2),
    "fsdp-tp2-dp2": of_modules("qwen3", tp=2, dp=2),
    "fsdp-tp2-cp2": of_modules("llama-tied", tp=2, cp=2),
}
CASES |= {name: MODULES.pop(name) for name in ("fsdp-dp2", "fsdp-tp2")}
MORE_CASES |= MODULES


@pytest.mark.parametrize(
    "case",
    [
        *slowly(CASES, *CASES),
        *slowly(MORE_CASES),
    ],
)
def test_values_advantages_and_steps_equal_transformers(pools: Pools, published: Published, case: Case) -> None:
    ranks = pools(case.parallel.world_size).run(run_critic, case, model_of(case, published), make_batch())
    expected = reference(case.kind)
    require_columns_and_steps(ranks, [rank.piece.results for rank in ranks], expected)
    params, spread = assemble([rank.piece.params for rank in ranks])
    assert spread == 0
    assert params.keys() == expected.params.keys()
    for name, value in expected.params.items():
        assert close(params[name], value), (name, (params[name] - value).abs().max())
    first = only_result([rank.piece.results[0] for rank in ranks])
    unclip = max(1.0, (first.grad_norm + 1e-6) / Optim().clip)  # clipping scales them in place
    grads, _ = assemble([rank.piece.grads for rank in ranks])
    assert grads[HEAD].abs().max() > 0
    for name, value in expected.grads.items():
        assert close(grads[name] * unclip, value), (name, (grads[name] * unclip - value).abs().max())


CHECKPOINTS = {
    "alone": (Case(), Case()),
    "dp2-to-tp2": (Case("llama-tied", ParallelSpec(dp=2)), Case("llama-tied", ParallelSpec(tp=2))),
    "fsdp-dp2-to-tp2": (of_modules("llama-tied", dp=2), of_modules("llama-tied", tp=2)),
    "fsdp-alone": (of_modules(), of_modules()),
}


@pytest.mark.parametrize(("before", "after"), slowly(CHECKPOINTS, guards=("alone", "dp2-to-tp2", "fsdp-dp2-to-tp2")))
def test_policy_and_critic_go_on_where_they_were_saved(
    pools: Pools, published: Published, before: Case, after: Case, tmp_path: Path
) -> None:
    directory = tmp_path / "policy"
    directory.mkdir()
    pool = pools(before.parallel.world_size)
    model = model_of(before, published)
    ranks = pool.run(run_critic_checkpoint, before, after, model, make_batch(), directory)
    for model in range(2):
        straight, resumed = (only_result([pair[model] for rank in ranks for pair in rank[i]]) for i in (0, 2))
        if before == after:
            assert straight == resumed
        assert abs(straight.loss - resumed.loss) < 1e-6
    kept, loaded = (assemble([rank[i] for rank in ranks])[0] for i in (1, 3))
    assert kept.keys() == loaded.keys()
    assert f"critic.{HEAD}" in kept
    for name, value in kept.items():
        assert torch.equal(loaded[name], value) if before == after else close(loaded[name], value), name


CHANGED = {
    "alone": Case(),
    "dp2": Case("llama-tied", ParallelSpec(dp=2)),
    "ep2": Case("deepseek", ParallelSpec(dp=2, ep=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CHANGED.values(), ids=CHANGED.keys())
def test_a_run_with_a_critic_may_change_its_backend(
    pools: Pools, published: Published, case: Case, tmp_path: Path
) -> None:
    """The loss and the gradients of the next step of both models agree within rounding."""
    places = [tmp_path / "first", tmp_path / "second"]
    arguments = case, published(case.kind), reference_weights(case.kind), make_batch(), places
    ranks = pools(case.parallel.world_size).run(run_critic_changed, *arguments)
    for part in range(2):
        straight, changed, back = (only_result([rank[i][part] for rank in ranks]) for i in range(3))
        for ours in (changed, back):
            assert abs(ours.loss - straight.loss) <= TOLERANCE
            assert ours.grad_norm == pytest.approx(straight.grad_norm, rel=1e-5)


def test_a_critic_begins_with_the_models_weights_and_a_head_of_zeros(pools: Pools, tmp_path: Path) -> None:
    model = hf_model("llama-tied")
    model.save_pretrained(tmp_path)
    case = Case("llama-tied", ParallelSpec(pp=2))
    params, _ = assemble(pools(2).run(run_loaded, case, tmp_path))
    assert not params.pop(HEAD).any()
    expected = reference_weights("llama-tied")
    assert params.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(params[name], value), name
