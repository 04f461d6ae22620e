"""From the groups of a step to the batch that the policy trains on: advantages, token weights and mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rlctl.backends.batching.batch import TrainBatch, WeightedRollout
from rlctl.data.rollouts import Rollout, RolloutGroup
from rlctl.training.train_batch import without_idle


class BatchRules(Protocol):
    """The part of an algorithm that decides which rollouts a batch holds, and their weights."""

    @property
    def nll_weight(self) -> float: ...
    @property
    def skips_idle(self) -> bool: ...
    @property
    def learns_without_advantage(self) -> bool: ...
    def trains_on(self, group: RolloutGroup) -> bool: ...
    def batch_advantages(self, groups: Sequence[RolloutGroup]) -> list[np.ndarray]: ...
    def imitated(self, group: RolloutGroup) -> np.ndarray: ...
    def learned_tokens(self, rollout: Rollout) -> int: ...
    def token_weights(self, response_tokens_N: np.ndarray) -> np.ndarray: ...


def make_batch(groups: Sequence[RolloutGroup], algorithm: BatchRules, optimizer_steps: int) -> TrainBatch:
    """Return the rollouts of the groups that the algorithm keeps, with advantages and token weights.

    There are `optimizer_steps` mini-batches of about equal numbers of rollouts, or fewer if there are fewer rollouts.
    Rollouts without a gradient are then left out of them, unless `filter.skip` is off.
    """
    kept = [group for group in groups if algorithm.trains_on(group)]
    rollouts = [rollout for group in kept for rollout in group.rollouts]
    advantages_N = np.concatenate([np.zeros(0), *algorithm.batch_advantages(kept)])
    imitated_N = np.zeros(len(rollouts), bool)
    if algorithm.nll_weight and kept:
        imitated_N = np.concatenate([algorithm.imitated(group) for group in kept])
    parts = [part for part in np.array_split(np.arange(len(rollouts)), optimizer_steps) if len(part)]
    spans = [slice(int(part[0]), int(part[-1]) + 1) for part in parts]
    minibatches = [_minibatch(rollouts[span], advantages_N[span], imitated_N[span], algorithm) for span in spans]
    columns = {group.position: group.columns for group in kept}
    if not algorithm.skips_idle:
        return TrainBatch(tuple(minibatches), columns)
    return without_idle(minibatches, columns, needs_advantage=not algorithm.learns_without_advantage)


def _minibatch(
    rollouts: Sequence[Rollout], advantages_N: np.ndarray, imitated_N: np.ndarray, algorithm: BatchRules
) -> tuple[WeightedRollout, ...]:
    """Return the rollouts of an optimizer step; those in `imitated_N` also have a weight for their likelihood."""
    tokens_N = np.array([algorithm.learned_tokens(rollout) for rollout in rollouts])
    weights_N = algorithm.token_weights(tokens_N)
    nll_weight = algorithm.nll_weight / max(1, int(tokens_N[imitated_N].sum()))
    nll_weights_N = np.where(imitated_N & (weights_N != 0), nll_weight, 0.0)
    scalars_N = (advantages_N.tolist(), weights_N.tolist(), nll_weights_N.tolist())
    return tuple([
        WeightedRollout(r.position, r.sample, r.prompt_tokens, tokens, advantage, weight, begin, nll_weight)
        for r, advantage, weight, nll_weight in zip(rollouts, *scalars_N, strict=True)
        for begin, tokens in (((0, r.tokens),) if r.episode is None else r.contexts())
    ])  # fmt: skip
