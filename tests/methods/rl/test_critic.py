"""A critic's advantages against plain loops in float64, its loss against its formula, and its metrics."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlctl.backends.batching.batch import MinibatchResult, ValueBatch
from rlctl.backends.batching.packed_rows import PackedRow
from rlctl.backends.results import add_advantages
from rlctl.methods.rl.critic import ClippedValueLoss, TokenAdvantages, critic_metrics
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.methods.rl.sections import CriticConfig

LENGTHS = [5, 1, 0, 8, 3]
REWARDS = [1.0, -0.5, 9.0, 0.25, 2.0]
GAMMA, LAMBDA = 0.9, 0.8


def config(**loss: object) -> RlConfig:
    return RlConfig.model_validate(
        {
            "advantage": {"baseline": "critic", "normalize_std": False, "whiten": True},
            "critic": {"gamma": GAMMA, "gae_lambda": LAMBDA},
            "loss": loss,
        }
    )


def batch(seed: int = 0) -> ValueBatch:
    """Rollouts of `LENGTHS` response tokens; the last one is left out of the loss."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        return torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)

    rollout_R = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    old_logprobs_R = noise() - 3
    return ValueBatch(
        values_R=noise(),
        rewards_R=torch.tensor(REWARDS, dtype=torch.float64)[rollout_R],
        token_weights_R=torch.where(rollout_R == 4, 0.0, 0.1),
        counted_R=rollout_R != 4,
        rollout_R=rollout_R,
        old_logprobs_R=old_logprobs_R,
        reference_logprobs_R=old_logprobs_R + 0.3 * noise(),
    )


def by_definition(values: ValueBatch, coefficient: float) -> list[float]:
    """A_t as the sum over l of (gamma lambda)^l d_(t + l), for each token of each rollout."""
    found, start = [], 0
    assert values.old_logprobs_R is not None
    assert values.reference_logprobs_R is not None
    for length, reward in zip(LENGTHS, REWARDS, strict=True):
        own = slice(start, start + length)
        v = [*values.values_R[own].tolist(), 0.0]
        r = [0.0] * length
        if length:
            r[-1] = reward
        for t in range(length):
            i = start + t
            if values.counted_R[i]:
                r[t] -= coefficient * float(values.old_logprobs_R[i] - values.reference_logprobs_R[i])
        deltas = [r[t] + GAMMA * v[t + 1] - v[t] for t in range(length)]
        found += [
            sum((GAMMA * LAMBDA) ** (later - t) * deltas[later] for later in range(t, length)) for t in range(length)
        ]
        start += length
    return found


def test_without_discount_each_token_has_its_own_reward() -> None:
    """gamma 0: A_t = r_t - V_t (1506.02438, equation 16)."""
    values = batch()
    zero = config().model_copy(update={"critic": CriticConfig(gamma=0.0, gae_lambda=LAMBDA)})
    rewards = [r for n, reward in zip(LENGTHS, REWARDS, strict=True) for r in [0.0] * (n - 1) + [reward] * (n > 0)]
    _, advantages_R = TokenAdvantages(zero)(values)
    torch.testing.assert_close(advantages_R, torch.tensor(rewards, dtype=torch.float64) - values.values_R)


@pytest.mark.parametrize("coefficient", [0.0, 0.2])
def test_advantages_are_those_of_the_double_loop(coefficient: float) -> None:
    options = config(kl_coefficient=coefficient, kl_in="reward", kl_estimator="k1")
    estimate = pickle.loads(pickle.dumps(TokenAdvantages(options)))
    values = batch()
    returns_R, advantages_R = estimate(values)
    expected = torch.tensor(by_definition(values, coefficient), dtype=torch.float64)
    torch.testing.assert_close(advantages_R, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns_R, expected + values.values_R, rtol=1e-12, atol=1e-12)


def test_a_micro_batch_without_tokens_has_no_advantages() -> None:
    empty = {name: value[:0] for name, value in vars(batch()).items() if value is not None}
    returns_R, advantages_R = TokenAdvantages(config())(ValueBatch(**empty))
    assert returns_R.shape == advantages_R.shape == (0,)


class Group:
    """A group of one rank."""

    @staticmethod
    def size() -> int:
        return 1


def row_of(values: ValueBatch) -> PackedRow:
    columns = {
        "values": values.values_R, "advantages": values.rewards_R, "rollout": values.rollout_R,
        "token_weights": values.token_weights_R,
    }  # fmt: skip
    nothing = torch.zeros(0)
    return PackedRow(nothing, nothing, (), 0, nothing, nothing, nothing, columns)


