"""From groups to mini-batches: the scalars that reach the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rlctl.backends.batching.batch import TrainBatch
from rlctl.data.rollouts import RolloutGroup
from rlctl.methods.rl.advantages import group_advantages, whitened, whitened_rollouts
from rlctl.methods.rl.algorithm import make_batch
from rlctl.methods.rl.grpo import Grpo
from rlctl.methods.rl.rl_config import RlConfig
from support.groups import group


def grpo(**sections: dict[str, Any]) -> Grpo:
    return Grpo(RlConfig.model_validate(sections))


def test_each_minibatch_normalizes_over_its_own_tokens():
    groups = [group(0, [1.0, 0.0], [3, 5]), group(1, [0.5, 0.5], [1, 1])]
    batch = make_batch(groups, grpo(advantage={"normalize_std": False}, filter={"skip": False}), 2)
    assert [[row.token_weight for row in part] for part in batch.minibatches] == [[1 / 8, 1 / 8], [1 / 2, 1 / 2]]
    assert [[row.advantage for row in part] for part in batch.minibatches] == [[0.5, -0.5], [0.0, 0.0]]
    assert batch.columns == {0: "columns0", 1: "columns1"}
    assert [row.tokens for row in batch.minibatches[0]] == [8, 10]


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
    batch = make_batch(groups, OnlyMixed(RlConfig()), 1)
    assert [(row.position, row.sample, row.token_weight) for part in batch.minibatches for row in part] == [
        (9, 0, 1 / 8), (9, 1, 1 / 8),
    ]  # fmt: skip
    assert batch.columns == {9: "columns9"}
    assert make_batch(groups[:1], OnlyMixed(RlConfig()), 1).minibatches == ()


class OnlyRewards(Grpo):
    """Its loss is not known to have no gradient where the advantage is 0."""

    learns_without_advantage = True


def rows(batch: TrainBatch) -> list[list[tuple[int, int]]]:
    return [[(row.position, row.sample) for row in part] for part in batch.minibatches]


def test_rollouts_without_a_gradient_are_not_computed_and_weigh_as_if_they_were():
    groups = [group(0, [1.0, 0.0], [3, 5]), group(1, [0.1, 0.1, 0.1], [1, 1, 7]), group(2, [0.0, 0.5, 1.0], [2, 2, 2])]
    batch, whole = (make_batch(groups, grpo(filter={"skip": skip}), 1) for skip in (True, False))
    assert rows(batch) == [[(0, 0), (0, 1), (2, 0), (2, 2)]]
    assert [(row.position, row.sample) for row in batch.skipped] == [(1, 0), (1, 1), (1, 2), (2, 1)]
    assert not whole.skipped
    assert set(batch.minibatches[0]) | set(batch.skipped) == set(whole.minibatches[0])
    assert whole.minibatches[0][0].token_weight == 1 / 23


@pytest.mark.parametrize("option", ["kl_coefficient", "entropy_coefficient"])
def test_rollouts_with_a_penalty_or_bonus_are_all_computed(option: str):
    batch = make_batch([group(0, [1.0, 1.0], [3, 5])], grpo(loss={option: 0.01}), 1)
    assert rows(batch) == [[(0, 0), (0, 1)]]
    assert not make_batch([group(0, [1.0, 1.0], [3, 5])], OnlyRewards(RlConfig()), 1).skipped


def test_a_minibatch_without_a_gradient_still_is_an_optimizer_step():
    groups = [group(0, [1.0, 1.0], [3, 5]), group(1, [1.0, 0.0], [1, 1])]
    assert rows(make_batch(groups, grpo(), 2)) == [[], [(1, 0), (1, 1)]]


def test_truncated_rollouts_count_in_their_group_and_are_not_learned_from():
    """They are neither in the loss nor in what it is divided by, as with TRL's mask_truncated_completions."""
    long = group(0, [1.0, 0.0, 0.0], [4, 8, 4])
    cut = replace(long, rollouts=(long.rollouts[0], replace(long.rollouts[1], stop_reason="length"), long.rollouts[2]))
    (part,) = make_batch([cut], grpo(filter={"truncated": "mask"}), 1).minibatches
    assert [(row.sample, row.token_weight) for row in part] == [(0, 1 / 8), (2, 1 / 8)]
    expected = group_advantages(long.rewards_G)
    assert [row.advantage for row in part] == [expected[0], expected[2]]


