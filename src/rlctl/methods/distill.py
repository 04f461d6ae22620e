"""Off-policy distillation: the policy learns a teacher's probabilities of the next token on the texts of a dataset.

loss = weight * (s KL(teacher || pi) + (1 - s) KL(pi || teacher))     averaged over the tokens with a loss

s is `distillation.forward_share`: 1 is the forward divergence of knowledge distillation (Hinton et al. 2015, arXiv
1503.02531), 0 the reverse one (MiniLLM, arXiv 2306.08543, here on given texts). Both are over the teacher's
`distillation.top_k` most likely tokens, as in on-policy distillation, and over all tokens where the vocabulary has no
more. `distillation.sft_weight` adds the negative log-likelihood of the texts.

With `teacher.own_tokenizer` the two read a text as other tokens. They are compared in each chunk, a shortest part of
the text that ends with a token of both (`data/cross_tokens.py`), over the K tokens of the teacher with the highest
logit anywhere in the text. For a chunk c of tokens s of the policy and t of the teacher, with M the projection of the
policy's vocabulary to the teacher's (P-KL, "Cross-Tokenizer (X-Token) Off-Policy Distillation" of NVIDIA):

    log T(c) = mean over t of log softmax(teacher's logits of the K tokens)
    P(c)     = mean over s of M pi, divided by its sum over the K tokens
    loss     = s sum_K T (log T - log P) + (1 - s) sum_K P (log P - log T)      divided among the tokens of the chunk

T(c) is a distribution where the teacher has one token; the geometric mean of several adds up to less than 1.

`distillation.balanced` multiplies the divergence of a text by -log pi(text) / divergence(text), without a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import model_validator

from rlctl.backends.batching.batch import TokenBatch
from rlctl.config.section import NonNegativeNumber
from rlctl.data.rollouts import CHUNK
from rlctl.methods.rl.distillation import OF_TOP, TopTokens, of_top, top_kl
from rlctl.methods.sft import Sft, SftConfig
from rlctl.settings.other_models import SourceTeacher, TextTeacherConfig, first_of, require_one_owner
from rlctl.telemetry.metrics import Metric

if TYPE_CHECKING:
    import torch

LEAST = 1e-10
"""Added to projected probabilities: no token of the policy may lead to a token of the teacher."""
ALIGNED = Metric("aligned", "mean", curve="part of the tokens whose chunk the teacher has read", form=".3f")


class DistillSettings(TopTokens):
    """The loss of `train distill`."""

    sft_weight: NonNegativeNumber = 0.0
    """Weight of the negative log-likelihood of the texts, which is added."""
    balanced: bool = False
    """Multiply the divergence of each text by the number that makes it as large as the negative log-likelihood of the
    text."""


class DistillConfig(SftConfig):
    """The configuration of `rlctl train distill`."""

    teacher: TextTeacherConfig = TextTeacherConfig()
    distillation: DistillSettings = DistillSettings()

    @property
    def named_teacher(self) -> TextTeacherConfig | None:
        return first_of(self.teacher)

    @property
    def source_teachers(self) -> tuple[SourceTeacher, ...]:
        return self.teacher.models

    @property
    def teacher_has_tokenizer(self) -> bool:
        return self.teacher.own_tokenizer

    @model_validator(mode="after")
    def validate_one_teacher_of_each_source(self) -> DistillConfig:
        require_one_owner(self.teacher, self.data.source_labels)
        if self.teacher.models and self.teacher.own_tokenizer:
            raise ValueError("teacher.own_tokenizer does not go with teacher.models: all read the policy's tokens")
        if self.teacher.models and self.validation.wanted:
            raise ValueError("validation does not go with teacher.models: held-out texts belong to no teacher")
        return self

    @model_validator(mode="after")
    def validate_projected_distribution(self) -> DistillConfig:
        if self.teacher.own_tokenizer and self.distillation.outside == "tail":
            raise ValueError(
                "distillation.outside = tail does not go with teacher.own_tokenizer: a projected distribution has "
                "nothing outside of the teacher's most likely tokens that could be compared"
            )
        return self


class Distill(Sft):
    """Off-policy distillation: learn a teacher's probabilities on texts, as `train sft` reads them.

    `train grpo --algorithm distillation` learns from a teacher on the model's own completions.
    """

    Config = DistillConfig
    config: DistillConfig
    command = "distill"
    flags = "answer_field teacher"
    examples = (
        "rlctl train distill --model Qwen/Qwen3-1.7B --teacher Qwen/Qwen3-8B --data texts.jsonl --preset 1gpu",
        "rlctl train distill --model ./my-model --teacher ./teacher --data chats.jsonl --set distillation.top_k=128",
        "rlctl train distill --resume --run-dir runs/my-run",
    )
    requires = frozenset({"teacher_logprobs"})

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(config)
        self.metrics = (OF_TOP[0], ALIGNED if config.teacher.own_tokenizer else OF_TOP[1], *Sft.metrics)

    @property
    def teacher_top(self) -> int:
        return self.config.distillation.top_k

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        options, divergence_R = self.config.distillation, self._divergence(batch)
        if options.balanced:
            divergence_R = _balance(divergence_R, batch) * divergence_R
        return options.weight * divergence_R - options.sft_weight * batch.logprobs_R

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        metrics = super().measure(batch)
        if not self.config.teacher.own_tokenizer:
            return {**of_top(batch, self.config.distillation), **metrics}
        return {"top_kl": self._divergence(batch), "aligned": batch.extra_R[CHUNK] >= 0, **metrics}

    def _divergence(self, batch: TokenBatch) -> torch.Tensor:
        own_tokenizer = self.config.teacher.own_tokenizer
        return (chunk_kl if own_tokenizer else top_kl)(batch, self.config.distillation)


def _balance(divergence_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return the factor that scales each token's divergence so that its text's sum equals its likelihood's; 1 without
    divergence."""
    text_R = batch.rollout_R

    def summed(values_R: torch.Tensor) -> torch.Tensor:
        values_R = values_R.detach()
        return values_R.new_zeros(int(text_R.max()) + 1).index_add(0, text_R, values_R)[text_R]

    divergence_R = summed(divergence_R)
    return (summed(-batch.logprobs_R) / divergence_R).where(divergence_R > 0, 1.0)


def chunk_kl(batch: TokenBatch, o: TopTokens) -> torch.Tensor:
    """Return the divergence [R] from a teacher with another tokenizer, with gradient: each token has its share of its
    chunk's divergence, and 0 if the teacher has no probability for the chunk. Suffix C: the chunks."""
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
