"""Bin packing against first-fit-decreasing and a greedy balance, both written from their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.backends.batching.batch import WeightedSequence
from rlctl.backends.batching.bin_packing import first_fit_decreasing, pack, spread
from rlctl.backends.batching.packing import plan_batch

LIMIT = 16_384


def by_definition(sizes: list[int], limit: int) -> list[list[int]]:
    """Each item by falling size into the first bin that has room."""
    bins: list[list[int]] = []
    rooms = np.full(len(sizes), limit)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        place = int(np.argmax(rooms >= sizes[item]))
        rooms[place] -= sizes[item]
        bins += [[] for _ in range(place + 1 - len(bins))]
        bins[place].append(item)
    return bins


def greedy_imbalance(sizes: list[int], costs: list[float], ranks: int) -> float:
    """Refill from scratch for each number of bins, each item into the cheapest with room; deal bins by falling cost."""
    count = ranks
    while (bins := refilled(sizes, costs, count)) is None:
        count += ranks
    load, held = [0.0] * ranks, [0] * ranks
    for cost in sorted(bins, reverse=True):
        rank = min((rank for rank in range(ranks) if held[rank] < count // ranks), key=lambda rank: load[rank])
        load[rank] += cost
        held[rank] += 1
    return max(load) / (sum(load) / ranks) - 1


def refilled(sizes: list[int], costs: list[float], count: int) -> list[float] | None:
    room, total = np.full(count, LIMIT), np.zeros(count)
    for item in sorted(range(len(sizes)), key=lambda item: -costs[item]):
        cheapest = int(np.where(room >= sizes[item], total, np.inf).argmin())
        if room[cheapest] < sizes[item]:
            return None
        room[cheapest] -= sizes[item]
        total[cheapest] += costs[item]
    return total.tolist()


DISTRIBUTIONS = {
    "uniform": lambda rng, n: rng.integers(64, LIMIT, n),
    "log-normal": lambda rng, n: np.clip(rng.lognormal(8, 0.8, n), 64, LIMIT).astype(int),
    "near a third": lambda rng, n: rng.integers(5000, 6100, n),
    "near a half": lambda rng, n: rng.integers(7500, 8900, n),
    "near a quarter": lambda rng, n: rng.integers(3900, 4400, n),
    "bimodal": lambda rng, n: np.where(rng.random(n) < 0.5, rng.integers(100, 600, n), rng.integers(10_000, LIMIT, n)),
    "short": lambda rng, n: rng.integers(50, 500, n),
    "equal": lambda rng, n: np.full(n, 5462),
}


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), max_size=60))
def test_first_fit_decreasing_is_as_defined(sizes: list[int]) -> None:
    assert [sorted(one) for one in first_fit_decreasing(sizes, 60)] == [sorted(x) for x in by_definition(sizes, 60)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 5))
def test_every_item_is_packed_once_within_the_limit(sizes: list[int], step: int) -> None:
    sizes = sorted(sizes, reverse=True)
    bins = pack(sizes, [float(size) for size in sizes], 60, step)
    assert sorted(item for one in bins for item in one) == list(range(len(sizes)))
    assert all(sum(sizes[item] for item in one) <= 60 for one in bins)
    assert len(bins) % step == 0
    assert len(bins) <= max(step, -(-len(by_definition(sizes, 60)) // step) * step)
    dealt = spread([sum(map(float, one)) for one in bins], step)
    assert sorted(number for own in dealt for number in own) == list(range(len(bins)))
    assert {len(own) for own in dealt} == {len(bins) // step}


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_rows_and_balance_on_many_distributions(name: str, share: bool) -> None:
    """Rows within 2 % of first-fit-decreasing on single rollouts, and the balance of single rollouts no worse than that
    of greedy refilling."""
    ranks, rng = 8, np.random.default_rng(0)
    for count in (128, 1024):
        lengths = DISTRIBUTIONS[name](rng, count).tolist()
        rollouts = [WeightedSequence(i // 16, i % 16, 49, n, 1.0, 0.1) for i, n in enumerate(lengths)]
        columns: dict[int, object] = {group: f"handle {group}" for group in range(count // 16)}
        plan = plan_batch([rollouts], columns, dp=ranks, micro_batch_tokens=LIMIT, share_prompts=share)
        stats = plan.stats
        reference = -(-len(by_definition(lengths, LIMIT)) // ranks) * ranks
        assert stats.micro_batches * ranks <= 1.02 * reference
        costs = [n + n * n / 4096 for n in lengths]
        assert share or stats.imbalance <= greedy_imbalance(lengths, costs, ranks) + 0.005
