"""The training loop's interface to rollouts.

A *step* counts trained batches, a *version* weights, a *position* is a place in the endless order of prompts, and a
*seed* follows from (run seed, position, sample). A source decides when positions are sampled, not what is sampled
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlctl.data.rollouts import Rollout, RolloutGroup


class Lengths(Protocol):
    """The lengths of one trained sequence: a rollout, or a text of a dataset."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first response token."""
        ...

    @property
    def tokens(self) -> int:
        """All tokens."""
        ...

    @property
    def response_tokens(self) -> int:
        """Tokens with a loss."""
        ...

    @property
    def images(self) -> int: ...

    @property
    def image_tokens(self) -> int: ...


class Group(Protocol):
    """The trained sequences of one position."""

    @property
    def position(self) -> int: ...

    @property
    def columns(self) -> object:
        """Handle of their token columns in the object store."""
        ...

    @property
    def sequences(self) -> Sequence[Lengths]: ...


class Batch(Protocol):
    """The groups of a step, in training order: finished rollouts (`RolloutBatch`), or rows of a dataset
    (`dataset.TextBatch`)."""

    @property
    def groups(self) -> Sequence[Group]: ...

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Values that the source measured while it made the batch, by their names in metrics.jsonl."""
        ...


@dataclass(frozen=True)
class RolloutBatch:
    """Finished groups of sampled and scored rollouts."""

    groups: tuple[RolloutGroup, ...]
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]


class RolloutSource(Protocol):
    """Makes a run's batches and remembers their positions. With `filter.groups=replace`, a full batch has
    `batch.prompts` trainable groups plus the replaced ones, which the loop drops and whose positions are handed over
    too."""

    def next(self, version: int) -> Batch:
        """Return the next batch for a policy with weights `version`."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state of a resume as JSON. Returned batches count as trained."""
        ...

    def write(self, directory: Path) -> None:
        """Write into a checkpoint's directory what `state` cannot hold: finished groups that were not returned yet."""

    def restore(self, state: Mapping[str, Any], directory: Path) -> None:
        """Go on from what `state` returned and `write` wrote, in a new process and before the first `next`."""


def sample_seed(*of: int) -> int:
    """Return the seed (63 bits) of a random stream: of (run seed, position, sample), or of (that seed, later turn)."""
    state = np.random.SeedSequence(of).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
