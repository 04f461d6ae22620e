"""The ledger of a run's positions.

A position is *under way* until its group is sampled and scored, *finished* until the group is handed to the loop, then
*handed over*. Checkpoints between steps count the latter as trained, even if dropped. Every taken position has exactly
one state, so a resume loses and repeats none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

Ranges = list[list[int]]
"""Positions as [first, last] of each unbroken range, in order."""


class Ledger:
    """The state of each position: taken, finished or handed over."""

    def __init__(self) -> None:
        self.finished: set[int] = set()
        self.under_way: set[int] = set()
        self._handed_over_below = 0  # all positions below were handed over; later ones are in the set
        self._handed_over: set[int] = set()
        self._next = 0  # the first position that was never taken
        self._again: list[int] = []  # positions that an earlier process took and did not train on

    @property
    def handed_over(self) -> Ranges:
        """The positions whose groups the loop received."""
        return [[0, self._handed_over_below - 1]] * (self._handed_over_below > 0) + ranges(self._handed_over)

    @property
    def first_open(self) -> int:
        """The first position that was not handed over."""
        return self._handed_over_below

    @property
    def first_untaken(self) -> int:
        """The first position that was never taken."""
        return self._next

    def next_to_hand_over(self, count: int) -> list[int]:
        """Return the first `count` positions that were not handed over, taken or not."""
        positions: list[int] = []
        position = self._handed_over_below
        while len(positions) < count:
            if position not in self._handed_over:
                positions.append(position)
            position += 1
        return positions

    def take(self, count: int) -> list[int]:
        """Take the lowest `count` positions that are not in progress; they are in progress from now on."""
        again, self._again = self._again[:count], self._again[count:]
        new = range(self._next, self._next + count - len(again))
        self._next = new.stop
        self.under_way.update(again, new)
        return [*again, *new]

    def finish(self, positions: Iterable[int]) -> None:
        """Record that the groups at `positions`, which were under way, are sampled and scored."""
        for position in positions:
            self.under_way.remove(position)
            self.finished.add(position)

    def hand_over(self, positions: Iterable[int]) -> None:
        """Record that the groups at `positions`, which were finished, are handed over to the loop."""
        for position in positions:
            self.finished.remove(position)
            self._handed_over.add(position)
        while self._handed_over_below in self._handed_over:
            self._handed_over.remove(self._handed_over_below)
            self._handed_over_below += 1

    def give_back(self, positions: Iterable[int]) -> None:
        """Record that the groups at `positions`, which were finished or under way, are to be made again."""
        given_back = set(positions)
        self.finished -= given_back
        self.under_way -= given_back
        self._again = sorted({*self._again, *given_back})

    def state(self) -> dict[str, Ranges]:
        under_way = self.under_way.union(self._again)
        return {"trained": self.handed_over, "finished": ranges(self.finished), "under_way": ranges(under_way)}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Self:
        """Return the ledger of `state`. Raises ValueError for a missing or repeated position."""
        kinds = {
            kind: [position for first, last in state[kind] for position in range(first, last + 1)]
            for kind in ("trained", "finished", "under_way")
        }
        everything = sorted(position for positions in kinds.values() for position in positions)
        if everything != list(range(len(everything))):
            raise ValueError("not every position up to the last one is there exactly once")
        ledger = cls()
        ledger._next = len(everything)
        ledger.finished = {*kinds["finished"], *kinds["trained"]}
        ledger.hand_over(kinds["trained"])
        ledger._again = sorted(kinds["under_way"])
        return ledger


def ranges(positions: Iterable[int]) -> Ranges:
    ranges: Ranges = []
    for position in sorted(positions):
        if ranges and ranges[-1][1] == position - 1:
            ranges[-1][1] = position
        else:
            ranges.append([position, position])
    return ranges
