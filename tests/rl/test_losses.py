"""The PPO/GRPO token loss against scalar float64 references written from the papers, values and gradients."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch

from rlctl.backends.base import TokenBatch
from rlctl.config.schema import GrpoConfig
from rlctl.rl.corrections import importance_weights
from rlctl.rl.losses import GrpoLoss, clipped_surrogate, is_clipped
from rlctl.rl.run_loss import loss_metrics

RATIOS = [0.2, 0.75, 0.8, 0.9, 1.0, 1.1, 1.2, 1.25, 1.29, 2.9, 3.1, 8.0]


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ppo_loss(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    """PPO (1707.06347) equation 7 with DAPO's (2503.14476) two bounds, and dual-clip PPO (1912.09729) equation 5."""
    clipped = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, clipped * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


@pytest.mark.parametrize("advantage", [1.7, -0.6, 0.0])
@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28)])
def test_clipped_surrogate(advantage: float, dual: float | None, low: float, high: float) -> None:
    got = clipped_surrogate(f64(RATIOS), torch.full((len(RATIOS),), advantage, dtype=torch.float64), low, high, dual)
    expected = f64([ppo_loss(ratio, advantage, low, high, dual) for ratio in RATIOS])
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dual", [None, 3.0])
def test_clipped_tokens_are_those_without_gradient(dual: float | None) -> None:
    off_the_bounds = [0.2, 0.75, 0.9, 1.0, 1.1, 1.25, 1.29, 2.9, 3.1, 8.0]
    for advantage in (1.7, -0.6):
        ratio_T = f64(off_the_bounds).requires_grad_()
        advantages_T = torch.full_like(ratio_T, advantage).detach()
        clipped_surrogate(ratio_T, advantages_T, 0.2, 0.28, dual).sum().backward()
        clipped_T = is_clipped(ratio_T.detach(), advantages_T, 0.2, 0.28, dual)
        assert (clipped_T == (ratio_T.grad == 0)).all()
        assert clipped_T.any()


def token_batch(tokens: int = 9, seed: int = 0, **columns: torch.Tensor | None) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(tokens, generator=generator, dtype=torch.float64) * scale

    logprobs_T = -2.0 + noise(0.5)
    batch = TokenBatch(
        logprobs_T=logprobs_T.clone().requires_grad_(),
        entropy_T=noise(1.0).abs(),
        rollout_logprobs_T=logprobs_T + noise(0.5),
        advantages_T=noise(1.0),
        token_weights_T=noise(0.1).abs(),
        loss_mask_T=torch.ones(tokens, dtype=torch.bool),
        rollout_T=torch.arange(tokens) // 3,
        old_logprobs_T=logprobs_T + noise(0.2),
        reference_logprobs_T=logprobs_T + noise(0.3),
    )
    return replace(batch, **columns)


def reference_loss(batch: TokenBatch, logprobs: list[float], loss: GrpoLoss) -> float:
    """The whole objective of a batch in plain Python, token by token."""
    total = 0.0
    for i, logprob in enumerate(logprobs):
        old = batch.old_logprobs_T[i].item()
        weight = math.exp(old - batch.rollout_logprobs_T[i].item())
        if loss.importance_correction == "off":
            weight = 1.0
        elif loss.importance_correction == "truncated":
            weight = min(weight, loss.importance_cap)
        elif not 1 / loss.importance_cap <= weight <= loss.importance_cap:
            weight = 0.0
        advantage = batch.advantages_T[i].item()
        token = weight * ppo_loss(math.exp(logprob - old), advantage, loss.clip_low, loss.clip_high, loss.dual_clip)
        log_ratio = batch.reference_logprobs_T[i].item() - logprob
        kl = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(log_ratio) - log_ratio - 1}
        token += loss.kl_coefficient * kl[loss.kl_estimator]
        total += batch.token_weights_T[i].item() * token
    return total


