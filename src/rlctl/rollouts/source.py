"""Where batches of rollouts come from, as the training loop sees it.

Four numbers are kept apart: a *step* counts batches that were trained on, a *version* counts weights, a *position* is a
place in the endless order of prompts, and a *seed* follows from (run seed, position, sample). A source decides when
which positions are sampled; what is sampled at a position does not depend on that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlctl.data.rollouts import Rollout, RolloutGroup


@dataclass(frozen=True)
class RolloutBatch:
    """Finished groups: sampled and scored. Their order is the order in which they are trained on."""

    groups: tuple[RolloutGroup, ...]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Values that the source measured while it made the batch, by their names in metrics.jsonl."""

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, group after group."""
        return [rollout for group in self.groups for rollout in group.rollouts]


class RolloutSource(Protocol):
    """Makes the batches of a run, and remembers which positions they hold.

    With `filter.groups=replace` a batch is full when it has `batch.prompts` groups that the algorithm trains on. It
    also holds those that were sampled in vain, which the loop drops: their positions are handed over like all others.
    """

    def next(self, version: int) -> RolloutBatch:
        """Return the next batch. `version` is that of the weights which the policy holds now."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on, as JSON. All batches returned so far count as trained on."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned, in a new process and before the first `next`."""
        ...


def sample_seed(run_seed: int, position: int, sample: int) -> int:
    """Return the seed of one rollout's random stream (63 bits)."""
    state = np.random.SeedSequence((run_seed, position, sample)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
