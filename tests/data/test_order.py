"""The order of prompts: whole epochs, and a pure function of the step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.data.order import PromptOrder


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 40), seed=st.integers(0, 2**32), prompts=st.integers(1, 17), shuffle=st.booleans())
def test_every_epoch_holds_every_prompt_once(size: int, seed: int, prompts: int, shuffle: bool) -> None:
    order = PromptOrder(size, seed, shuffle)
    steps = -(-3 * size // prompts)
    drawn = [row for step in range(steps) for row in order.step(step, prompts)]
    for epoch in range(3):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_resumed_run_goes_on_where_it_was() -> None:
    whole = [PromptOrder(50, seed=7).step(step, 8) for step in range(20)]
    resumed = [PromptOrder(50, seed=7).step(step, 8) for step in range(11, 20)]
    assert whole[11:] == resumed


def test_seeds_and_epochs_differ() -> None:
    first = PromptOrder(100, seed=0)
    assert first.step(0, 100) != PromptOrder(100, seed=1).step(0, 100)
    assert first.step(0, 100) != first.step(1, 100)


def test_the_order_of_a_seed_never_changes() -> None:
    """A checkpoint of an older version must resume: these numbers are part of the format of a run."""
    assert PromptOrder(6, seed=42).step(0, 6) == [4, 1, 3, 0, 2, 5]


def test_without_shuffling_prompts_come_in_file_order() -> None:
    assert PromptOrder(3, seed=9, shuffle=False).step(1, 4) == [1, 2, 0, 1]


def test_an_empty_order_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PromptOrder(0, seed=0)
