"""KL estimators: their values and gradients in expectation, by exact enumeration of a small vocabulary in float64.

Source: J. Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rlctl.methods.rl.losses import LOG_RATIO_LIMIT, kl_penalty, kl_weights, score_term
from support.token_batches import token_batch


def exact_kl(q_V: list[float], p_V: list[float]) -> float:
    return sum(q * math.log(q / p) for q, p in zip(q_V, p_V, strict=True))


def softmax(logits_V: list[float]) -> list[float]:
    total = sum(math.exp(logit) for logit in logits_V)
    return [math.exp(logit) / total for logit in logits_V]


LOGITS_Q = [0.3, -1.2, 0.8, 0.0, 2.0]
LOGITS_P = [1.0, -0.2, 0.1, -0.7, 0.5]
Q, P = softmax(LOGITS_Q), softmax(LOGITS_P)


def expected_penalty(estimator: str) -> tuple[float, torch.Tensor]:
    """E over x ~ q of the penalty, and of its gradient with respect to q's logits (q not differentiated as sampler)."""
    logits_V = torch.tensor(LOGITS_Q, dtype=torch.float64, requires_grad=True)
    logprobs_V = logits_V.log_softmax(-1)
    reference_V = torch.tensor(LOGITS_P, dtype=torch.float64).log_softmax(-1)
    penalty_V = kl_penalty(logprobs_V, reference_V, estimator)
    expectation = (logprobs_V.detach().exp() * penalty_V).sum()
    expectation.backward()
    return expectation.item(), logits_V.grad


def finite_difference_gradient(function, logits_V: list[float]) -> torch.Tensor:
    step = 1e-6
    gradient = []
    for i in range(len(logits_V)):
        up, down = list(logits_V), list(logits_V)
        up[i] += step
        down[i] -= step
        gradient.append((function(up) - function(down)) / (2 * step))
    return torch.tensor(gradient, dtype=torch.float64)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_in_value(estimator: str) -> None:
    assert math.isclose(expected_penalty(estimator)[0], exact_kl(Q, P), rel_tol=1e-12)


def test_k2_is_biased_in_value_and_is_half_the_squared_log_ratio() -> None:
    value = expected_penalty("k2")[0]
    assert math.isclose(value, sum(q * math.log(p / q) ** 2 / 2 for q, p in zip(Q, P, strict=True)), rel_tol=1e-12)
    assert not math.isclose(value, exact_kl(Q, P), rel_tol=1e-2)


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_k1_and_k2_have_the_gradient_of_the_kl(estimator: str) -> None:
    expected = finite_difference_gradient(lambda logits: exact_kl(softmax(logits), P), LOGITS_Q)
    torch.testing.assert_close(expected_penalty(estimator)[1], expected, rtol=1e-7, atol=1e-9)


def test_k3_has_the_gradient_of_the_reverse_kl() -> None:
    expected = finite_difference_gradient(lambda logits: exact_kl(P, softmax(logits)), LOGITS_Q)
    torch.testing.assert_close(expected_penalty("k3")[1], expected, rtol=1e-7, atol=1e-9)


