"""The loss of preferences against its formula in float64, and its metrics."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from rlctl.backends.batching.batch import MinibatchResult, TokenBatch
from rlctl.errors import ConfigError
from rlctl.methods.available import method_from_config
from rlctl.methods.configuration import resolve
from rlctl.methods.preference import DpoConfig
from rlctl.training.run_loss import RunLoss
from support.groups import text_group

LENGTHS = [(3, 5), (2, 0), (4, 1)]
"""Tokens of the chosen and of the rejected completion of each pair."""
BETA = 0.3


def config(**preference: Any) -> DpoConfig:
    sets = [f"preference.{key}={value}" for key, value in preference.items()]
    return resolve(flags={"run.algorithm": "dpo"}, sets=sets, environment={}).config


def batch(pairs: list[int]) -> TokenBatch:
    """A micro-batch of some of the pairs; log-probs follow from pair, completion and token."""
    counts = [count for pair in pairs for count in LENGTHS[pair]]
    rollout_R = torch.tensor([index for index, count in enumerate(counts) for _ in range(count)])
    rng = [np.random.default_rng(pair) for pair in pairs]
    policy, reference = (
        torch.tensor(np.concatenate([-draw.random(sum(LENGTHS[pair])) for draw, pair in zip(rng, pairs, strict=True)]))
        for _ in range(2)
    )
    zeros = torch.zeros_like(policy)
    return TokenBatch(
        logprobs_R=policy.requires_grad_(), entropy_R=zeros, rollout_logprobs_R=zeros, advantages_R=zeros,
        token_weights_R=torch.full_like(zeros, 1 / len(LENGTHS)), counted_R=torch.ones_like(zeros, dtype=torch.bool),
        rollout_R=rollout_R, reference_logprobs_R=reference,
    )  # fmt: skip


def in_plain_python(smoothing: float) -> dict[str, float]:
    """Equation 7 of the paper over all pairs, one token after another."""
    found: dict[str, list[float]] = {"loss": [], "chosen": [], "rejected": [], "right": [], "logp": []}
    for pair, (chosen, rejected) in enumerate(LENGTHS):
        one = batch([pair])
        assert one.reference_logprobs_R is not None
        policy, reference = one.logprobs_R.tolist(), one.reference_logprobs_R.tolist()
        of_chosen = sum(policy[:chosen]) - sum(reference[:chosen])
        of_rejected = sum(policy[chosen : chosen + rejected]) - sum(reference[chosen : chosen + rejected])
        margin = BETA * (of_chosen - of_rejected)
        right, wrong = 1 / (1 + math.exp(-margin)), 1 / (1 + math.exp(margin))
        found["loss"].append(-(1 - smoothing) * math.log(right) - smoothing * math.log(wrong))
        found["chosen"].append(BETA * of_chosen)
        found["rejected"].append(BETA * of_rejected)
        found["right"].append(float(margin > 0))
        found["logp"].append(sum(policy[:chosen]))
    return {name: sum(values) / len(values) for name, values in found.items()}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_and_the_metrics_are_those_of_the_paper_however_pairs_are_dealt(smoothing: float) -> None:
    run_loss = RunLoss(method_from_config(config(beta=BETA, label_smoothing=smoothing)))
    expected = in_plain_python(smoothing)
    for dealt in ([[0, 1, 2]], [[2], [0, 1]]):
        outputs = [run_loss(batch(pairs)) for pairs in dealt]
        assert sum(float(one.loss) for one in outputs) == pytest.approx(expected["loss"], rel=1e-12)
        results = [
            MinibatchResult(0.0, {name: float(v) for name, v in one.sums.items()}, {}, 1.0, False) for one in outputs
        ]
        metrics = run_loss.metrics(results)
        assert metrics["pairs"] == pytest.approx(3)
        assert metrics["rewards/chosen"] == pytest.approx(expected["chosen"])
        assert metrics["rewards/rejected"] == pytest.approx(expected["rejected"])
        assert metrics["rewards/margins"] == pytest.approx(expected["chosen"] - expected["rejected"])
        assert metrics["rewards/accuracies"] == pytest.approx(expected["right"])
        assert metrics["logps/chosen"] == pytest.approx(expected["logp"])


def test_the_gradient_is_that_of_the_paper() -> None:
    algorithm = method_from_config(config(beta=BETA))
    whole = batch([0, 1, 2])
    RunLoss(algorithm)(whole).loss.backward()
    start = 0
    for pair, (chosen, rejected) in enumerate(LENGTHS):
        one = batch([pair])
        assert one.reference_logprobs_R is not None
        ratio = (one.logprobs_R - one.reference_logprobs_R).detach()
        margin = BETA * float(ratio[:chosen].sum() - ratio[chosen:].sum())
        weight = BETA / (1 + math.exp(margin)) / len(LENGTHS)  # sigmoid(rejected reward - chosen reward)
        expected = torch.tensor([-weight] * chosen + [weight] * rejected, dtype=torch.float64)
        assert whole.logprobs_R.grad is not None
        torch.testing.assert_close(whole.logprobs_R.grad[start : start + chosen + rejected], expected)
        start += chosen + rejected


def of_one_pair(pair: int, loss: str, average: bool, weight: float) -> float:
    """The loss of a pair by the formula of its paper, one token after another; gamma of simpo is 0.5."""
    chosen, rejected = LENGTHS[pair]
    one = batch([pair])
    policy = one.logprobs_R.tolist()
    sums = sum(policy[:chosen]), sum(policy[chosen:])
    means = sums[0] / max(1, chosen), sums[1] / max(1, rejected)
    if loss == "simpo":
        found = math.log1p(math.exp(-(BETA * means[0] - BETA * means[1] - 0.5)))
    elif loss == "orpo":
        odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in means]
        found = -means[0] - BETA * math.log(1 / (1 + odds[1] / odds[0]))
    else:
        assert one.reference_logprobs_R is not None
        reference = one.reference_logprobs_R.tolist()
        ratios = [sums[0] - sum(reference[:chosen]), sums[1] - sum(reference[chosen:])]
        ratio = ratios[0] / chosen - ratios[1] / max(1, rejected) if average else ratios[0] - ratios[1]
        found = (ratio - 1 / (2 * BETA)) ** 2 if loss == "ipo" else math.log1p(math.exp(-BETA * ratio))
    imitated = means[0] if average or loss in ("simpo", "orpo") else sums[0]
    return found - weight * imitated


@pytest.mark.parametrize(
    ("loss", "average", "weight"),
    [
        ("ipo", False, 0.0), ("ipo", True, 0.0), ("simpo", False, 0.0), ("orpo", False, 0.0), ("dpo", True, 0.0),
        ("dpo", True, 0.01), ("dpo", False, 0.01), ("simpo", False, 0.2),
    ],
)  # fmt: skip
def test_losses_of_its_kind_are_those_of_their_papers(loss: str, average: bool, weight: float) -> None:
    margin = {"target_margin": 0.5} if loss == "simpo" else {}
    wanted = config(beta=BETA, loss=loss, average=str(average).lower(), sft_weight=weight, **margin)
    algorithm = method_from_config(wanted)
    assert (algorithm.needs == {"reference_logprobs"}) == (loss in ("dpo", "ipo"))
    pairs = [0, 2]  # a text without tokens has no odds
    given = batch(pairs)
    if not algorithm.needs:
        given = dataclasses.replace(given, reference_logprobs_R=None)
    expected = sum(of_one_pair(pair, loss, average, weight) for pair in pairs) / len(LENGTHS)
    output = RunLoss(algorithm)(given)
    assert float(output.loss) == pytest.approx(expected, rel=1e-12)
    output.loss.backward()
    assert given.logprobs_R.grad is not None
    assert bool((given.logprobs_R.grad != 0).all())


def test_keys_of_another_loss_are_refused() -> None:
    for key, value in (("label_smoothing", 0.1), ("average", "true"), ("target_margin", 1.0)):
        with pytest.raises(ConfigError, match=f"{key} is for preference.loss = "):
            config(loss="orpo", **{key: value})


def test_optimizer_steps_divide_a_batch_between_pairs() -> None:
    groups = [text_group(position, [3, 2]) for position in range(3)]
    made = method_from_config(config()).train_batch(groups, 2)
    assert [[(one.position, one.sample) for one in step] for step in made.minibatches] == [
        [(0, 0), (0, 1), (1, 0), (1, 1)], [(2, 0), (2, 1)],
    ]  # fmt: skip
    assert [one.token_weight for step in made.minibatches for one in step] == [0.5] * 4 + [1] * 2
    with pytest.raises(ConfigError, match="8 rows do not split into batch"):
        resolve(flags={"run.algorithm": "dpo", "batch.optimizer_steps": 16}, environment={})
