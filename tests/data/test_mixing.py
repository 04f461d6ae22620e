"""Several sources in one run: their settings, and turns that meet their weights exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.data.mixing import LONGEST_ROUND, Mixing, source_settings, whole_parts
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.methods.sft import SftConfig


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 12), min_size=1, max_size=6), far=st.integers(0, 10**6))
def test_the_first_positions_hold_each_source_by_its_share(weights: list[int], far: int) -> None:
    """Rounded up or down, for any number of positions; and each source's own prompts come one after the other."""
    mixing, counts = Mixing(weights), [0] * len(weights)
    for position in range(2 * sum(weights)):
        source, place = mixing.at(position)
        assert place == counts[source]
        counts[source] += 1
        assert mixing.turns(position + 1) == counts
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - Fraction(weight * (position + 1), sum(weights))) < 1
    source, place = mixing.at(far)
    assert mixing.turns(far)[source] == place


def test_the_turns_of_given_weights_never_change() -> None:
    """A checkpoint of an older version must resume: these numbers are part of the format of a run."""
    assert [Mixing([2, 1, 0.5]).at(position) for position in range(8)] == [
        (0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (0, 3), (2, 0), (0, 4)
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=2, max_size=5))
def test_one_pass_over_sources_without_weights_has_each_row_once(sizes: list[int]) -> None:
    mixing, total = Mixing.of([None] * len(sizes), sizes), sum(sizes)
    rows = [(source, place) for source, size in enumerate(sizes) for place in range(size)]
    for epoch in range(2):
        drawn = [mixing.at(epoch * total + position) for position in range(total)]
        assert sorted((source, place - epoch * sizes[source]) for source, place in drawn) == rows


def test_a_pass_over_many_rows_is_as_exact() -> None:
    sizes = [LONGEST_ROUND + 1, 70_001, 3]
    mixing = Mixing.of([None, None, None], sizes)
    assert mixing.turns(sum(sizes)) == sizes
    half = mixing.turns(sum(sizes) // 2)
    assert [abs(2 * count - size) <= 2 for count, size in zip(half, sizes, strict=True)] == [True] * 3
    drawn = {mixing.at(position) for position in range(sum(sizes))}
    assert len(drawn) == sum(sizes)


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ([2.0, 4.0], [1, 2]),
        ([0.7, 0.3], [7, 3]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([1e-12, 1.0], [1, LONGEST_ROUND]),
        ([1e300, 1e300], [1, 1]),
        ([5.0], [1]),
    ],
)
def test_weights_become_whole_numbers(weights: list[float], parts: list[int]) -> None:
    assert whole_parts(weights) == parts


def config(**sections: object) -> RlConfig:
    return RlConfig.model_validate(sections)


def test_one_source_has_the_settings_as_they_are() -> None:
    whole = config(data={"name": "a.jsonl", "size": 3}, reward={"terms": [{"name": "exact-match"}]})
    (only,) = source_settings(whole)
    assert (only.label, only.data, only.reward) == ("", whole.data, whole.reward)


def test_a_source_has_its_own_keys_and_those_of_data_for_the_others() -> None:
    task = "reasoning-gym:chain_sum"
    whole = config(
        data={
            "prompt_field": "question", "size": 9, "params": {"max_terms": 2}, "sources": [
                {"name": task, "weight": 2, "system_prompt": "Add."},
                {"name": "a.jsonl", "prompt_field": "q", "reward": {"terms": [{"name": "math-verify"}]}},
                {"name": task, "params": {}, "order": "as-written"},
            ],
        },
        reward={"terms": [{"name": "task"}], "timeout_s": 5},
    )  # fmt: skip
    first, second, third = source_settings(whole)
    assert [one.label for one in (first, second, third)] == [f"{task} #1", "a.jsonl", f"{task} #2"]
    assert [one.weight for one in (first, second, third)] == [2, 1, 1]
    unweighted = config(data={"sources": [{"name": "a.jsonl"}, {"name": "b.jsonl"}]})
    assert [one.weight for one in source_settings(unweighted)] == [None, None]
    assert (first.data.prompt_field, first.data.system_prompt, first.data.params) == (
        "question", "Add.", {"max_terms": 2}
    )  # fmt: skip
    assert (second.data.prompt_field, second.data.size, second.data.params) == ("q", 9, {})
    assert (second.reward.terms[0].name, second.reward.timeout_s) == ("math-verify", 5)
    assert (third.data.params, third.data.order, third.reward) == ({}, "as-written", whole.reward)


def test_sources_of_texts_keep_the_keys_of_texts() -> None:
    whole = SftConfig.model_validate({"data": {"train_on": "last", "sources": [{"name": "a.jsonl"}, {"name": "b"}]}})
    assert [one.data.trained_part for one in source_settings(whole)] == ["last", "last"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "a", "sources": [{"name": "b"}]}, "give one of them"),
        ({"sources": [{"name": "b", "weight": 0}]}, "greater than 0"),
        ({"sources": [{"nam": "b"}]}, "nam"),
        ({"order": "shuffled", "shuffle": False}, "data.shuffle = false"),
    ],
)
def test_contradictions_are_refused(data: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(data=data)
