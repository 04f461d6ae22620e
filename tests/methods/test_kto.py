"""Labels of completions: the loss against the paper's equation in float64, and a run of it."""

from __future__ import annotations

import copy
import math

import cloudpickle
import pytest
import torch

from rlctl.backends.batching.batch import MinibatchResult, TokenBatch
from rlctl.errors import ConfigError
from rlctl.methods.configuration import resolve
from rlctl.methods.kto import Kto
from rlctl.training.run_loss import RunLoss
from support.groups import text_group

LENGTHS, GOOD, Z0, BETA = (3, 1, 4), (True, False, True), 0.4, 0.3


def made(*sets: str) -> Kto:
    config = resolve(flags={"run.algorithm": "kto", "preference.beta": BETA}, sets=sets, environment={}).config
    return Kto(config, Z0)


def batch() -> TokenBatch:
    rollout_R = torch.tensor([text for text, count in enumerate(LENGTHS) for _ in range(count)])
    generator = torch.Generator().manual_seed(3)
    policy, reference = (-torch.rand(sum(LENGTHS), generator=generator, dtype=torch.float64) for _ in range(2))
    zeros = torch.zeros_like(policy)
    return TokenBatch(
        logprobs_R=policy.requires_grad_(), entropy_R=zeros, rollout_logprobs_R=zeros,
        advantages_R=zeros, extra_R={"label": torch.tensor([float(GOOD[text]) for text in rollout_R.tolist()])},
        token_weights_R=torch.full_like(zeros, 1 / 3), counted_R=torch.ones_like(zeros, dtype=torch.bool),
        rollout_R=rollout_R, reference_logprobs_R=reference,
    )  # fmt: skip


def test_the_loss_and_its_gradient_are_those_of_the_paper() -> None:
    algorithm, given = made("preference.good_weight=1.5", "preference.bad_weight=0.5"), batch()
    assert given.reference_logprobs_R is not None
    policy = given.logprobs_R.detach().clone().requires_grad_()
    ratios = [one.sum() for one in (policy - given.reference_logprobs_R).split(LENGTHS)]
    losses = [
        1.5 * (1 - torch.sigmoid(BETA * (ratio - Z0))) if good else 0.5 * (1 - torch.sigmoid(BETA * (Z0 - ratio)))
        for ratio, good in zip(ratios, GOOD, strict=True)
    ]
    expected = torch.stack(losses).mean()
    expected.backward()
    sent = cloudpickle.loads(cloudpickle.dumps(RunLoss(algorithm)))  # as the ranks get it, with the estimate
    out = sent(given)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(given.logprobs_R.grad, policy.grad, rtol=1e-12, atol=0)
    sums = {name: float(value) for name, value in out.sums.items()}
    found = sent.metrics([MinibatchResult(0.0, sums, {"kl": float(out.maxima["kl"])}, 0.0, False)])
    assert (found["good"], found["bad"], found["kl"]) == pytest.approx((2, 1, Z0))
    assert found["rewards/chosen"] == pytest.approx(BETA * (ratios[0] + ratios[2]).item() / 2)
    assert found["rewards/rejected"] == pytest.approx(BETA * ratios[1].item())


def test_the_text_next_to_a_completion_is_for_the_estimate_alone() -> None:
    algorithm = made("batch.prompts=2")
    groups = [text_group(position, [3, 2]) for position in range(2)]
    train = algorithm.train_batch(groups, 1)
    assert [(one.position, one.sample) for one in train.minibatches[0]] == [(0, 0), (1, 0)]
    assert [one.token_weight for one in train.minibatches[0]] == [0.5, 0.5]
    others, loss, take = algorithm.before_training(train)
    assert [(one.position, one.sample) for one in others.minibatches[0]] == [(0, 1), (1, 1)]
    given = batch()
    sums = {name: float(value) for name, value in loss(given).sums.items()}
    assert given.reference_logprobs_R is not None
    mean = (given.logprobs_R - given.reference_logprobs_R).sum().item() / 3
    for sign, expected in ((1, max(0.0, mean)), (-1, max(0.0, -mean))):
        own = copy.deepcopy(sums) | {"ratio": sign * sums["ratio"]}
        take([MinibatchResult(0.0, own, {}, 0.0, False)])
        assert math.isclose(algorithm.z0, expected)


def test_keys_of_pairs_do_not_exist_for_labels() -> None:
    with pytest.raises(ConfigError, match="no key `sft_weight` in the section `preference`"):
        made("preference.sft_weight=1")
