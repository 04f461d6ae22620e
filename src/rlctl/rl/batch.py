"""From scored rollouts to what the policy trains on: optimizer mini-batches of rows that carry only scalars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlctl.backends.base import RolloutRow
from rlctl.config.schema import GrpoConfig
from rlctl.data.rollouts import Rollout
from rlctl.rl.advantages import group_advantages, token_weights


@dataclass(frozen=True)
class TrainBatch:
    """The rollouts of a step as optimizer mini-batches, and where the columns of each group are."""

    minibatches: tuple[tuple[RolloutRow, ...], ...]
    columns: dict[int, object]


def make_batch(rollouts: Sequence[Rollout], rewards_N: np.ndarray, grpo: GrpoConfig) -> TrainBatch:
    """Advantages over each group, token weights over each mini-batch; rollouts ordered by group stay together.

    `rewards_N` is float [N] in the order of `rollouts`.
    """
    groups_N = np.array([rollout.group for rollout in rollouts])
    advantages_N = group_advantages(rewards_N, groups_N, grpo.baseline, grpo.normalize_std)
    parts = np.array_split(np.arange(len(rollouts)), grpo.optimizer_steps)
    return TrainBatch(
        tuple(_minibatch([rollouts[i] for i in part], advantages_N[part], grpo) for part in parts),
        {rollout.group: rollout.columns for rollout in rollouts},
    )


def _minibatch(rollouts: Sequence[Rollout], advantages_N: np.ndarray, grpo: GrpoConfig) -> tuple[RolloutRow, ...]:
    weights_N = token_weights(np.array([rollout.response_tokens for rollout in rollouts]), grpo.loss_level)
    return tuple(
        RolloutRow(r.group, r.index, r.prompt_tokens, r.tokens, float(advantage), float(weight))
        for r, advantage, weight in zip(rollouts, advantages_N, weights_N, strict=True)
    )


def sample_seed(run_seed: int, step: int, prompt: int, sample: int) -> int:
    """Seed of one rollout's random stream (63 bits), fixed by the run and the rollout's place in it alone."""
    state = np.random.SeedSequence((run_seed, step, prompt, sample)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
