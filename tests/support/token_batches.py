"""Micro-batches of random columns, and plain Python, for tests of losses."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlctl.backends.batching.batch import TokenBatch


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ppo_loss(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    """PPO (1707.06347) equation 7 with DAPO's (2503.14476) two bounds, and dual-clip PPO (1912.09729) equation 5."""
    clipped = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, clipped * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


def token_batch(tokens: int = 9, seed: int = 0, **columns: torch.Tensor | None) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(tokens, generator=generator, dtype=torch.float64) * scale

    logprobs_R = -2.0 + noise(0.5)
    batch = TokenBatch(
        logprobs_R=logprobs_R.clone().requires_grad_(),
        entropy_R=noise(1.0).abs(),
        rollout_logprobs_R=logprobs_R + noise(0.5),
        advantages_R=noise(1.0),
        token_weights_R=noise(0.1).abs(),
        counted_R=torch.ones(tokens, dtype=torch.bool),
        rollout_R=torch.arange(tokens) // 3,
        old_logprobs_R=logprobs_R + noise(0.2),
        reference_logprobs_R=logprobs_R + noise(0.3),
    )
    return replace(batch, **columns)
