"""Importance weights against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from rlctl.rl.losses import importance_weights


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("correction", ["off", "truncated", "masked"])
def test_importance_weights(correction: str) -> None:
    """Truncated: min(w, C) (Ionides 2008); masked: w inside [1/C, C], else 0 (IcePop, 2510.18855)."""
    old_R, engine_R = f64([-1.0, -1.0, -1.0, -1.0, -300.0]), f64([-1.0, -1.5, -3.0, -0.2, -1.0])
    weights = [math.exp(o - e) for o, e in zip(old_R.tolist(), engine_R.tolist(), strict=True)]
    expected = {
        "off": [1.0] * 5,
        "truncated": [min(weight, 2.0) for weight in weights],
        "masked": [weight if 0.5 <= weight <= 2.0 else 0.0 for weight in weights],
    }[correction]
    got = importance_weights(old_R.requires_grad_(), engine_R, correction, cap=2.0)
    torch.testing.assert_close(got, f64(expected), rtol=1e-12, atol=1e-8)
    assert not got.requires_grad
