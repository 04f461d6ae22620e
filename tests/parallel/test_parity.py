"""A policy under any parallelism is the same model, on both backends: against transformers and torch AdamW, in
float32."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache

import pytest

from rlctl.backends.clients import only_result
from rlctl.backends.messages import Truncation
from rlctl.config.parallel import ParallelSpec
from rlctl.data.rollouts import RolloutColumns
from support.parallel_cases import WEIGHT, Case, Piece, assemble, model_of, run_case
from support.pool import Pools, Published, covering, slowly
from support.reference_policy import (
    Optim,
    Reference,
    close,
    hf_model,
    make_batch,
    megatron_weights,
    recorded,
    routed,
    run_reference,
)

TOLERANCE = 1e-6
"""Of loss, gradients, their norm and parameters after two steps, times max(1, |reference|)."""


def batch_of(case: Case) -> dict[int, RolloutColumns]:
    return routed(case.kind, make_batch()) if case.replay else make_batch()


@cache
def reference(kind: str, temperature: float, replay: bool, truncation: Truncation | None = None) -> Reference:
    return run_reference(kind, batch_of(Case(kind, replay=replay)), WEIGHT, temperature, truncation)


def check(pools: Pools, published: Published, case: Case) -> list[Piece]:
    of_modules = case.backend == "dtensor"
    model = model_of(case, published)
    ranks = pools(case.parallel.world_size).run(run_case, case, model, batch_of(case))
    expected = reference(case.kind, case.temperature, case.replay, case.truncation)
    logprobs = {key: value for rank in ranks for key, value in rank.logprobs.items()}
    assert logprobs.keys() == expected.logprobs.keys()
    for key, value in expected.logprobs.items():
        assert close(logprobs[key], value, 1e-5), (
            key
        )  # a log-softmax over logits of size 10: their own rounding is 1e-6
    for step in range(2):
        result = only_result([rank.results[step] for rank in ranks])
        for found, wanted in ((result.loss, expected.losses[step]), (result.grad_norm, expected.norms[step])):
            assert abs(found - wanted) <= TOLERANCE * max(1, abs(wanted))
        assert not result.skipped
        assert result.sums["tokens"] == sum(len(value) for value in expected.logprobs.values())
    first = only_result([rank.results[0] for rank in ranks])
    assert abs(first.sums["entropy"] / sum(float(e.sum()) for e in expected.entropy.values()) - 1) < 1e-5
    assert abs(first.maxima["top"] - max(float(v.abs().max()) for v in expected.logprobs.values())) < 1e-5
    params, spread = assemble([rank.params for rank in ranks])
    assert spread == 0
    theirs, their_grads = expected.params, expected.grads
    if of_modules:
        kept = {name: value for name, value in expected.module_params.items() if name != "lm_head.weight"}
        theirs = expected.module_params if "lm_head.weight" in params else kept
        their_grads = expected.module_grads
    assert params.keys() == theirs.keys()
    for name, value in theirs.items():
        assert close(params[name], value, TOLERANCE), (name, (params[name] - value).abs().max())
    grads, _ = assemble([rank.grads for rank in ranks])
    unclip = (first.grad_norm + 1e-6) / Optim().clip  # clipping scales them in place
    for name, value in their_grads.items():
        assert close(grads[name] * unclip, value, TOLERANCE), (name, (grads[name] * unclip - value).abs().max())
    return ranks


TRUNCATED = Truncation(top_p=0.8, top_k=150, min_p=0.002)
"""Half of the sampled tokens are among those that it keeps."""


def cases_of(table: dict[str, Case], modules: dict[str, Case], guards: Collection[str] = ()) -> list:
    """The cases of a table, and of one on transformers' modules; all but the guards are slow tests, or without guards
    those that add no setting."""
    of_modules = {f"fsdp-{name}": replace(case, backend="dtensor") for name, case in modules.items()}
    if not guards:
        return [*slowly(table, *covering(table)), *slowly(of_modules, *covering(of_modules))]
    return slowly(table | of_modules, guards=guards)


ALONE = {
    "packed": Case(),
    "not-shared": Case(share_prompts=False),
    "not-packed": Case(packing=False),
    "dynamic": Case(packing=False, dynamic=True, micro_batch_tokens=80),
    "one-row": Case(micro_batch_tokens=512),
    "chunks": Case(chunk=7, temperature=0.7),
    "tied": Case("llama-tied", temperature=1.3),
    "qwen2": Case("qwen2"),
    "qwen3": Case("qwen3"),
    "qwen3moe": Case("qwen3moe"),
    "deepseek": Case("deepseek"),
    "recompute-full": Case(recompute="full"),
    "recompute-selective": Case(recompute="selective"),
    "recompute-mlp": Case(recompute="selective", megatron={"recompute_modules": ["mlp"]}),
    "recompute-moe": Case("deepseek", recompute="selective", megatron={"recompute_modules": ["moe", "core_attn"]}),
    "recompute-mla": Case("deepseek", recompute="selective"),
    "truncated": Case(temperature=0.7, truncation=TRUNCATED, chunk=7),
}


MODULES_ALONE = {
    "packed": Case(),
    "not-packed": Case(packing=False, share_prompts=False),
    "chunks": Case("llama-tied", chunk=7, temperature=0.7),
    "recompute-full": Case("qwen3", recompute="full"),
    "recompute-selective": Case("qwen2", recompute="selective"),
    "moe": Case("qwen3moe"),
    "mla": Case("deepseek", recompute="full"),
    "replay": Case("qwen3moe", replay=True, recompute="full"),
}


MODULES_PAIRS = {
    "dp2": Case(parallel=ParallelSpec(dp=2)),
    "dp2-tied-recompute": Case("llama-tied", ParallelSpec(dp=2), packing=False, recompute="full", chunk=7),
    "dp2-states-on-host": Case("qwen3", ParallelSpec(dp=2), optimizer_offload=True),
    "replicate2": Case("qwen2", ParallelSpec(dp=2, replicate=2), share_prompts=False),
    "cp2": Case("qwen3", ParallelSpec(cp=2)),
    "moe-dp2": Case("qwen3moe", ParallelSpec(dp=2)),
    "mla-cp2": Case("deepseek", ParallelSpec(cp=2), recompute="selective"),
    "moe-ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2), recompute="full"),
    "mla-ep2-cp2-replay": Case("deepseek", ParallelSpec(cp=2, ep=2), replay=True),
    "tp2": Case("qwen2", ParallelSpec(tp=2), share_prompts=False),
    "moe-tp2": Case("qwen3moe", ParallelSpec(tp=2), recompute="selective"),
    "mla-tp2-replay": Case("deepseek", ParallelSpec(tp=2), recompute="full", replay=True),
    "tp2-tied-recompute": Case("llama-tied", ParallelSpec(tp=2), recompute="full", chunk=7),
    "tp2-truncated": Case(parallel=ParallelSpec(tp=2), temperature=0.7, truncation=TRUNCATED, chunk=7),
    "cp2-truncated": Case("qwen3", ParallelSpec(cp=2), truncation=Truncation(top_p=0.9)),
}


MODULES_FOURS = {
    "replicate2-shard2": Case(parallel=ParallelSpec(dp=4, replicate=2)),
    "dp2-cp2": Case("llama-tied", ParallelSpec(dp=2, cp=2)),
    "moe-ep2-shard2": Case("qwen3moe", ParallelSpec(dp=4, ep=2)),
    "tp2-dp2": Case("qwen3", ParallelSpec(tp=2, dp=2)),
    "tp2-cp2": Case("llama-tied", ParallelSpec(tp=2, cp=2), recompute="selective"),
    "tp4-of-2-key-heads": Case("qwen2", ParallelSpec(tp=4)),
    "moe-tp2-ep2": Case("qwen3moe", ParallelSpec(tp=2, dp=2, ep=2), recompute="full"),
    "moe-tp2-dp2": Case("qwen3moe", ParallelSpec(tp=2, dp=2)),
    "mla-tp2-cp2-ep2-replay": Case("deepseek", ParallelSpec(tp=2, cp=2, ep=2), replay=True),
    "mla-tp4": Case("deepseek", ParallelSpec(tp=4)),
}


@pytest.mark.parametrize("case", cases_of(ALONE, MODULES_ALONE))
def test_one_process_equals_transformers(pools: Pools, published: Published, case: Case) -> None:
    check(pools, published, case)


PAIRS = {
    "tp2-sp": Case(parallel=ParallelSpec(tp=2)),
    "tp2": Case("llama-tied", ParallelSpec(tp=2, sequence_parallel=False), share_prompts=False),
    "dp2": Case(parallel=ParallelSpec(dp=2)),
    "dp2-uneven": Case("llama-tied", ParallelSpec(dp=2), packing=False, share_prompts=False),
    "dp2-overlap": Case(
        parallel=ParallelSpec(dp=2),
        ddp={"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000},
    ),
    "tp2-chunks": Case("qwen3", ParallelSpec(tp=2), chunk=5),
    "pp2": Case(parallel=ParallelSpec(pp=2)),
    "pp2-tied": Case("llama-tied", ParallelSpec(pp=2), packing=False),
    "pp2-one-micro-batch": Case("qwen3", ParallelSpec(pp=2), micro_batch_tokens=512),
    "vpp2": Case("qwen2", ParallelSpec(pp=2, vpp=2), packing=False),
    "pp2-uneven": Case("llama-tied", ParallelSpec(pp=2, first_stage_layers=1)),
    "vpp2-one-micro-batch": Case(parallel=ParallelSpec(pp=2, vpp=2), micro_batch_tokens=512),
    "cp2": Case(parallel=ParallelSpec(cp=2)),
    "cp2-dynamic": Case("qwen2", ParallelSpec(cp=2), packing=False, dynamic=True),
    "cp2-qwen3": Case("qwen3", ParallelSpec(cp=2), share_prompts=False),
    "ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2)),
    "moe-tp2": Case("qwen3moe", ParallelSpec(tp=2)),
    "moe-tp2-etp1": Case("qwen3moe", ParallelSpec(tp=2, ep=2, etp=1)),
    "moe-pp2": Case("qwen3moe", ParallelSpec(pp=2)),
    "mla-tp2": Case("deepseek", ParallelSpec(tp=2)),
    "mla-ep2": Case("deepseek", ParallelSpec(dp=2, ep=2)),
    "mla-cp2": Case("deepseek", ParallelSpec(cp=2)),
    "mla-pp2": Case("deepseek", ParallelSpec(pp=2)),
    "recompute": Case(parallel=ParallelSpec(tp=2), recompute="full"),
    "recompute-selective": Case("qwen3", ParallelSpec(tp=2), recompute="selective"),
    "tp2-truncated": Case(parallel=ParallelSpec(tp=2), temperature=0.7, truncation=TRUNCATED, chunk=7),
}


@pytest.mark.parametrize("case", cases_of(PAIRS, MODULES_PAIRS))
def test_two_processes_equal_transformers(pools: Pools, published: Published, case: Case) -> None:
    ranks = check(pools, published, case)
    if case.backend == "dtensor" and case.parallel.replicate == 1:
        total = sum(value.numel() for _, value, *_ in ranks[0].params)
        most = 0.51 if case.parallel.tp == 1 else 0.54  # latents and routers are whole on each tensor-parallel rank
        assert max(rank.held for rank in ranks) < most * total


REPLAYED = {
    "packed": Case("qwen3moe", replay=True),
    "not-shared": Case("qwen3moe", replay=True, share_prompts=False),
    "not-packed": Case("deepseek", replay=True, packing=False),
    "recompute-moe": Case(
        "deepseek", replay=True, recompute="selective", megatron={"recompute_modules": ["moe", "core_attn"]}
    ),
    "tp2": Case("qwen3moe", ParallelSpec(tp=2), replay=True),
    "pp2-recompute": Case("qwen3moe", ParallelSpec(pp=2), replay=True, recompute="full"),
    "vpp2-recompute": Case("deepseek", ParallelSpec(pp=2, vpp=2), replay=True, recompute="full"),
    "cp2": Case("deepseek", ParallelSpec(cp=2), replay=True),
    "ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2), replay=True),
    "ep2-tp2-etp1": Case("deepseek", ParallelSpec(tp=2, dp=2, ep=2, etp=1), replay=True),
    "tp2-cp2": Case("qwen3moe", ParallelSpec(tp=2, cp=2), replay=True, recompute="full"),
}
QUICK_REPLAYED = ("packed", "tp2", "pp2-recompute", "cp2")


@pytest.mark.parametrize("case", slowly(REPLAYED, *QUICK_REPLAYED))
def test_experts_that_are_given_are_taken(pools: Pools, published: Published, case: Case) -> None:
    """Drawn at random, so that nearly none is the router's own choice; transformers' routers are given the same."""
    check(pools, published, case)


def test_a_policys_own_experts_change_nothing(pools: Pools) -> None:
    """Recorded from the reference without any given, they lead to what it computes without any given."""
    batch = recorded("qwen3moe", make_batch())
    weights = megatron_weights("qwen3moe", hf_model("qwen3moe").state_dict())
    (found,) = pools(1).run(run_case, Case("qwen3moe", replay=True), weights, batch)
    for key, value in reference("qwen3moe", 1.0, False).logprobs.items():
        assert close(found.logprobs[key], value, 1e-5), key


FOURS = {
    "tp2-pp2": Case("llama-tied", ParallelSpec(tp=2, pp=2)),
    "tp2-dp2-overlap": Case(
        parallel=ParallelSpec(tp=2, dp=2),
        ddp={"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000},
    ),
    "tp2-cp2": Case("qwen3", ParallelSpec(tp=2, cp=2), share_prompts=False),
    "pp2-cp2": Case("qwen2", ParallelSpec(pp=2, cp=2)),
    "pp2-dp2": Case("llama-tied", ParallelSpec(pp=2, dp=2), packing=False),
    "pp4-one-micro-batch": Case("llama-tied", ParallelSpec(pp=4), micro_batch_tokens=512),
    "pp3-uneven": Case("deepseek", ParallelSpec(pp=3, first_stage_layers=1, last_stage_layers=1)),
    "vpp2-tp2": Case(parallel=ParallelSpec(pp=2, vpp=2, tp=2), packing=False),
    "cp2-dp2": Case("llama-tied", ParallelSpec(cp=2, dp=2), recompute="full"),
    "ep2-tp2-etp1": Case("qwen3moe", ParallelSpec(tp=2, dp=2, ep=2, etp=1)),
    "ep2-tp2-etp2": Case("qwen3moe", ParallelSpec(tp=2, dp=2, ep=2, etp=2), packing=False),
    "ep2-pp2": Case("qwen3moe", ParallelSpec(pp=2, dp=2, ep=2)),
    "ep2-cp2": Case("qwen3moe", ParallelSpec(cp=2, dp=2, ep=2)),
    "ep2-dp2": Case("qwen3moe", ParallelSpec(dp=4, ep=2)),
    "mla-ep2-tp2": Case("deepseek", ParallelSpec(tp=2, dp=2, ep=2, etp=1)),
    "mla-pp2-cp2": Case("deepseek", ParallelSpec(pp=2, cp=2), share_prompts=False),
}


GUARDED_FOURS = (
    "ep2-tp2-etp2", "pp3-uneven", "vpp2-tp2", "tp2-cp2", "cp2-dp2",
    "fsdp-moe-tp2-ep2", "fsdp-mla-tp2-cp2-ep2-replay", "fsdp-replicate2-shard2", "fsdp-tp4-of-2-key-heads",
)  # fmt: skip
"""Each size with another one; the models and the other settings are met on one and two processes."""


@pytest.mark.parametrize("case", cases_of(FOURS, MODULES_FOURS, GUARDED_FOURS))
def test_four_processes_equal_transformers(pools: Pools, published: Published, case: Case) -> None:
    check(pools, published, case)