def test_whitened_advantages_are_of_all_rows_and_of_the_tokens_that_count() -> None:
    rows = [row_of(batch(seed)) for seed in range(3)]
    for _ in range(2):  # asked for again, it begins with the rewards again
        add_advantages(rows, TokenAdvantages(config()), Group())
    counted = torch.cat([row.columns_R["advantages"][row.columns_R["token_weights"] != 0] for row in rows])
    plain = torch.tensor([a for seed in range(3) for a in by_definition(batch(seed), 0.0)[: sum(LENGTHS[:4])]])
    white = (plain.double() - plain.double().mean()) / plain.double().std(correction=0)
    torch.testing.assert_close(counted, white, rtol=1e-5, atol=1e-5)
    returns = TokenAdvantages(config())(batch(2))[0]
    torch.testing.assert_close(rows[2].columns_R["returns"], returns)


def test_equal_advantages_are_whitened_to_nothing() -> None:
    values = batch()
    values = replace(values, values_R=torch.zeros_like(values.values_R), rewards_R=torch.zeros_like(values.rewards_R))
    row = row_of(values)
    add_advantages([row], TokenAdvantages(config()), Group())
    assert not row.columns_R["advantages"].any()


@pytest.mark.parametrize(("clip", "scale"), [(0.2, 1.0), (None, 1.0), (0.2, 0.4)])
def test_the_loss_is_that_of_the_worse_of_value_and_clipped_value(clip: float | None, scale: float) -> None:
    values = batch()
    old_R, returns_R = values.values_R + 0.5 * torch.randn_like(values.values_R), torch.randn_like(values.values_R)
    trained_R = values.values_R.clone().requires_grad_()
    found = ClippedValueLoss(clip, scale)(replace(values, values_R=trained_R, old_values_R=old_R, returns_R=returns_R))
    found.loss.backward()
    expected, gradient = 0.0, []
    for v, old, target, weight in zip(*(x.tolist() for x in (values.values_R, old_R, returns_R)),
                                      values.token_weights_R.tolist(), strict=True):  # fmt: skip
        bounded = old + float(np.clip(v - old, -clip, clip)) if clip else v
        worse = max((v - target) ** 2, (bounded - target) ** 2)
        expected += weight * scale * 0.5 * worse
        # Within the limit both are the value, up to rounding.
        follows = clip is None or abs(v - old) <= clip or (v - target) ** 2 >= (bounded - target) ** 2
        gradient.append(weight * scale * (v - target) if follows else 0.0)
    assert found.loss.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(trained_R.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-6, atol=1e-9)


def result(values: ValueBatch) -> MinibatchResult:
    found = ClippedValueLoss(0.2)(values)
    return MinibatchResult(0.0, {name: float(value) for name, value in found.sums.items()}, {}, 2.0, False)


def test_metrics_are_of_all_tokens_that_count() -> None:
    values = batch()
    old_R = values.values_R - 0.1
    returns_R = 2 * old_R + 1
    counted = values.counted_R
    metrics = critic_metrics([result(replace(values, old_values_R=old_R, returns_R=returns_R))] * 2)
    assert metrics["values_mean"] == pytest.approx(old_R[counted].mean().item())
    assert metrics["returns_mean"] == pytest.approx(returns_R[counted].mean().item())
    assert metrics["explained_variance"] == pytest.approx(1 - 1 / 4)  # the error is half of the return and a constant
    assert metrics["clip_fraction"] == 0
    assert metrics["grad_norm"] == 2.0
    perfect = result(replace(values, values_R=returns_R, old_values_R=returns_R, returns_R=returns_R))
    assert critic_metrics([perfect])["explained_variance"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"critic": {"gamma": 0.9}}, "critic.gamma = 0.9 looks at all tokens that follow"),
        ({"loss": {"kl_coefficient": 0.1, "kl_in": "reward"}}, "loss.kl_in = reward looks at all"),
        ({"loss": {"kl_coefficient": 0.1, "kl_in": "loss", "kl_score_term": True}}, "loss.kl_score_term = true looks"),
        ({}, ""),
    ],
)
def test_sums_over_an_episode_need_its_tokens_in_one_sequence(
    sections: dict[str, dict[str, object]], said: str
) -> None:
    """With `environment.thinking=template` an episode is several sequences, and sums end with each of them."""
    advantage = {"baseline": "critic", "normalize_std": False}
    for thinking in ("keep", "template"):
        environment = {"name": "guess-number", "thinking": thinking}
        values = {"advantage": advantage, "environment": environment, **sections}
        if said and thinking == "template":
            with pytest.raises(ValueError, match=re.escape(said)):
                RlConfig.model_validate(values)
        else:
            RlConfig.model_validate(values)