@pytest.mark.parametrize(("level", "divisor"), [("sequence", 8), ("constant", 10)])
def test_a_mean_over_rollouts_is_over_those_that_are_learned_from(level: str, divisor: int):
    one = group(0, [1.0, 0.0], [8, 4])
    cut = replace(one, rollouts=(one.rollouts[0], replace(one.rollouts[1], stop_reason="length")))
    algorithm = grpo(filter={"truncated": "mask"}, loss={"level": level, "length_divisor": 10})
    (part,) = make_batch([cut], algorithm, 1).minibatches
    assert [(row.sample, row.token_weight) for row in part] == [(0, 1 / divisor)]


def with_terms(position: int, terms: dict[str, list[Any]], tokens: list[int]) -> RolloutGroup:
    one = group(position, [0.0] * len(tokens), tokens)
    scored = [
        replace(rollout, terms={name: values[number] for name, values in terms.items()})
        for number, rollout in enumerate(one.rollouts)
    ]
    return replace(one, rollouts=tuple(scored))


def test_each_term_is_normalized_by_itself_and_the_sum_over_the_batch():
    """GDPO (2601.05242): A = sum over the terms of weight * (r - mean) / std, whitened over the batch."""
    terms = {"right": [1.0, 0.0, 0.0, 1.0], "form": [10.0, 30.0, 10.0, 10.0]}
    groups = [with_terms(0, terms, [3, 1, 2, 2]), with_terms(1, {"right": [0.0, 1.0], "form": [5.0, 5.0]}, [4, 4])]
    reward = {"terms": [{"name": "right", "weight": 2.0}, {"name": "form", "weight": 0.5}]}
    sums = [
        2.0 * group_advantages(np.array(terms["right"])) + 0.5 * group_advantages(np.array(terms["form"])),
        2.0 * group_advantages(np.array([0.0, 1.0])),
    ]
    for options, expected in (
        ({}, np.concatenate(sums)),
        ({"whiten": True}, whitened(np.concatenate(sums), np.array([3, 1, 2, 2, 4, 4]))),
        ({"whiten": True, "whiten_over": "rollouts"}, whitened_rollouts(np.concatenate(sums))),
    ):
        algorithm = grpo(reward=reward, advantage={"per_term": True, **options}, filter={"groups": "drop"})
        (part,) = make_batch(groups, algorithm, 1).minibatches
        np.testing.assert_allclose([row.advantage for row in part], expected, rtol=1e-12)


def test_each_term_has_the_weight_that_its_source_gives_it():
    """A function's score has the name of its file's whole path, and a source of prompts can have terms of its own."""
    terms = {"/home/me/form.py:form": [10.0, 30.0, 10.0], "exact-match": [1.0, 0.0, 0.0]}
    form, right = (group_advantages(np.array(values)) for values in terms.values())

    def reward(form: float, right: float) -> dict[str, Any]:
        return {"terms": [{"name": "form.py:form", "weight": form}, {"name": "exact-match", "weight": right}]}

    sources = [{"name": "own", "reward": reward(0.25, 3.0)}, {"name": "other"}]
    algorithm = grpo(reward=reward(5.0, 1.0), data={"sources": sources}, advantage={"per_term": True})
    one = with_terms(0, terms, [3, 3, 3])
    groups = [replace(one, prompt=replace(one.prompt, source=name)) for name in ("own", "other")]
    own, other = algorithm.batch_advantages(groups)
    np.testing.assert_allclose(own, 0.25 * form + 3.0 * right, rtol=1e-12)
    np.testing.assert_allclose(other, 5.0 * form + right, rtol=1e-12)


