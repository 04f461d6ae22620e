"""The loss as the driver holds it: what it is and how its sums become metrics. Torch-free; workers compute it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rlctl.config.schema import GrpoConfig

if TYPE_CHECKING:
    from rlctl.backends.base import LossOutput, TokenBatch, TokenLoss


@dataclass(frozen=True)
class RunLoss:
    """The `TokenLoss` that the `grpo` section describes; a process that only passes it on does not import torch."""

    grpo: GrpoConfig

    def __call__(self, batch: TokenBatch) -> LossOutput:
        return self._loss(batch)

    @cached_property
    def _loss(self) -> TokenLoss:
        from rlctl.rl.losses import GrpoLoss

        return GrpoLoss.from_config(self.grpo)


def loss_metrics(sums: dict[str, float], maxima: dict[str, float]) -> dict[str, float | dict[str, float]]:
    """Means over tokens (and maxima) from the added-up sums of `GrpoLoss`, under the names of a metrics line.

    Keys: kl, entropy, clip_fraction, ratio {mean, max}, logprob_diff (engine against trainer, both under the weights
    that sampled: mean and max of the absolute difference d, kl by k3, and prob_error, the mean of exp(d): NeMo-RL's
    multiplicative token probability error), importance_weight, importance_limited (part of the tokens truncated or
    masked). All 0 over no tokens.
    """
    tokens = max(sums["tokens"], 1.0)
    means = {name: total / tokens for name, total in sums.items() if name != "tokens"}
    spread = {name: {"mean": means.pop(name), "max": maxima[name]} for name in ("ratio", "logprob_diff")}
    spread["logprob_diff"] |= {"kl": means.pop("engine_kl"), "prob_error": means.pop("prob_error")}
    return {**means, **spread}
