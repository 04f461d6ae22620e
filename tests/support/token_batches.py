"""Micro-batches of random columns for tests of losses."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlctl.backends.batch import TokenBatch


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
