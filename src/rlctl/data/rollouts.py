"""Rollouts: what one group of completions is, column by column, and the scalars the driver keeps of them.

Suffixes: G rollouts of the group, T their tokens packed one behind the other (prompt and completion of each).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

ROUTED_EXPERTS = "routed_experts"
"""Further column, int16 [T, layers, experts a token]: where the engine's routers sent the token; -1: not recorded."""


@dataclass(frozen=True)
class RolloutColumns:
    """The token-sized columns of one group. They live in the object store and never pass through the driver."""

    tokens_T: np.ndarray  # int32
    offsets_G: np.ndarray  # int32 [G + 1]: rollout g holds tokens_T[offsets_G[g] : offsets_G[g + 1]]
    loss_mask_T: np.ndarray  # bool: True where the policy chose the token
    logprobs_T: np.ndarray  # float32: the engine's log-prob of each chosen token, 0 elsewhere
    weight_version_T: np.ndarray  # int32: version of the weights that chose the token, -1 elsewhere
    extra_T: dict[str, np.ndarray] = field(default_factory=dict)  # further token columns

    @property
    def rollouts(self) -> int:
        return len(self.offsets_G) - 1

    def slice(self, rollout: int) -> slice:
        """The part of every `_T` column that belongs to `rollout`."""
        return slice(int(self.offsets_G[rollout]), int(self.offsets_G[rollout + 1]))


@dataclass(frozen=True)
class Rollout:
    """What the driver knows of one rollout: scalars, and where its columns are."""

    id: int
    """Index in the step's batch: prompt * generations + sample."""
    group: int
    """Index of the prompt in the step."""
    index: int
    """Row in the group's columns."""
    prompt_tokens: int
    response_tokens: int
    weight_version: int
    truncated: bool
    """Stopped by the length limit rather than by an end token."""
    columns: object
    """Handle (Ray object reference) of the group's `RolloutColumns`."""
    texts: object
    """Handle of the group's completion texts, `list[str]` of length G."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens
