"""What else a policy worker promises: packed rollouts do not see each other, broken steps are skipped, the reference
stays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rlctl.backends.clients import only_result
from rlctl.backends.results import NORM_CHUNK
from rlctl.config.parallel import ParallelSpec
from rlctl.methods.rl.gspo import Gspo
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.settings.training import LoraConfig
from rlctl.training.run_loss import RunLoss
from support.parallel_cases import (
    Case,
    assemble,
    model_of,
    plan_of,
    run_asleep,
    run_broken,
    run_case,
    run_gradient_norm,
    run_logprobs,
    run_meeting,
    run_reference_policy,
    run_squares,
    run_without,
)
from support.pool import Pools, Published
from support.reference_policy import Optim, hf_model, make_batch, reference_weights


@pytest.mark.parametrize("share", [True, False])
def test_no_rollout_sees_another(pools: Pools, share: bool) -> None:
    batch = make_batch(seed=11)
    changed = dict(batch)
    tokens, last = batch[2].tokens_T.copy(), batch[2].slice(1)
    tokens[last.stop - 3 : last.stop] = (tokens[last.stop - 3 : last.stop] + 1) % 200  # the end of one completion
    changed[2] = dataclasses.replace(batch[2], tokens_T=tokens)
    before, after = pools(1).run(
        run_logprobs, Case(share_prompts=share, micro_batch_tokens=512), reference_weights("llama"), [batch, changed]
    )[0]
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]) == (key != (2, 1)), key


@pytest.mark.parametrize("kind", ["qwen3", "deepseek"])
def test_units_are_attended_a_completion_at_a_time_with_the_same_outcome(pools: Pools, kind: str) -> None:
    whole, parts = pools(1).run(run_squares, Case(kind), reference_weights(kind), make_batch())[0]
    for key, value in whole.logprobs.items():
        assert torch.allclose(value, parts.logprobs[key], rtol=0, atol=2e-6)
    for (name, value, *_), (_, other, *_) in zip(whole.params, parts.params, strict=True):
        assert torch.allclose(value, other, rtol=0, atol=1e-6), name


def test_shared_prompts_save_tokens_and_change_nothing_else(pools: Pools) -> None:
    case = Case(micro_batch_tokens=512)
    plain = dataclasses.replace(case, share_prompts=False)
    batch = make_batch()
    saved = plan_of(plain, batch).stats.tokens - plan_of(case, batch).stats.tokens
    assert saved == sum((c.rollouts - 1) * int(np.argmax(c.loss_mask_T)) for c in batch.values())
    shared, alone = (pools(1).run(run_case, each, reference_weights("llama"), batch)[0] for each in (case, plain))
    for (name, value, *_), (_, other, *_) in zip(shared.grads, alone.grads, strict=True):
        assert torch.allclose(value, other, rtol=0, atol=1e-7), name
    assert shared.tokens == alone.tokens - saved


@pytest.mark.parametrize(
    "case", [Case(), Case(parallel=ParallelSpec(dp=2), backend="dtensor")], ids=["one", "fsdp-dp2"]
)
def test_a_step_without_finite_gradient_is_skipped(pools: Pools, published: Published, case: Case) -> None:
    ranks = pools(case.parallel.world_size).run(run_broken, case, model_of(case, published), make_batch())
    broken, then, straight = (only_result([rank[0][i] for rank in ranks]) for i in range(3))
    assert broken.skipped
    assert not np.isfinite(broken.grad_norm)
    assert then == straight
    assert not then.skipped
    for _, same, (before, after) in ranks:
        assert same
        assert before == []
        assert after == ["embedding.word_embeddings.weight" if case.backend == "megatron" else after[0]]


def test_the_norm_of_a_large_gradient_is_right_to_float32s_rounding(pools: Pools) -> None:
    large = torch.randn(20 * NORM_CHUNK, generator=torch.Generator().manual_seed(0)) * 1e-4
    gradients = [large, large[:9]]
    exact = sum(float(one.double().square().sum()) for one in gradients) ** 0.5
    assert pools(1).run(run_gradient_norm, gradients)[0] == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    ("parallel", "waits"),
    [
        (ParallelSpec(), True),
        (ParallelSpec(tp=2), False),
        (ParallelSpec(dp=2), True),
        pytest.param(ParallelSpec(), False, marks=pytest.mark.slow),
        pytest.param(ParallelSpec(tp=2), True, marks=pytest.mark.slow),
        pytest.param(ParallelSpec(dp=2), False, marks=pytest.mark.slow),
    ],
)
def test_the_reference_policy_stays_while_the_policy_moves(pools: Pools, parallel: ParallelSpec, waits: bool) -> None:
    """Where it waits in host memory too (`waits`)."""
    case = Case(parallel=parallel, reference_offload=waits)
    for rank, answer in enumerate(
        pools(parallel.world_size).run(run_reference_policy, case, reference_weights("llama"), make_batch())
    ):
        before, reference, after, (held, moved_stats), moved = answer
        assert not moved
        for key, value in before.items():
            assert torch.equal(reference[key], value)
            assert not torch.equal(after[key], value)
        if rank == parallel.result_rank:
            assert held.tokens == moved_stats.tokens > 0
            assert held.abs_sum != moved_stats.abs_sum
            assert held.max_abs <= held.abs_sum
        else:
            assert held is None


def test_sums_over_a_rollout_are_whole_where_ranks_share_its_tokens(pools: Pools) -> None:
    """GSPO's ratio and the corrections of sequences, in a second step, where the policy is not the old one any more."""
    options = {"importance_level": "sequence", "importance_cap": 3.0, "sequence_mask": [0.8, 1.2], "level": "sequence"}
    loss = RunLoss(Gspo(RlConfig.model_validate({"loss": options})))
    whole, shared = (
        pools(2).run(run_case, Case(parallel=parallel), reference_weights("llama"), make_batch(), loss)
        for parallel in (ParallelSpec(dp=2), ParallelSpec(cp=2))
    )
    for step in range(2):
        expected, found = (only_result([rank.results[step] for rank in ranks]) for ranks in (whole, shared))
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert found.sums == pytest.approx(expected.sums, rel=1e-4, abs=1e-4)
    assert found.sums["ratio/mean"] != found.sums["tokens"]
    assert 0 < found.sums["importance_limited"] < found.sums["tokens"]