def test_a_huge_log_ratio_stays_finite() -> None:
    penalty_R = kl_penalty(torch.tensor([-200.0]), torch.tensor([-1.0]), "k3")
    assert penalty_R.item() == pytest.approx(math.expm1(LOG_RATIO_LIMIT) - LOG_RATIO_LIMIT, rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_capped_penalty_has_the_cap_and_no_gradient_beyond_it(estimator: str) -> None:
    logprobs_R = torch.tensor([-9.0, -0.6, -0.5], dtype=torch.float64, requires_grad=True)
    reference_R = torch.tensor([-0.5, -0.5, -9.0], dtype=torch.float64)
    plain_R = kl_penalty(logprobs_R, reference_R, estimator)
    penalty_R = kl_penalty(logprobs_R, reference_R, estimator, cap=3.0)
    torch.testing.assert_close(penalty_R, plain_R.clamp(-3.0, 3.0))
    (gradient_R,) = torch.autograd.grad(penalty_R.sum(), logprobs_R)
    assert [bool(g) for g in gradient_R] == [False, True, False]


LOGITS_MU = [0.1, -0.9, 0.5, 0.4, 1.6]
MU = softmax(LOGITS_MU)


@pytest.mark.parametrize("weight", ["policy", "importance"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_weighted_penalty_has_the_value_and_the_gradient_of_its_expectation(estimator: str, weight: str) -> None:
    """Tokens of the engine's distribution, weighted by the ratio of the two, have the expectation under the policy;
    with the weight `policy` the engine is the policy."""
    sampled = Q if weight == "policy" else MU

    def expectation(logits: list[float]) -> float:
        """E over x ~ q of the estimator, in plain Python."""
        q_V, total = softmax(logits), 0.0
        for q, p in zip(q_V, P, strict=True):
            d = math.log(p / q)
            total += q * {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[estimator]
        return total

    logits_V = torch.tensor(LOGITS_Q, dtype=torch.float64, requires_grad=True)
    batch = replace(
        token_batch(tokens=5), logprobs_R=logits_V.log_softmax(-1),
        rollout_logprobs_R=torch.tensor(sampled, dtype=torch.float64).log(),
    )  # fmt: skip
    weights_R = kl_weights(batch, weight)
    penalty_R = kl_penalty(batch.logprobs_R, torch.tensor(P, dtype=torch.float64).log(), estimator, weights_R=weights_R)
    found = (torch.tensor(sampled, dtype=torch.float64) * penalty_R).sum()
    found.backward()
    assert math.isclose(found.item(), expectation(LOGITS_Q), rel_tol=1e-12)
    if estimator != "k2":
        assert math.isclose(found.item(), exact_kl(Q, P), rel_tol=1e-12)
    torch.testing.assert_close(logits_V.grad, finite_difference_gradient(expectation, LOGITS_Q), rtol=1e-7, atol=1e-9)


def test_a_weighted_penalty_beyond_the_limit_has_no_gradient_and_the_cap_holds_for_the_product() -> None:
    logprobs_R = torch.tensor([-30.0, -1.0], dtype=torch.float64, requires_grad=True)
    batch = replace(token_batch(tokens=2), logprobs_R=logprobs_R, rollout_logprobs_R=logprobs_R.detach() - 1)
    reference_R = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    weights_R = kl_weights(batch, "importance")
    penalty_R = kl_penalty(logprobs_R, reference_R, "k1", weights_R=weights_R)
    torch.testing.assert_close(penalty_R.detach(), math.e * torch.tensor([-20.0, 1.0], dtype=torch.float64))
    (gradient_R,) = torch.autograd.grad(penalty_R.sum(), logprobs_R, retain_graph=True)
    torch.testing.assert_close(gradient_R, torch.tensor([0.0, 2 * math.e], dtype=torch.float64))
    assert kl_penalty(logprobs_R, reference_R, "k1", 2.0, weights_R).tolist() == [-2.0, 2.0]


TREE_Q = [[0.2, -0.4, 0.9], [1.0, 0.0, -1.0], [-0.3, 0.5, 0.1], [0.7, 0.7, -2.0]]
TREE_P = [[-0.5, 0.3, 0.2], [0.0, 0.4, 0.1], [1.0, -1.0, 0.3], [0.2, -0.6, 0.4]]
"""Logits of completions of two tokens: those of the first, and those of the second after each first one."""


def completions_kl(logits: list[float]) -> float:
    """KL(q || p) of whole completions, by enumeration."""
    q = [softmax(logits[3 * i : 3 * i + 3]) for i in range(4)]
    p = [softmax(row) for row in TREE_P]
    pairs = [(i, j) for i in range(3) for j in range(3)]
    return sum(q[0][i] * q[1 + i][j] * math.log(q[0][i] * q[1 + i][j] / (p[0][i] * p[1 + i][j])) for i, j in pairs)


def expected_gradient(estimator: str, *, with_score_term: bool) -> torch.Tensor:
    """E over completions y ~ q of the gradient of the penalties of y's tokens, all completions in one micro-batch."""
    logits = torch.tensor(TREE_Q, dtype=torch.float64, requires_grad=True)
    q, p = logits.log_softmax(-1), torch.tensor(TREE_P, dtype=torch.float64).log_softmax(-1)
    pairs = [(i, j) for i in range(3) for j in range(3)]
    logprobs_R = torch.stack([q[at] for i, j in pairs for at in ((0, i), (1 + i, j))])
    reference_R = torch.stack([p[at] for i, j in pairs for at in ((0, i), (1 + i, j))])
    probabilities_R = logprobs_R.detach().reshape(-1, 2).sum(1).exp().repeat_interleave(2)
    loss_R = kl_penalty(logprobs_R, reference_R, estimator)
    if with_score_term:
        loss_R = loss_R + score_term(logprobs_R, logprobs_R, reference_R, torch.arange(18) // 2, estimator)
    (probabilities_R * loss_R).sum().backward()
    return logits.grad.flatten()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_with_the_score_term_every_estimator_has_the_gradient_of_the_kl_of_completions(estimator: str) -> None:
    """2506.09477: the gradient of a token's estimator alone leaves out how the token changes what follows it."""
    exact = finite_difference_gradient(completions_kl, [logit for row in TREE_Q for logit in row])
    torch.testing.assert_close(expected_gradient(estimator, with_score_term=True), exact, rtol=1e-6, atol=1e-8)
    alone = expected_gradient(estimator, with_score_term=False)
    assert (alone - exact).abs().max() > 0.02
