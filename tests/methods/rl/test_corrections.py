"""Importance weights and masks against their formulas in plain Python."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rlctl.backends.batching.batch import TokenBatch
from rlctl.methods.rl.losses import Correction, correction
from rlctl.methods.rl.sections import LossConfig
from support.token_batches import f64, token_batch

OLD = [-1.0, -1.0, -1.0, -1.0, -300.0, -1.0]
ENGINE = [-1.0, -1.5, -3.0, -0.2, -1.0, -3.5]
RATIOS = [math.exp(old - engine) for old, engine in zip(OLD, ENGINE, strict=True)]


def corrected(batch: TokenBatch | None = None, **options: Any) -> Correction:
    batch = batch or token_batch(tokens=6, old_logprobs_R=f64(OLD).requires_grad_(), rollout_logprobs_R=f64(ENGINE))
    return correction(batch, LossConfig(**options))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"importance_correction": "off"}, [1.0] * 6),
        ({"importance_correction": "untruncated"}, RATIOS),
        ({"importance_correction": "truncated", "importance_cap": 2.0}, [min(ratio, 2.0) for ratio in RATIOS]),
        ({"importance_correction": "truncated", "importance_floor": 0.9}, [min(max(r, 0.9), 2.0) for r in RATIOS]),
        (
            {"importance_correction": "masked", "importance_cap": 2.0},
            [ratio if 0.5 <= ratio <= 2.0 else 0.0 for ratio in RATIOS],
        ),
        (
            {"importance_correction": "masked", "importance_cap": 5.0, "importance_floor": 0.5},
            [ratio if 0.5 <= ratio <= 5.0 else 0.0 for ratio in RATIOS],
        ),
        (
            {"importance_correction": "masked", "importance_cap": 5.0, "importance_floor": 0.0},
            [ratio if ratio <= 5.0 else 0.0 for ratio in RATIOS],
        ),
        *(
            ({"importance_correction": "truncated", "importance_cap": cap}, [min(ratio, cap) for ratio in RATIOS])
            for cap in (1.0, 0.5)
        ),
        (
            {"importance_correction": "masked", "importance_cap": 0.9, "importance_floor": 0.4},
            [ratio if 0.4 <= ratio <= 0.9 else 0.0 for ratio in RATIOS],
        ),
    ],
)
def test_weights_of_tokens(options: dict[str, Any], expected: list[float]) -> None:
    """Truncated: min(w, C) (Ionides 2008); masked: w inside [floor, C], else 0 (IcePop, 2510.18855: 0.5 and 5)."""
    got = corrected(**options)
    torch.testing.assert_close(got.weights_R, f64(expected), rtol=1e-12, atol=1e-8)
    assert not got.weights_R.requires_grad
    bounded = options["importance_correction"] in ("truncated", "masked")
    moved = [bounded and weight != ratio for weight, ratio in zip(expected, RATIOS, strict=True)]
    assert got.limited_R.tolist() == moved


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"importance_cap": 2.0, "importance_floor": 3.0}, "importance_floor = 3 is above loss.importance_cap = 2"),
        ({"importance_correction": "masked", "importance_cap": 1.0}, "set loss.importance_floor"),
        ({"importance_cap": 0.0}, "greater than 0"),
    ],
)
def test_bounds_that_leave_no_weight_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        LossConfig(**options)


def sequences(batch: TokenBatch, values: list[float]) -> list[list[float]]:
    """The values of each rollout."""
    rollouts = batch.rollout_R.tolist()
    return [[value for value, own in zip(values, rollouts, strict=True) if own == n] for n in sorted(set(rollouts))]


def log_ratios(batch: TokenBatch) -> list[list[float]]:
    assert batch.old_logprobs_R is not None
    return sequences(batch, (batch.old_logprobs_R - batch.rollout_logprobs_R).tolist())


def test_at_the_level_of_sequences_the_product_over_a_rollout_is_truncated_once() -> None:
    batch = token_batch(rollout_R=torch.tensor([0, 0, 1, 1, 1, 1, 3, 3, 3]))  # rollout 2 has no tokens
    products = [math.exp(sum(ratios)) for ratios in log_ratios(batch)]
    assert min(products) < 1.1 < max(products)
    expected = [min(product, 1.1) for product, n in zip(products, (2, 4, 3), strict=True) for _ in range(n)]
    got = corrected(batch, importance_level="sequence", importance_cap=1.1)
    torch.testing.assert_close(got.weights_R, f64(expected))


def test_a_rollout_whose_geometric_mean_is_out_of_bounds_has_no_weight() -> None:
    batch = token_batch(tokens=12)
    means = [math.exp(sum(ratios) / len(ratios)) for ratios in log_ratios(batch)]
    low, high = sorted(means)[1] - 1e-6, sorted(means)[2] + 1e-6
    got = corrected(batch, importance_correction="off", sequence_mask=(low, high))
    assert got.weights_R.tolist() == [float(low <= mean <= high) for mean in means for _ in range(3)]
    assert got.limited_R.tolist() == [not low <= mean <= high for mean in means for _ in range(3)]
    assert 0 < got.limited_R.sum() < 12


def test_a_rollout_whose_tokens_are_off_by_too_much_on_average_has_no_weight() -> None:
    """NeMo-RL's `seq_logprob_error_threshold`: the mean of exp|log pi - log mu| over a rollout."""
    off_R = f64([0.5, -0.1, 0.3, 0.1, 0.1, -0.1, -0.5, 0.6, 0.1])
    batch = token_batch()
    batch = token_batch(rollout_logprobs_R=batch.logprobs_R.detach() + off_R)
    means = [fmean(math.exp(abs(one)) for one in part) for part in np.split(off_R.numpy(), 3)]
    got = corrected(batch, importance_correction="off", error_mask=1.3)
    assert got.weights_R.tolist() == [float(mean <= 1.3) for mean in means for _ in range(3)]
    assert 0 < got.limited_R.sum() < 9


def test_only_rollouts_with_a_negative_advantage_are_masked_for_being_off_policy() -> None:
    """DeepSeek-V3.2 (2512.02556): M = 0 where A < 0 and mean over the rollout of log(mu / pi) > delta."""
    away_R = f64([0.5, 0.1, 0.3, 0.5, 0.1, 0.3, -0.5, 0.2, 0.1])
    batch = token_batch(advantages_R=f64([-1.0] * 3 + [1.0] * 3 + [-1.0] * 3))
    batch = token_batch(advantages_R=batch.advantages_R, rollout_logprobs_R=batch.logprobs_R.detach() + away_R)
    got = corrected(batch, importance_correction="off", off_policy_mask=0.25)
    assert got.weights_R.tolist() == [0.0] * 3 + [1.0] * 6


def test_both_masks_are_applied_to_the_weights() -> None:
    batch = token_batch()
    plain, masked = corrected(batch), corrected(batch, sequence_mask=(1e-6, 2e-6))
    assert (plain.weights_R > 0).all()
    assert (masked.weights_R == 0).all()