def test_a_term_compares_the_rollouts_that_it_applies_to():
    terms = {"right": [1.0, 0.0, 0.0], "form": [None, 3.0, 1.0], "alone": [None, None, 2.0], "other": [None] * 3}
    options = {"reward": {"terms": [{"name": name} for name in terms]}, "filter": {"groups": "drop"}}
    one, right = with_terms(0, terms, [3, 3, 3]), group_advantages(np.array([1.0, 0.0, 0.0]))
    algorithm = grpo(**options, advantage={"per_term": True})
    form = [0.0, *group_advantages(np.array([3.0, 1.0]))]
    np.testing.assert_allclose(algorithm.batch_advantages([one])[0], right + form, rtol=1e-12)
    assert algorithm.trains_on(one)
    assert not algorithm.trains_on(with_terms(0, terms | {"right": [0.0] * 3, "form": [None, 1.0, 1.0]}, [3, 3, 3]))
    plain = grpo(**options, advantage={"per_term": True, "baseline": "none", "normalize_std": False})
    assert plain.batch_advantages([one])[0].tolist() == [1.0, 3.0, 3.0]


def test_parts_of_an_environment_s_reward_have_the_weight_one() -> None:
    form, right = [10.0, 30.0, 10.0], [1.0, 0.0, 0.0]
    one = with_terms(0, {"form": form, "right": right}, [3, 3, 3])
    expected = sum(group_advantages(np.array(values)) for values in (form, right))
    np.testing.assert_allclose(grpo(advantage={"per_term": True}).batch_advantages([one])[0], expected, rtol=1e-12)


def test_the_cost_of_length_is_part_of_what_rollouts_are_compared_by():
    """DAPO (2503.14476) equation 13, with 20 tokens at most of which the last 10 cost."""
    options = {"reward": {"overlong_buffer": 0.5}, "generation": {"max_new_tokens": 20}}
    groups = [group(0, [1.0, 1.0], [10, 15]), group(1, [1.0, 1.0], [3, 9]), group(2, [1.0, 0.0], [10, 15])]
    (part,) = make_batch(groups, grpo(**options, advantage={"normalize_std": False}), 1).minibatches
    expected = [(0, 0.25), (0, -0.25), (2, 0.75), (2, -0.75)]
    assert [(row.position, row.advantage) for row in part] == expected


@pytest.mark.parametrize("per_term", [True, False])
def test_groups_are_chosen_by_the_rewards_that_were_given(per_term: bool) -> None:
    """Dynamic sampling is for prompts with right and wrong answers (DAPO, 2503.14476, equation 11): lengths that differ
    are no such difference, nor is it one that a limit ended some (NeMo-RL's `unshaped_total_reward`)."""
    options: dict[str, Any] = {
        "reward": {"overlong_buffer": 0.5, "truncated_factor": 0.5, "terms": [{"name": "right"}]}
    }
    algorithm = grpo(
        **options, advantage={"per_term": per_term}, filter={"groups": "replace"}, generation={"max_new_tokens": 20}
    )
    for rewards, chosen in (([1.0, 1.0], False), ([0.1 + 0.2, 0.3], False), ([1.0, 0.0], True), ([0.5, 1.0], True)):
        one = with_terms(0, {"right": rewards}, [10, 15])
        rollouts = [replace(each, reward=reward) for each, reward in zip(one.rollouts, rewards, strict=True)]
        one = replace(one, rollouts=(rollouts[0], replace(rollouts[1], stop_reason="length")))
        assert algorithm.trains_on(one) == chosen
        assert bool(make_batch([one], algorithm, 1).minibatches) == chosen


def test_rewards_of_cut_completions_have_a_factor_and_advantages_have_bounds():
    """Only what is learned from is scaled, and only where a limit of length ended a rollout."""
    one = group(0, [1.0, 1.0, 0.0], [3, 3, 3])
    one = replace(one, rollouts=(replace(one.rollouts[0], stop_reason="length"), *one.rollouts[1:]))
    algorithm = grpo(reward={"truncated_factor": 0.25}, advantage={"normalize_std": False, "clip_low": -0.2})
    np.testing.assert_allclose(algorithm.batch_advantages([one])[0], [-1 / 6, 7 / 12, -0.2], rtol=1e-12)
    assert one.rewards_G.tolist() == [1.0, 1.0, 0.0]
    with pytest.raises(ValidationError, match="need a baseline other than critic"):
        RlConfig.model_validate({"advantage": {"baseline": "critic", "clip_high": 1.0}})


