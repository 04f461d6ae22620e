"""From rollouts to mini-batches: the scalars that reach the policy."""

import numpy as np

from rlctl.config.schema import GrpoConfig
from rlctl.data.rollouts import Rollout
from rlctl.rl.batch import make_batch, sample_seed


def rollouts(lengths_P_G: list[list[int]]) -> list[Rollout]:
    return [
        Rollout(p * len(lengths) + g, p, g, 5, length, 0, False, f"columns{p}", f"texts{p}")
        for p, lengths in enumerate(lengths_P_G)
        for g, length in enumerate(lengths)
    ]


def test_each_minibatch_normalises_over_its_own_tokens():
    grpo = GrpoConfig(prompts=2, generations=2, optimizer_steps=2, normalize_std=False)
    batch = make_batch(rollouts([[3, 5], [1, 1]]), np.array([1.0, 0.0, 0.5, 0.5]), grpo)
    assert [[row.token_weight for row in part] for part in batch.minibatches] == [[1 / 8, 1 / 8], [1 / 2, 1 / 2]]
    assert [[row.advantage for row in part] for part in batch.minibatches] == [[0.5, -0.5], [0.0, 0.0]]
    assert batch.columns == {0: "columns0", 1: "columns1"}
    assert [row.tokens for row in batch.minibatches[0]] == [8, 10]


def test_sequence_level_weights_each_rollout_the_same():
    grpo = GrpoConfig(prompts=1, generations=2, loss_level="sequence")
    (part,) = make_batch(rollouts([[4, 2]]), np.array([1.0, 0.0]), grpo).minibatches
    assert [row.token_weight * (row.tokens - row.prompt_tokens) for row in part] == [0.5, 0.5]


def test_seeds_differ_in_every_coordinate_and_repeat():
    seeds = {sample_seed(*place) for place in np.ndindex(3, 4, 5, 6)}
    assert len(seeds) == 3 * 4 * 5 * 6
    assert sample_seed(1, 2, 3, 4) == sample_seed(1, 2, 3, 4)
    assert all(0 <= seed < 2**63 for seed in seeds)
