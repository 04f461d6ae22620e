"""The order of prompts: whole epochs, and a pure function of the position."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.rollouts.prompt_order import PromptOrder


def rows(order: PromptOrder, first: int, count: int) -> list[int]:
    return [order.at(position) for position in range(first, first + count)]


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 40), seed=st.integers(0, 2**32), shuffle=st.booleans())
def test_every_epoch_holds_every_prompt_once(size: int, seed: int, shuffle: bool) -> None:
    drawn = rows(PromptOrder(size, seed, shuffle), 0, 3 * size)
    for epoch in range(3):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_position_can_be_asked_for_at_any_time() -> None:
    whole = rows(PromptOrder(50, seed=7), 0, 160)
    order = PromptOrder(50, seed=7)
    assert [order.at(position) for position in reversed(range(160))] == whole[::-1]


def test_seeds_and_epochs_differ() -> None:
    first = PromptOrder(100, seed=0)
    assert rows(first, 0, 100) != rows(PromptOrder(100, seed=1), 0, 100)
    assert rows(first, 0, 100) != rows(first, 100, 100)


def test_the_order_of_a_seed_never_changes() -> None:
    """A checkpoint of an older version must resume: these numbers are part of the format of a run."""
    assert rows(PromptOrder(6, seed=42), 0, 6) == [4, 1, 3, 0, 2, 5]


def test_without_shuffling_prompts_come_in_file_order() -> None:
    assert rows(PromptOrder(3, seed=9, shuffle=False), 4, 4) == [1, 2, 0, 1]


def test_an_empty_order_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PromptOrder(0, seed=0)
