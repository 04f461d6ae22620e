"""Bin packing of items by size, and balancing of bins over ranks by cost, in O(items log items). A bin is a list of
item numbers; every rank gets the same number of bins."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

Bin = list[int]

BALANCED = 1e-3
"""Difference of the busiest and the idlest rank, over the mean, at which no more bins are exchanged."""
EXCHANGES = 100
"""Most exchanges of bins between ranks, and of items between bins."""


def first_fit_decreasing(sizes: Sequence[int], limit: int) -> list[Bin]:
    """Return the bins of first-fit-decreasing (Johnson 1973) in opening order. Each bin takes the largest remaining
    item that fits, so bins can be filled one after another. Items of one size are handled together; `below` skips
    exhausted sizes."""
    items: dict[int, Bin] = defaultdict(list)
    for number in range(len(sizes) - 1, -1, -1):
        items[sizes[number]].append(number)
    distinct = sorted(items)
    below = list(range(len(distinct) + 1))  # entry i: the largest index < i with items left is at most below[i] - 1

    def largest(index: int) -> int:
        while below[index] != index:
            below[index] = below[below[index]]
            index = below[index]
        return index - 1

    bins: list[Bin] = []
    while (index := largest(len(distinct))) >= 0:
        room, bin_ = limit, Bin()
        while index >= 0:
            left = items[distinct[index]]
            count = min(len(left), room // distinct[index])
            bin_ += left[: -count - 1 : -1]
            del left[-count:]
            room -= count * distinct[index]
            if not left:
                below[index + 1] = index
            index = largest(bisect_right(distinct, room))
        bins.append(bin_)
    return bins


def least_bins(sizes: Sequence[int], limit: int, step: int) -> int:
    """Return the multiple of `step` bins that first-fit-decreasing needs."""
    return _up(len(first_fit_decreasing(sizes, limit)), step)


def fewest_bins(sizes: Sequence[int], limit: int, step: int) -> int:
    """Return the multiple of `step` bins that the sizes fill without any room left; no packing has fewer."""
    return max(step, _up(-(-sum(sizes) // limit), step))


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def pack(sizes: Sequence[int], costs: Sequence[float], limit: int, step: int) -> list[Bin]:
    """Return a multiple of `step` bins with balanced costs, no more than first-fit-decreasing needs; some may be empty.
    Items come by falling cost, none larger than `limit`."""
    least = fewest_bins(sizes, limit, step)
    if (bins := even_bins(sizes, costs, limit, least)) is not None:
        return bins
    fitting = first_fit_decreasing(sizes, limit)
    count = _up(len(fitting), step)
    if count > least and (bins := even_bins(sizes, costs, limit, count)) is not None:
        return bins
    return level([*fitting, *([] for _ in range(count - len(fitting)))], sizes, costs, limit)


def level(bins: list[Bin], sizes: Sequence[int], costs: Sequence[float], limit: int) -> list[Bin]:
    """Return the bins after moves and exchanges of items between the costliest bin and the cheapest."""
    bins = [list(bin_) for bin_ in bins]
    totals = [sum(costs[item] for item in bin_) for bin_ in bins]
    for _ in range(EXCHANGES):
        pair = max(range(len(bins)), key=totals.__getitem__), min(range(len(bins)), key=totals.__getitem__)
        full, empty = (bins[number] for number in pair)
        given_I, taken_J = np.array(full), np.array([*empty, -1])
        size_I, size_J = np.array([sizes[i] for i in full]), np.array([*(sizes[j] for j in empty), 0])
        cost_I, cost_J = np.array([costs[i] for i in full]), np.array([*(costs[j] for j in empty), 0.0])
        moved_IJ = size_I[:, None] - size_J
        fits_IJ = (moved_IJ <= limit - size_J.sum()) & (-moved_IJ <= limit - size_I.sum())
        gap = totals[pair[0]] - totals[pair[1]]
        off_IJ = np.where(fits_IJ, np.abs(cost_I[:, None] - cost_J - gap / 2), np.inf)
        i, j = divmod(int(off_IJ.argmin()), len(cost_J))
        if not off_IJ[i, j] < gap / 2 * (1 - BALANCED):
            break
        available, taken = int(given_I[i]), int(taken_J[j])
        bins[pair[0]] = [*(item for item in full if item != available), *([taken] if taken >= 0 else [])]
        bins[pair[1]] = [*(item for item in empty if item != taken), available]
        for number in pair:
            totals[number] = sum(costs[item] for item in bins[number])
    return bins


def even_bins(sizes: Sequence[int], costs: Sequence[float], limit: int, count: int) -> list[Bin] | None:
    """Put each item into the cheapest of `count` bins with room; return None if an item does not fit. Full bins wait in
    a second heap for smaller items."""
    bins: list[Bin] = [[] for _ in range(count)]
    room = [limit] * count
    cheapest = [(0.0, number) for number in range(count)]
    waiting: list[tuple[int, float, int]] = []  # (-room, cost, bin), the roomiest first
    for item, (size, cost) in enumerate(zip(sizes, costs, strict=True)):
        while waiting and -waiting[0][0] >= size:
            _, total, number = heapq.heappop(waiting)
            heapq.heappush(cheapest, (total, number))
        while cheapest and room[cheapest[0][1]] < size:
            total, number = heapq.heappop(cheapest)
            heapq.heappush(waiting, (-room[number], total, number))
        if not cheapest:
            return None
        total, number = cheapest[0]
        bins[number].append(item)
        room[number] -= size
        heapq.heapreplace(cheapest, (total + cost, number))
    return bins


def spread(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Deal bins by falling cost to the least loaded rank, exchange bins for balance, and return each rank's bins by
    falling cost."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0.0, rank) for rank in range(ranks)]
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        so_far, rank = heapq.heappop(load)
        dealt[rank].append(number)
        if len(dealt[rank]) < len(costs) // ranks:
            heapq.heappush(load, (so_far + costs[number], rank))
    _exchange(dealt, costs)
    return dealt


def _exchange(dealt: list[list[int]], costs: Sequence[float]) -> None:
    loads = [sum(costs[number] for number in rank_numbers) for rank_numbers in dealt]
    for _ in range(EXCHANGES):
        busy, idle = max(range(len(dealt)), key=loads.__getitem__), min(range(len(dealt)), key=loads.__getitem__)
        gap = loads[busy] - loads[idle]
        if gap <= BALANCED * sum(loads) / len(loads):
            return
        pair = _closest([costs[number] for number in dealt[busy]], [costs[number] for number in dealt[idle]], gap)
        if pair is None:
            return
        i, j = pair
        dealt[busy][i], dealt[idle][j] = dealt[idle][j], dealt[busy][i]
        for rank in (busy, idle):
            dealt[rank].sort(key=lambda number: -costs[number])
            loads[rank] = sum(costs[number] for number in dealt[rank])


def _closest(ours: Sequence[float], theirs: Sequence[float], gap: float) -> tuple[int, int] | None:
    """Return the numbers of the costs, both in falling order, whose exchange closes a gap best; None: none helps."""
    rising = [-cost for cost in theirs]
    best, exchange = gap / 2 * (1 - 1e-6), None
    for i, cost in enumerate(ours):
        place = bisect_left(rising, gap / 2 - cost)
        for j in (place - 1, place):
            if 0 <= j < len(theirs) and (off := abs(cost - theirs[j] - gap / 2)) < best:
                best, exchange = off, (i, j)
    return exchange
