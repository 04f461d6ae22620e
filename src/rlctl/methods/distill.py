"""Off-policy distillation: the policy learns a teacher's probabilities of the next token on the texts of a dataset.

loss = weight * (s KL(teacher || pi) + (1 - s) KL(pi || teacher))     averaged over the tokens with a loss

s is `distillation.forward_share`: 1 is the forward divergence of knowledge distillation (Hinton et al. 2015, arXiv
1503.02531), 0 the reverse one (MiniLLM, arXiv 2306.08543, here on given texts). Both are over the teacher's
`distillation.top_k` most likely tokens, as in on-policy distillation, and over all tokens where the vocabulary has no
more. `distillation.sft_weight` adds the negative log-likelihood of the texts.

With `teacher.own_tokenizer` the two read a text as other tokens. They are compared in each chunk, a shortest part of
the text that ends with a token of both (`data/cross_tokens.py`), over the K tokens of the teacher with the highest
logit anywhere in the text. For a chunk c of tokens s of the policy and t of the teacher, with M the projection of the
policy's vocabulary to the teacher's (P-KL of NVIDIA NeMo RL, "Cross-Tokenizer (X-Token) Off-Policy Distillation"):

    log T(c) = mean over t of log softmax(teacher's logits of the K tokens)
    P(c)     = mean over s of M pi, divided by its sum over the K tokens
    loss     = s sum_K T (log T - log P) + (1 - s) sum_K P (log P - log T)      divided among the tokens of the chunk

T(c) is a distribution where the teacher has one token; the geometric mean of several adds up to less than 1.

`distillation.balanced` multiplies the divergence of a text by -log pi(text) / divergence(text), without a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlctl.backends.batch import TokenBatch
from rlctl.data.rollouts import CHUNK
from rlctl.errors import ConfigError
from rlctl.methods.rl.distillation import OF_TOP, of_top, top_kl
from rlctl.methods.rl.sections import DistillationConfig
from rlctl.methods.sft import Sft
from rlctl.settings.config import RlctlConfig
from rlctl.telemetry.metrics import Metric

if TYPE_CHECKING:
    import torch

LEAST = 1e-10
"""Added to projected probabilities: no token of the policy may lead to a token of the teacher."""
ALIGNED = Metric("aligned", "mean", curve="part of the tokens whose chunk the teacher has read", form=".3f")


class Distill(Sft):
    """The divergence from a teacher on texts that are given."""

    requires = frozenset({"teacher_logprobs"})

    def __init__(self, config: RlctlConfig) -> None:
        super().__init__(config)
        self.metrics = (OF_TOP[0], ALIGNED if config.teacher.own_tokenizer else OF_TOP[1], *Sft.metrics)
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
        options, divergence_R = self.config.distillation, self._divergence(batch)
        if options.balanced:
            divergence_R = _balance(divergence_R, batch) * divergence_R
        return options.weight * divergence_R - options.sft_weight * batch.logprobs_R

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        own = super().measure(batch)
        if not self.config.teacher.own_tokenizer:
            return {**of_top(batch, self.config.distillation), **own}
        return {"top_kl": self._divergence(batch), "aligned": batch.extra_R[CHUNK] >= 0, **own}

    def _divergence(self, batch: TokenBatch) -> torch.Tensor:
        own = self.config.teacher.own_tokenizer
        return (chunk_kl if own else top_kl)(batch, self.config.distillation)


def _balance(divergence_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return the factor of each token's divergence that gives those of its text the sum of its likelihood's; 1 where
    there is no divergence."""
    text_R = batch.rollout_R

    def summed(values_R: torch.Tensor) -> torch.Tensor:
        values_R = values_R.detach()
        return values_R.new_zeros(int(text_R.max()) + 1).index_add(0, text_R, values_R)[text_R]

    divergence_R = summed(divergence_R)
    return (summed(-batch.logprobs_R) / divergence_R).where(divergence_R > 0, 1.0)


def chunk_kl(batch: TokenBatch, o: DistillationConfig) -> torch.Tensor:
    """Return the divergence [R] from a teacher with another tokenizer, with gradient: each token has its part of what
    its chunk has, and 0 where the teacher has said nothing of the chunk. Suffix C: the chunks."""
    import torch

    assert batch.teacher_top_RK is not None  # `teacher_top` asks for both
    assert batch.top_logprobs_RK is not None
    chunk_R = batch.extra_R[CHUNK].long()
    place_R = batch.rollout_R * (chunk_R.max() + 2) + chunk_R + 1
    _, chunk_of_R, count_C = place_R.unique(return_inverse=True, return_counts=True)
    count_C = count_C.to(batch.logprobs_R.dtype)
    shape = (len(count_C), batch.teacher_top_RK.shape[1])
    log_t_CK = batch.teacher_top_RK.new_zeros(shape).index_copy(0, chunk_of_R, batch.teacher_top_RK)
    p_CK = batch.top_logprobs_RK.new_zeros(shape).index_add(0, chunk_of_R, batch.top_logprobs_RK) / count_C[:, None]
    log_p_CK = (p_CK / (p_CK.sum(-1, keepdim=True) + LEAST) + LEAST).log()
    found_C = torch.zeros_like(count_C)
    if o.forward_share:
        found_C = found_C + o.forward_share * (log_t_CK.exp() * (log_t_CK - log_p_CK)).sum(-1)
    if o.forward_share < 1:
        found_C = found_C + (1 - o.forward_share) * (log_p_CK.exp() * (log_p_CK - log_t_CK)).sum(-1)
    return (found_C / count_C)[chunk_of_R].where(chunk_R >= 0, 0.0)