def test_rewards_that_are_stretched_and_shifted_are_scaled_where_a_limit_ended_them() -> None:
    """NeMo-RL: `scale_rewards` to [-1, 1] and then `stop_properly_penalty_coef` times the result, so that a wrong
    answer that was cut off has -0.25: more than one that has ended."""
    coefficient, raw, cut = 0.25, [1.0, 0.0, 1.0, 0.0], [True, True, False, False]
    scaled = [-1.0 + reward * 2.0 for reward in raw]
    shaped = [value * coefficient if was_cut else value for value, was_cut in zip(scaled, cut, strict=True)]
    one = group(0, [2.0 * reward for reward in raw], [3] * 4)  # the weight of the term is 2
    rollouts = [replace(r, stop_reason="length" if c else "stop") for r, c in zip(one.rollouts, cut, strict=True)]
    one = replace(one, rollouts=tuple(rollouts))
    algorithm = grpo(reward={"truncated_factor": coefficient, "shift": -1.0}, advantage={"normalize_std": False})
    mean = sum(shaped) / 4
    np.testing.assert_allclose(algorithm.batch_advantages([one])[0], [value - mean for value in shaped], rtol=1e-12)
    critic = grpo(reward={"shift": -1.0}, advantage={"baseline": "critic", "normalize_std": False})
    assert critic.batch_advantages([group(0, [2.0, 0.0], [3, 3])])[0].tolist() == [1.0, -1.0]
    with pytest.raises(ValidationError, match=r"reward\.shift = -1 is added to the sum of the terms"):
        grpo(reward={"shift": -1.0}, advantage={"per_term": True})


def test_right_rollouts_are_imitated_by_the_mean_over_their_tokens() -> None:
    """VAPO (2504.05118): mu times the mean of -log pi over all tokens of the positive rollouts of an optimizer step."""
    groups = [group(0, [1.0, -1.0, 1.0], [3, 5, 2]), group(1, [0.0, -1.0, 1.0], [4, 1, 7])]
    first = groups[0].rollouts
    groups[0] = replace(groups[0], rollouts=(*first[:2], replace(first[2], stop_reason="length")))
    algorithm = grpo(loss={"positive_nll_weight": 0.1}, filter={"truncated": "mask"}, advantage={"baseline": "none"})
    one, two = make_batch(groups, algorithm, 2).minibatches
    assert [row.nll_weight for row in one] == [0.1 / 3, 0.0]  # the third is masked
    assert [row.nll_weight for row in two] == [0.0, 0.0, 0.1 / 7]
    equal = make_batch([group(0, [1.0, 1.0], [3, 5])], algorithm, 1)
    assert [row.nll_weight for row in equal.minibatches[0]] == [0.1 / 8] * 2  # though nothing compares them
    assert not any(row.nll_weight for row in make_batch(groups, grpo(), 1).minibatches[0])


def test_an_algorithm_can_compare_rollouts_of_the_whole_batch():
    class Batch(Grpo):
        def batch_advantages(self, groups: Sequence[RolloutGroup]) -> list[np.ndarray]:
            mean = np.mean([rollout.reward for one in groups for rollout in one.rollouts])
            return [one.rewards_G - mean for one in groups]

    (part,) = make_batch([group(0, [1.0, 1.0], [3, 5]), group(1, [0.0, 0.0], [3, 5])], Batch(RlConfig()), 1).minibatches
    assert [row.advantage for row in part] == [0.5, 0.5, -0.5, -0.5]


def test_a_term_without_a_weight_is_no_signal():
    terms = {"right": [1.0, 1.0], "form": [0.0, 1.0]}
    reward = {"terms": [{"name": "right"}, {"name": "form", "weight": 0.0}]}
    algorithm = grpo(reward=reward, advantage={"per_term": True}, filter={"groups": "drop"})
    assert not algorithm.trains_on(with_terms(0, terms, [3, 3]))
    assert grpo(advantage={"per_term": True}).trains_on(group(0, [1.0, 1.0], [3, 3]))