@pytest.mark.parametrize("correction", ["off", "truncated", "masked"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_grpo_loss_value(correction: str, estimator: str) -> None:
    """GRPO (2402.03300) equation 3 with the options above and truncated or masked importance weights."""
    loss = GrpoLoss(0.15, 0.25, 1.5, 0.3, estimator, correction, importance_cap=1.3)
    batch = token_batch()
    expected = reference_loss(batch, batch.logprobs_T.tolist(), loss)
    assert math.isclose(loss(batch).loss.item(), expected, rel_tol=1e-12)


@pytest.mark.parametrize("correction", ["off", "truncated", "masked"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_grpo_loss_gradient(correction: str, estimator: str) -> None:
    """autograd against central differences of the plain-Python reference."""
    loss = GrpoLoss(0.15, 0.25, 1.5, 0.3, estimator, correction, importance_cap=1.3)
    batch = token_batch(seed=1)
    loss(batch).loss.backward()
    step, logprobs = 1e-6, batch.logprobs_T.tolist()
    expected = []
    for i in range(len(logprobs)):
        up, down = list(logprobs), list(logprobs)
        up[i] += step
        down[i] -= step
        expected.append((reference_loss(batch, up, loss) - reference_loss(batch, down, loss)) / (2 * step))
    torch.testing.assert_close(batch.logprobs_T.grad, f64(expected), rtol=1e-6, atol=1e-9)


def test_without_old_logprobs_the_gradient_is_the_policy_gradient() -> None:
    """First step after sampling: ratio 1, gradient -w A grad log pi (RLOO 2402.14740, equation 4; REINFORCE)."""
    batch = token_batch(old_logprobs_T=None, reference_logprobs_T=None)
    output = GrpoLoss(importance_correction="off")(batch)
    output.loss.backward()
    torch.testing.assert_close(batch.logprobs_T.grad, -batch.token_weights_T * batch.advantages_T)
    metrics = loss_metrics({name: total.item() for name, total in output.sums.items()}, {"ratio": 1, "logprob_diff": 1})
    assert metrics["ratio"]["mean"] == 1
    assert metrics["clip_fraction"] == 0


def test_left_out_tokens_change_nothing_even_when_they_are_infinite() -> None:
    whole = token_batch(tokens=6)
    padded = TokenBatch(
        **{
            name: torch.cat([column.detach(), torch.full_like(column[:2], filler).detach()])
            for name, column, filler in [
                ("entropy_T", whole.entropy_T, math.nan),
                ("rollout_logprobs_T", whole.rollout_logprobs_T, -math.inf),
                ("advantages_T", whole.advantages_T, 1e30),
                ("token_weights_T", whole.token_weights_T, 0),
                ("loss_mask_T", whole.loss_mask_T, 0),
                ("rollout_T", whole.rollout_T, 2),
                ("old_logprobs_T", whole.old_logprobs_T, 0.0),
                ("reference_logprobs_T", whole.reference_logprobs_T, 0.0),
            ]
        },
        logprobs_T=torch.cat([whole.logprobs_T.detach(), f64([-1.0, -1.0])]).requires_grad_(),
    )
    loss = GrpoLoss(kl_coefficient=0.1)
    expected, got = loss(whole), loss(padded)
    expected.loss.backward()
    got.loss.backward()
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got.sums, expected.sums)
    torch.testing.assert_close(got.maxima, expected.maxima)
    torch.testing.assert_close(padded.logprobs_T.grad[:6], whole.logprobs_T.grad)
    assert (padded.logprobs_T.grad[6:] == 0).all()


def test_metrics_are_token_means_and_maxima() -> None:
    loss = GrpoLoss(0.1, 0.1, importance_correction="truncated", importance_cap=1.2)
    batch = token_batch(reference_logprobs_T=None, loss_mask_T=torch.arange(9) != 4)
    output = loss(batch)
    metrics = loss_metrics(
        {name: total.item() for name, total in output.sums.items()},
        {name: value.item() for name, value in output.maxima.items()},
    )
    kept = [i for i in range(9) if i != 4]

    def mean(function) -> float:
        return sum(function(i) for i in kept) / len(kept)

    now, old, engine = batch.logprobs_T.tolist(), batch.old_logprobs_T.tolist(), batch.rollout_logprobs_T.tolist()
    advantages = batch.advantages_T.tolist()
    assert metrics["entropy"] == pytest.approx(mean(lambda i: batch.entropy_T[i].item()))
    assert metrics["kl"] == pytest.approx(mean(lambda i: math.exp(now[i] - engine[i]) - 1 - (now[i] - engine[i])))
    assert metrics["ratio"]["mean"] == pytest.approx(mean(lambda i: math.exp(now[i] - old[i])))
    assert metrics["ratio"]["max"] == pytest.approx(max(math.exp(now[i] - old[i]) for i in kept))
    assert metrics["logprob_diff"]["mean"] == pytest.approx(mean(lambda i: abs(old[i] - engine[i])))
    assert metrics["logprob_diff"]["max"] == pytest.approx(max(abs(old[i] - engine[i]) for i in kept))
    assert metrics["logprob_diff"]["prob_error"] == pytest.approx(mean(lambda i: math.exp(abs(old[i] - engine[i]))))
    expected = mean(lambda i: math.exp(old[i] - engine[i]) - 1 - (old[i] - engine[i]))
    assert metrics["logprob_diff"]["kl"] == pytest.approx(expected)
    assert metrics["importance_weight"] == pytest.approx(mean(lambda i: min(math.exp(old[i] - engine[i]), 1.2)))
    limited = mean(lambda i: math.exp(old[i] - engine[i]) > 1.2)
    assert metrics["importance_limited"] == pytest.approx(limited)
    assert limited > 0
    clipped = mean(lambda i: ppo_gradient_is_zero(math.exp(now[i] - old[i]), advantages[i], 0.1))
    assert metrics["clip_fraction"] == pytest.approx(clipped)
    assert clipped > 0


def ppo_gradient_is_zero(ratio: float, advantage: float, bound: float) -> bool:
    return (advantage > 0 and ratio > 1 + bound) or (advantage < 0 and ratio < 1 - bound)


def test_kl_metric_is_to_the_reference_where_one_is_held() -> None:
    batch = token_batch()
    sums = GrpoLoss(kl_coefficient=0.01, kl_estimator="k1")(batch).sums
    expected = (batch.logprobs_T.detach() - batch.reference_logprobs_T).sum()
    torch.testing.assert_close(sums["kl"], expected)


def test_metric_names_do_not_depend_on_the_batch() -> None:
    loss = GrpoLoss()
    one, other = loss(token_batch(tokens=1)), loss(token_batch(tokens=9, old_logprobs_T=None))
    assert one.sums.keys() == other.sums.keys()
    assert one.maxima.keys() == other.maxima.keys()


@pytest.mark.parametrize("correction", ["off", "truncated", "masked"])
def test_importance_weights(correction: str) -> None:
    """Truncated: min(w, C) (Ionides 2008); masked: w inside [1/C, C], else 0 (IcePop, 2510.18855)."""
    old_T, engine_T = f64([-1.0, -1.0, -1.0, -1.0, -300.0]), f64([-1.0, -1.5, -3.0, -0.2, -1.0])
    weights = [math.exp(o - e) for o, e in zip(old_T.tolist(), engine_T.tolist(), strict=True)]
    expected = {
        "off": [1.0] * 5,
        "truncated": [min(weight, 2.0) for weight in weights],
        "masked": [weight if 0.5 <= weight <= 2.0 else 0.0 for weight in weights],
    }[correction]
    got = importance_weights(old_T.requires_grad_(), engine_T, correction, cap=2.0)
    torch.testing.assert_close(got, f64(expected), rtol=1e-12, atol=1e-8)
    assert not got.requires_grad


def test_an_extreme_ratio_gives_a_finite_loss_and_gradient() -> None:
    batch = token_batch(tokens=2, old_logprobs_T=f64([-500.0, -1.0]), advantages_T=f64([-1.0, -1.0]))
    output = GrpoLoss(kl_coefficient=0.1)(batch)
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert torch.isfinite(batch.logprobs_T.grad).all()


def test_the_loss_of_a_batch_is_the_sum_over_its_parts() -> None:
    """What the backend relies on: any split into micro-batches gives the same sums."""
    batch, loss = token_batch(), GrpoLoss(kl_coefficient=0.1)
    parts = [
        TokenBatch(**{name: column[part] for name, column in vars(batch).items()}) for part in (slice(4), slice(4, 9))
    ]
    outputs = [loss(part) for part in parts]
    whole = loss(batch)
    torch.testing.assert_close(sum(output.loss for output in outputs), whole.loss)
    for name, total in whole.sums.items():
        torch.testing.assert_close(sum(output.sums[name] for output in outputs), total)


def test_configuration_reaches_the_loss() -> None:
    grpo = GrpoConfig(
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=4.0,
        kl_coefficient=0.02,
        kl_estimator="k2",
        importance_correction="masked",
        importance_cap=5.0,
    )
    assert GrpoLoss.from_config(grpo) == GrpoLoss(0.1, 0.3, 4.0, 0.02, "k2", "masked", 5.0)
    assert pickle.loads(pickle.dumps(GrpoLoss.from_config(grpo))) == GrpoLoss.from_config(grpo)


def test_what_is_computed_follows_the_configuration() -> None:
    assert not GrpoConfig().recomputes_old_logprobs
    assert GrpoConfig(optimizer_steps=2).recomputes_old_logprobs
    assert not GrpoConfig().holds_reference
    assert GrpoConfig(kl_coefficient=0.001).holds_reference


def test_a_kl_penalty_without_reference_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match="kl_coefficient"):
        GrpoLoss(kl_coefficient=0.1)(token_batch(reference_logprobs_T=None))
