"""Plain losses against scalar float64 references written from the papers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlctl.methods.rl.dppo import Dppo, DppoConfig, DppoLoss
from rlctl.methods.rl.grpo import Grpo
from rlctl.methods.rl.losses import sums_to_go
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.methods.rl.sections import LossConfig
from support.token_batches import f64


@pytest.mark.parametrize("dual", [None, 3.0])
def test_clipped_tokens_are_those_without_gradient(dual: float | None) -> None:
    off_the_bounds = [0.2, 0.75, 0.9, 1.0, 1.1, 1.25, 1.29, 2.9, 3.1, 8.0]
    for advantage in (1.7, -0.6):
        ratio_R = f64(off_the_bounds).requires_grad_()
        advantages_R = torch.full_like(ratio_R, advantage).detach()
        grpo = Grpo(RlConfig(loss=LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=dual)))
        batch: Any = SimpleNamespace(advantages_R=advantages_R)
        grpo.surrogate(ratio_R, batch).sum().backward()
        clipped_R = grpo.is_bounded(ratio_R.detach(), batch)
        assert (clipped_R == (ratio_R.grad == 0)).all()
        assert clipped_R.any()


def divergence_of(now_R: torch.Tensor, engine_R: torch.Tensor, kind: Any) -> torch.Tensor:
    batch: Any = SimpleNamespace(logprobs_R=now_R, rollout_logprobs_R=engine_R)
    return Dppo(DppoConfig(loss=DppoLoss(divergence=kind))).divergence(batch)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_the_divergence_is_of_the_chosen_token_against_all_others(divergence: str) -> None:
    """DPPO (2602.04879), with a token that the policy is nearly sure of."""
    now, engine = [0.2, 0.9, 0.5, 1 - 1e-9, 1e-8], [0.3, 0.4, 0.5, 0.7, 0.6]
    expected = {
        "tv": [abs(q - p) for q, p in zip(now, engine, strict=True)],
        "kl": [p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) for q, p in zip(now, engine, strict=True)],
    }[divergence]
    got = divergence_of(f64(now).log().requires_grad_(), f64(engine).log(), divergence)
    torch.testing.assert_close(got, f64(expected), rtol=1e-6, atol=1e-12)
    assert not got.requires_grad


def test_a_token_that_engine_or_policy_is_sure_of_has_a_divergence() -> None:
    sure = divergence_of(f64([0.0, math.log(0.5)]), f64([math.log(0.5), 0.0]), "kl")
    assert torch.isfinite(sure).all()
    assert sure[0] > 100
    assert math.isclose(sure[1], math.log(2))


def test_sums_to_go_are_those_of_a_rollout_whatever_else_is_in_the_micro_batch() -> None:
    values_R = torch.tensor([1e6, 1e6, 0.25, 0.5, 1.0, 3.0], dtype=torch.float32)
    got = sums_to_go(values_R, torch.tensor([0, 0, 2, 2, 2, 3]))
    assert got.tolist() == [2e6, 1e6, 1.75, 1.5, 1.0, 3.0]
