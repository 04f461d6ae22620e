"""Bin packing: every rollout once, rows within their limit, as many on each rank, prompts counted once where they are
shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.backends.batching.batch import WeightedSequence
from rlctl.backends.batching.packing import plan_batch, row_tokens
from rlctl.errors import ConfigError
from rlctl.settings.training import TrainingConfig

LIMIT = 100


def group_rows(group: int, prompt: int, completions: list[int]) -> list[WeightedSequence]:
    return [WeightedSequence(group, row, prompt, prompt + n, 0.5, 0.1) for row, n in enumerate(completions)]


groups = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 60), min_size=1, max_size=6)), min_size=1, max_size=9
)


@settings(deadline=None)
@given(
    groups,
    st.integers(1, 4),
    st.sampled_from(["packed", "dynamic", "single"]),
    st.booleans(),
    st.sampled_from([1, 4]),
    st.sampled_from([1, 3]),
)
def test_every_rollout_once_in_rows_that_fit(
    shape: list, dp: int, how: str, share: bool, multiple: int, rows_multiple: int
) -> None:
    minibatches = [
        [row for g, (prompt, completions) in enumerate(shape) for row in group_rows(g, prompt, completions)],
        group_rows(99, 3, [5]),
        [],  # none of its rollouts has a gradient
    ]
    columns = {group: f"handle {group}" for group in [*range(len(shape)), 99]}
    plan = plan_batch(
        minibatches, columns, dp=dp, micro_batch_tokens=LIMIT, packing=how == "packed", dynamic=how == "dynamic",
        share_prompts=share, multiple=multiple, micro_batch_multiple=rows_multiple,
    )  # fmt: skip
    assert len(plan.shards) == dp
    tokens = padded = 0
    for index, rows in enumerate(minibatches):
        held = [micro for shard in plan.shards for micro in shard.minibatches[index]]
        assert sorted((r.position, r.sample) for micro in held for r in micro) == sorted(
            (r.position, r.sample) for r in rows
        )
        assert len({len(shard.minibatches[index]) for shard in plan.shards}) == 1
        assert len(plan.shards[0].minibatches[index]) % rows_multiple == 0
        lengths = [row_tokens(micro, plan.shards[0].share_prompts) for micro in held]
        assert max(lengths) <= LIMIT
        assert how != "single" or all(len(micro) <= 1 for micro in held)
        tokens += sum(lengths)
        if how == "dynamic":
            lengths = [len(micro) * max((r.tokens for r in micro), default=0) for micro in held]
            assert max(lengths) <= LIMIT
        padded += sum(max(multiple, -(-n // multiple) * multiple) for n in lengths)
    assert (plan.stats.tokens, plan.stats.padded_tokens) == (tokens, padded - tokens)
    assert plan.stats.unshared_tokens == sum(r.tokens for rows in minibatches for r in rows)
    for shard in plan.shards:
        needed = {r.position for rows in shard.minibatches for micro in rows for r in micro}
        assert shard.columns == {group: columns[group] for group in needed}


def test_parts_of_a_group_that_meet_in_a_row_count_one_prompt() -> None:
    """Each group is divided, since two short completions fill a row that two whole groups leave open."""
    rows = [row for group, lengths in enumerate(([41], [1, 57], [1, 57])) for row in group_rows(group, 1, lengths)]
    plan = plan_batch([rows], dict.fromkeys(range(3), "h"), dp=1, micro_batch_tokens=LIMIT)
    held = [[(row.position, row.sample) for row in micro] for micro in plan.shards[0].minibatches[0]]
    assert held == [[(0, 0), (1, 1)], [(1, 0), (2, 0), (2, 1)]]
    assert plan.stats.tokens == (1 + 41) + (1 + 57) + (1 + 1) + (1 + 1 + 57)


def test_a_group_that_does_not_fit_one_row_gets_two_copies_of_its_prompt() -> None:
    rows = group_rows(0, 40, [30, 30, 30, 30])
    plan = plan_batch([rows], {0: "h"}, dp=1, micro_batch_tokens=LIMIT)
    assert plan.stats.tokens == 2 * 40 + 4 * 30
    assert [len(micro) for micro in plan.shards[0].minibatches[0]] == [2, 2]


def test_ranks_are_balanced_by_compute() -> None:
    rows = [row for g in range(16) for row in group_rows(g, 10, [5 + 3 * g])]
    plan = plan_batch([rows], dict.fromkeys(range(16), "h"), dp=4, micro_batch_tokens=200)
    assert plan.stats.imbalance < 0.1


def test_a_rollout_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.micro_batch_tokens = 100"):
        plan_batch([group_rows(0, 50, [51])], {0: "h"}, dp=1, micro_batch_tokens=LIMIT)


def test_dynamic_rows_hold_rollouts_of_like_length() -> None:
    rows = group_rows(0, 5, [5, 45, 6, 44, 5, 6])
    plan = plan_batch([rows], {0: "h"}, dp=1, micro_batch_tokens=LIMIT, packing=False, dynamic=True)
    assert sorted(sorted(r.tokens for r in micro) for micro in plan.shards[0].minibatches[0]) == [
        [10, 10, 11, 11],
        [49, 50],
    ]
    assert plan.stats.padded_tokens == 2 + 1


def test_packing_and_dynamic_batching_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="dynamic_batching"):
        plan_batch([group_rows(0, 5, [5])], {0: "h"}, dp=1, micro_batch_tokens=LIMIT, dynamic=True)
    with pytest.raises(ValueError, match=r"training\.packing=false"):
        TrainingConfig(dynamic_batching=True)
    assert TrainingConfig(dynamic_batching=True, packing=False).dynamic_batching
