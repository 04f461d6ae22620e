"""From groups to mini-batches: the scalars that reach the policy."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlctl.config.schema import RlctlConfig
from rlctl.rl.algorithms.grpo import Grpo
from rlctl.rl.loop import make_batch
from support.groups import group


def grpo(**sections: dict[str, Any]) -> Grpo:
    return Grpo(RlctlConfig.model_validate(sections))


def test_each_minibatch_normalises_over_its_own_tokens():
    groups = [group(0, [1.0, 0.0], [3, 5]), group(1, [0.5, 0.5], [1, 1])]
    batch = make_batch(groups, grpo(advantage={"normalize_std": False}), 2)
    assert [[row.token_weight for row in part] for part in batch.minibatches] == [[1 / 8, 1 / 8], [1 / 2, 1 / 2]]
    assert [[row.advantage for row in part] for part in batch.minibatches] == [[0.5, -0.5], [0.0, 0.0]]
    assert batch.columns == {0: "columns0", 1: "columns1"}
    assert [row.tokens for row in batch.minibatches[0]] == [8, 10]


def test_sequence_level_weights_each_rollout_the_same():
    (part,) = make_batch([group(3, [1.0, 0.0], [4, 2])], grpo(loss={"level": "sequence"}), 1).minibatches
    assert [row.token_weight * (row.tokens - row.prompt_tokens) for row in part] == [0.5, 0.5]


def test_only_response_tokens_count_in_the_weights_whatever_else_a_rollout_holds():
    """Of 6 and 10 tokens after the prompt the policy chose 4 and 2; the others are the output of a tool."""
    groups = [group(0, [1.0, 0.0], [4, 2], tokens=[11, 15])]
    for level, expected in (("token", [1 / 6, 1 / 6]), ("sequence", [1 / 8, 1 / 4])):
        (part,) = make_batch(groups, grpo(loss={"level": level}), 1).minibatches
        np.testing.assert_allclose([row.token_weight for row in part], expected)
        assert [row.tokens for row in part] == [11, 15]


def test_groups_that_the_algorithm_drops_are_not_trained_on_and_weigh_nothing():
    class OnlyMixed(Grpo):
        def keeps(self, rewards_G: np.ndarray) -> bool:
            return np.ptp(rewards_G) > 0

    groups = [group(4, [1.0, 1.0], [100, 100]), group(9, [1.0, 0.0], [3, 5])]
    batch = make_batch(groups, OnlyMixed(RlctlConfig()), 1)
    assert [(row.position, row.sample, row.token_weight) for part in batch.minibatches for row in part] == [
        (9, 0, 1 / 8), (9, 1, 1 / 8),
    ]  # fmt: skip
    assert batch.columns == {9: "columns9"}
    assert make_batch(groups[:1], OnlyMixed(RlctlConfig()), 1).minibatches == ()
