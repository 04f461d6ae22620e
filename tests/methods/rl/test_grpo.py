"""GRPO's loss and metrics against scalar float64 references written from the papers, values and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlctl.backends.batching.batch import LossOutput, MinibatchResult, TokenBatch
from rlctl.methods.rl.grpo import Grpo
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.methods.rl.sections import LossConfig
from rlctl.training.run_loss import RunLoss
from support.token_batches import f64, ppo_loss, token_batch


def grpo(**options: Any) -> RunLoss:
    return RunLoss(Grpo(RlConfig(loss=LossConfig(**options))))


def metrics_of(loss: RunLoss, output: LossOutput) -> dict[str, Any]:
    """The metrics of a step with one micro-batch."""
    sums = {name: float(value) for name, value in output.sums.items()}
    maxima = {name: float(value) for name, value in output.maxima.items()}
    return loss.metrics([MinibatchResult(output.loss.item(), sums, maxima, 1.0, False)])


def reference_loss(batch: TokenBatch, logprobs: list[float], loss: RunLoss) -> float:
    """The whole objective of a batch in plain Python, token by token."""
    options = loss.method.config.loss
    total = 0.0
    for i, logprob in enumerate(logprobs):
        engine = batch.rollout_logprobs_R[i].item()
        old = engine if options.importance_correction == "ratio" else batch.old_logprobs_R[i].item()
        weight = math.exp(old - engine)
        if options.importance_correction == "off":
            weight = 1.0
        elif options.importance_correction == "truncated":
            weight = min(weight, options.importance_cap)
        elif not 1 / options.importance_cap <= weight <= options.importance_cap:
            weight = 0.0
        advantage = batch.advantages_R[i].item()
        token = weight * ppo_loss(
            math.exp(logprob - old), advantage, options.clip_low, options.clip_high, options.dual_clip
        )
        log_ratio = batch.reference_logprobs_R[i].item() - logprob
        kl = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(log_ratio) - log_ratio - 1}
        token += options.kl_coefficient * kl[options.kl_estimator]
        total += batch.token_weights_R[i].item() * token
    return total


@pytest.mark.parametrize("correction", ["off", "truncated", "masked", "ratio"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_grpo_loss_and_gradient(correction: str, estimator: str) -> None:
    """GRPO (2402.03300) equation 3 with the options above and truncated or masked importance weights, and autograd
    against central differences; k1 has a gradient of its own (`test_kl.py`)."""
    loss = grpo(
        clip_low=0.15, clip_high=0.25, dual_clip=1.5, kl_coefficient=0.3, kl_estimator=estimator,
        importance_correction=correction, importance_cap=1.3,
    )  # fmt: skip
    for seed in (0, 1):
        batch = token_batch(seed=seed)
        found, logprobs = loss(batch).loss, batch.logprobs_R.tolist()
        assert math.isclose(found.item(), reference_loss(batch, logprobs, loss), rel_tol=1e-12)
    found.backward()
    step, expected = 1e-6, []
    for i in range(len(logprobs)):
        up, down = list(logprobs), list(logprobs)
        up[i] += step
        down[i] -= step
        expected.append((reference_loss(batch, up, loss) - reference_loss(batch, down, loss)) / (2 * step))
    if estimator != "k1":
        torch.testing.assert_close(batch.logprobs_R.grad, f64(expected), rtol=1e-6, atol=1e-9)


def test_without_old_logprobs_the_gradient_is_the_policy_gradient() -> None:
    """First step after sampling: ratio 1, gradient -w A grad log pi (RLOO 2402.14740, equation 4; REINFORCE)."""
    batch = token_batch(old_logprobs_R=None, reference_logprobs_R=None)
    loss = grpo(importance_correction="off")
    output = loss(batch)
    output.loss.backward()
    torch.testing.assert_close(batch.logprobs_R.grad, -batch.token_weights_R * batch.advantages_R)
    metrics = metrics_of(loss, output)
    assert metrics["ratio"]["mean"] == 1
    assert metrics["clip_fraction"] == 0


def test_left_out_tokens_change_nothing_even_when_they_are_infinite() -> None:
    whole = token_batch(tokens=6)
    padded = TokenBatch(
        **{
            name: torch.cat([column.detach(), torch.full_like(column[:2], filler).detach()])
            for name, column, filler in [
                ("entropy_R", whole.entropy_R, math.nan),
                ("rollout_logprobs_R", whole.rollout_logprobs_R, -math.inf),
                ("advantages_R", whole.advantages_R, 1e30),
                ("token_weights_R", whole.token_weights_R, 0),
                ("counted_R", whole.counted_R, 0),
                ("rollout_R", whole.rollout_R, 2),
                ("old_logprobs_R", whole.old_logprobs_R, 0.0),
                ("reference_logprobs_R", whole.reference_logprobs_R, 0.0),
            ]
        },
        logprobs_R=torch.cat([whole.logprobs_R.detach(), f64([-1.0, -1.0])]).requires_grad_(),
    )
    loss = grpo(kl_coefficient=0.1)
    expected, got = loss(whole), loss(padded)
    expected.loss.backward()
    got.loss.backward()
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got.sums, expected.sums)
    torch.testing.assert_close(got.maxima, expected.maxima)
    torch.testing.assert_close(padded.logprobs_R.grad[:6], whole.logprobs_R.grad)
    assert (padded.logprobs_R.grad[6:] == 0).all()


def test_metrics_are_token_means_and_maxima() -> None:
    loss = grpo(clip_low=0.1, clip_high=0.1, importance_correction="truncated", importance_cap=1.2)
    batch = token_batch(reference_logprobs_R=None, counted_R=torch.arange(9) != 4)
    metrics = metrics_of(loss, loss(batch))
    kept = [i for i in range(9) if i != 4]

    def mean(function) -> float:
        return sum(function(i) for i in kept) / len(kept)

    now, old, engine = batch.logprobs_R.tolist(), batch.old_logprobs_R.tolist(), batch.rollout_logprobs_R.tolist()
    advantages = batch.advantages_R.tolist()
    assert metrics["entropy"] == pytest.approx(mean(lambda i: batch.entropy_R[i].item()))
    assert "kl" not in metrics  # there is no reference policy that it could be to
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
    weights = [math.exp(old[i] - engine[i]) for i in kept]  # before truncation
    assert metrics["importance"] == {
        "mean": pytest.approx(sum(weights) / len(weights)),
        "max": pytest.approx(max(weights)),
        "effective": pytest.approx(sum(weights) ** 2 / len(weights) / sum(weight**2 for weight in weights)),
    }
    assert metrics["importance"]["effective"] < 1
    clipped = mean(lambda i: ppo_gradient_is_zero(math.exp(now[i] - old[i]), advantages[i], 0.1))
    assert metrics["clip_fraction"] == pytest.approx(clipped)
    assert clipped > 0


def ppo_gradient_is_zero(ratio: float, advantage: float, bound: float) -> bool:
    return (advantage > 0 and ratio > 1 + bound) or (advantage < 0 and ratio < 1 - bound)


def test_kl_metric_is_to_the_reference_where_one_is_held() -> None:
    batch = token_batch()
    sums = grpo(kl_coefficient=0.01, kl_estimator="k1")(batch).sums
    expected = (batch.logprobs_R.detach() - batch.reference_logprobs_R).sum()
    torch.testing.assert_close(sums["kl"], expected)


def test_an_extreme_ratio_gives_a_finite_loss_and_gradient() -> None:
    batch = token_batch(tokens=2, old_logprobs_R=f64([-500.0, -1.0]), advantages_R=f64([-1.0, -1.0]))
    output = grpo(kl_coefficient=0.1)(batch)
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert torch.isfinite(batch.logprobs_R.grad).all()


def test_log_probs_that_are_needed_follow_the_configuration() -> None:
    def needs(**sections: dict[str, Any]) -> frozenset[str]:
        return Grpo(RlConfig.model_validate(sections)).needs

    assert needs() == frozenset()
    assert needs(batch={"optimizer_steps": 2}) == {"old_logprobs"}
    assert needs(loss={"kl_coefficient": 0.001}) == {"reference_logprobs"}
    assert needs(loss={"needs": ["old_logprobs"]}) == {"old_logprobs"}
