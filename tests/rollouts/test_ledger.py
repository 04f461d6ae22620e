"""The ledger loses no position and repeats none, in whatever order groups finish and wherever a run is cut off."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.rollouts.ledger import Ledger, ranges


def positions(found: list[list[int]]) -> list[int]:
    return [position for first, last in found for position in range(first, last + 1)]


def test_positions_are_taken_in_order_and_handed_over_as_ranges() -> None:
    ledger = Ledger()
    assert ledger.take(4) == [0, 1, 2, 3]
    ledger.finish([2, 0, 3])
    ledger.hand_over([0, 3])
    assert ledger.state() == {"trained": [[0, 0], [3, 3]], "finished": [[2, 2]], "under_way": [[1, 1]]}
    ledger.finish([1])
    ledger.hand_over([1, 2])
    assert ledger.state() == {"trained": [[0, 3]], "finished": [], "under_way": []}
    assert ledger.take(2) == [4, 5]


def test_a_restored_ledger_takes_what_was_under_way_again_first() -> None:
    ledger = Ledger()
    ledger.take(6)
    ledger.finish([0, 4])
    ledger.hand_over([4])
    again = Ledger.restored(json.loads(json.dumps(ledger.state())))
    assert again.state() == ledger.state()
    assert again.finished == {0}
    assert again.take(6) == [1, 2, 3, 5, 6, 7]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 5))
def test_runs_cut_off_at_any_moment_train_on_every_position_once(seed: int, count: int) -> None:
    """A source that finishes groups in random order, with a checkpoint after each batch and kills in between."""
    draw, ledger, saved, trained = random.Random(seed), Ledger(), Ledger().state(), []
    for _ in range(40):
        ledger.take(draw.randint(0, count))
        ready = draw.sample(sorted(ledger.under_way), draw.randint(0, len(ledger.under_way)))
        ledger.finish(ready)
        batch = draw.sample(sorted(ledger.finished), draw.randint(0, len(ledger.finished)))
        ledger.hand_over(batch)
        if draw.random() < 0.3:  # killed: what was trained since the last checkpoint never happened
            ledger = Ledger.restored(saved)
        else:
            trained, saved = positions(ledger.state()["trained"]), ledger.state()
    assert trained == sorted(set(trained))
    everything = positions(ledger.handed_over) + sorted(ledger.finished) + positions(ledger.state()["under_way"])
    assert sorted(everything) == list(range(len(everything)))


@pytest.mark.parametrize(
    "state",
    [
        {"trained": [[0, 3]], "finished": [[3, 3]], "under_way": []},
        {"trained": [[1, 3]], "finished": [], "under_way": []},
    ],
)
def test_a_ledger_that_has_a_position_twice_or_misses_one_is_refused(state: dict) -> None:
    with pytest.raises(ValueError, match="exactly once"):
        Ledger.restored(state)


def test_ranges_are_unbroken() -> None:
    assert ranges([5, 1, 2, 7, 3]) == [[1, 3], [5, 5], [7, 7]]
    assert ranges([]) == []