@pytest.mark.parametrize(
    ("parallel", "advantages"),
    [
        (ParallelSpec(dp=2), {0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0}),
        (ParallelSpec(), {0: 0.0, 1: 1.0, 2: 0.0, 3: -0.5}),
        (ParallelSpec(), dict.fromkeys(range(4), 0.0)),
    ],
    ids=["fewer-than-ranks", "some", "none"],
)
def test_rollouts_without_an_advantage_change_nothing_by_being_computed(
    pools: Pools, parallel: ParallelSpec, advantages: dict[int, float]
) -> None:
    case = Case(parallel=parallel, packing=False)
    ranks = pools(parallel.world_size).run(run_without, case, reference_weights("llama"), make_batch(), advantages)
    for whole, part in ranks:
        for kind in ("grads", "params"):
            for (name, value, *_), (_, other, *_) in zip(getattr(whole, kind), getattr(part, kind), strict=True):
                assert torch.equal(value, other), (kind, name)
        for one, other in zip(whole.results, part.results, strict=True):
            if one is not None and other is not None:
                assert (one.loss, one.grad_norm, one.skipped) == (other.loss, other.grad_norm, False)
    assert sum(part.tokens for _, part in ranks) < sum(whole.tokens for whole, _ in ranks)
    if not any(advantages.values()):
        assert not any(value.any() for _, value, *_ in ranks[0][0].grads)


def test_strangers_cannot_reach_the_store_of_ranks_that_have_met(pools: Pools) -> None:
    assert pools(1).run(run_meeting, Case()) == [(True, False)]


def test_frozen_routers_keep_their_weights_and_nothing_else_changes(pools: Pools) -> None:
    weights = reference_weights("qwen3moe")
    case = Case("qwen3moe")
    free, frozen = (
        pools(1).run(run_case, one, weights, make_batch())[0]
        for one in (case, dataclasses.replace(case, freeze_router=True))
    )
    routers = {name for name in weights if ".router." in name}
    assert routers
    clip = [(piece.results[0].grad_norm + 1e-6) / Optim().clip for piece in (free, frozen)]
    grads = [
        {name: grad * factor for name, grad, *_ in piece.grads}
        for piece, factor in zip((free, frozen), clip, strict=True)
    ]
    assert grads[0].keys() - grads[1].keys() == routers
    for name, grad in grads[1].items():
        assert torch.allclose(grad, grads[0][name], rtol=0, atol=1e-6), name
    for name, value, *_ in frozen.params:
        assert torch.equal(value, weights[name]) == (name in routers), name
    squares = sum(float(grad.square().sum()) for grad in grads[1].values())
    assert abs(frozen.results[0].grad_norm - squares**0.5) < 1e-5


def test_frozen_routers_of_transformers_keep_their_weights(pools: Pools, published: Published) -> None:
    case = Case("qwen3moe", ParallelSpec(dp=2), freeze_router=True, backend="dtensor")
    params, _ = assemble([piece.params for piece in pools(2).run(run_case, case, published(case.kind), make_batch())])
    begun = hf_model(case.kind).state_dict()
    stayed = {name for name, value in params.items() if torch.equal(value, begun[name])}
    assert stayed == {name for name in begun if name.endswith("mlp.gate.weight")}


ASLEEP = {
    "ep2": Case("qwen3moe", ParallelSpec(dp=2, ep=2)),
    "adapters": Case(lora=LoraConfig(rank=2)),
    "fsdp-dp2": Case("llama-tied", ParallelSpec(dp=2), backend="dtensor"),
}
ON_HOST = Case("llama-tied", ParallelSpec(dp=2), optimizer_offload=True, backend="dtensor")


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name, marks=(pytest.mark.slow, pytest.mark.guard)) for name, case in ASLEEP.items()),
        pytest.param(ON_HOST, id="fsdp-dp2-states-on-host"),
    ],
)
def test_a_sleep_empties_the_device_and_changes_no_bit(pools: Pools, published: Published, case: Case) -> None:
    model, whole = model_of(case, published), sum(value.numel() for value in reference_weights(case.kind).values()) * 4
    for (plain, slept), freed, left, moved in pools(case.parallel.world_size).run(
        run_asleep, case, model, make_batch()
    ):
        assert left == 0
        assert freed > whole / case.parallel.world_size
        assert not moved
        assert plain[0] == slept[0]
        assert all(torch.equal(value, slept[1][name]) for name, value in plain[1].items())
