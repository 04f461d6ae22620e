"""Off-policy distillation: the policy learns a teacher's probabilities of the next token on the texts of a dataset.

loss = weight * (s KL(teacher || pi) + (1 - s) KL(pi || teacher))     averaged over the tokens with a loss

s is `distillation.forward_share`: 1 is the forward divergence of knowledge distillation (Hinton et al. 2015, arXiv
1503.02531), 0 the reverse one (MiniLLM, arXiv 2306.08543, here on given texts). Both are over the teacher's
`distillation.top_k` most likely tokens, as in on-policy distillation, and over all tokens where the vocabulary has no
more. `distillation.sft_weight` adds the negative log-likelihood of the texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlctl.backends.batch import TokenBatch
from rlctl.config.schema import RlctlConfig
from rlctl.errors import ConfigError
from rlctl.rl.algorithms.distillation import OF_TOP, of_top, top_kl
from rlctl.rl.algorithms.sft import Sft

if TYPE_CHECKING:
    import torch


class Distill(Sft):
    """The divergence from a teacher on texts that are given."""

    requires = frozenset({"teacher_logprobs"})
    metrics = (*OF_TOP, *Sft.metrics)

    def __init__(self, config: RlctlConfig) -> None:
        super().__init__(config)
        if config.distillation.loss != "top-k" or config.distillation.reward_weight:
            raise ConfigError(
                "`train distill` compares distributions on texts, which nobody samples or rewards: distillation.loss = "
                "sampled and distillation.reward_weight are for `train grpo --algorithm distillation`.",
                "Leave them out.",
            )

    @property
    def teacher_top(self) -> int:
        return self.config.distillation.top_k

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        options = self.config.distillation
        return options.weight * top_kl(batch, options) - options.sft_weight * batch.logprobs_R

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        return {**of_top(batch, self.config.distillation), **super().measure(batch)}
