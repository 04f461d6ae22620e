"""Episodes whose environment failed: they have no reward, and too many pause their source or end the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.data.rollouts import RolloutGroup
from rlctl.errors import InputError

WINDOW = 10
"""Batches over which failures are counted."""


class FailedEpisodes:
    """Counts the dropped episodes of each source over the last batches."""

    def __init__(self, limits: Mapping[str, float], digests: Mapping[str, str]) -> None:
        """`limits`: number of dropped episodes in WINDOW batches that each source may have. `digests`: of the sources'
        environments."""
        self._limits, self._digests = limits, digests
        self._dropped = {source: deque[int](maxlen=WINDOW) for source in limits}
        self.pauses: list[tuple[str, int, str]] = []
        """(source, first position, digest of its environment) of each pause; an empty digest: the pause ends."""

    @property
    def paused(self) -> list[str]:
        """The sources whose last pause has not ended."""
        return sorted(
            source for source, digest in {source: digest for source, _, digest in self.pauses}.items() if digest
        )

    def pause(self, source: str, position: int) -> None:
        """Record that a source is paused from a position on."""
        self.pauses.append((source, position, self._digests[source]))

    def count(self, groups: Sequence[RolloutGroup], *, first: bool) -> dict[str, str]:
        """Count a batch; return a sentence about each source that is above its limit, with its last failure. `first`:
        it is the run's first batch. Raises InputError if no other source is left, and for a first batch without a
        whole episode."""
        messages: dict[str, list[str]] = {source: [] for source in self._limits}
        for group in groups:
            dropped = [failure.message for failure in group.failed if failure.message in group.dropped]
            messages[group.prompt.source] += dropped
        if first and not any(group.rollouts for group in groups):
            failures = [failure for group in groups for failure in group.failed]
            if failures:
                causes = sorted({failure.cause for failure in failures})
                failed = f"all {len(failures)} episodes" if len(causes) == 1 else f"{len(failures)} episodes"
                raise InputError(
                    f"No episode of the first batch was whole: {failed} failed. {'; '.join(causes)[:2000]}. "
                    f"The first: {failures[0].message}",
                    "Fix the environment, or what it needs: a server, a program, a package, a file.",
                )
        above = {}
        for source, dropped in messages.items():
            self._dropped[source].append(len(dropped))
            total, batches = sum(self._dropped[source]), len(self._dropped[source])
            if dropped and total > self._limits[source] and source not in self.paused:
                above[source] = (
                    f"{total} episodes{' of ' * bool(source)}{source} failed in the last {batches} batches "
                    f"(environment.failing). The last failure: {dropped[-1]}"
                )
        if above and self._limits.keys() <= {*above, *self.paused}:
            for source in above:
                self._dropped[source].clear()  # a resume may have a better environment
            raise InputError(
                f"{next(iter(above.values()))}",
                "Fix it and continue with --allow-changes, raise environment.failing, or set reward.on_error=zero, "
                "which gives such episodes 0.",
            )
        return above

    def state(self) -> dict[str, Any]:
        """Return as JSON what `restore` reads; empty without failures."""
        dropped = {source: list(counts) for source, counts in self._dropped.items() if any(counts)}
        return {
            **({"failed_episodes": dropped} if dropped else {}),
            **({"pauses": [list(pause) for pause in self.pauses]} if self.pauses else {}),
        }

    def restore(self, state: Mapping[str, Any], position: int) -> None:
        """Continue from `state`; a pause ends at `position` if the environment has changed since. Raises ValueError,
        TypeError or KeyError for other values."""
        for source, counts in state.get("failed_episodes", {}).items():
            self._dropped[source].extend(map(int, counts))
        self.pauses = [(str(source), int(first), str(digest)) for source, first, digest in state.get("pauses", ())]
        digests = {source: digest for source, _, digest in self.pauses}
        for source in self.paused:
            if digests[source] != self._digests[source]:
                self.pauses.append((source, position, ""))
                self._dropped[source].clear()
