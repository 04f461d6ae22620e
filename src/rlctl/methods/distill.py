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

Several teachers of a text each have such a loss, of tokens or chunks, and with `teacher.mix` = divergences their
weighted mean is the loss.

`distillation.balanced` multiplies the divergence of a text by -log pi(text) / divergence(text), without a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import model_validator

from rlctl.backends.batching.batch import TokenBatch
from rlctl.config.section import NonNegativeNumber
from rlctl.methods.divergences import OF_TOP, TopTokens, aligned, divergence, of_top, require_normalized
from rlctl.methods.sft import Sft, SftConfig
from rlctl.settings.other_models import TextTeacherConfig, require_mixable, require_owners
from rlctl.telemetry.metrics import Metric

if TYPE_CHECKING:
    import torch

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
    def teacher_section(self) -> TextTeacherConfig:
        return self.teacher

    @property
    def tokenizer_teachers(self) -> tuple[int, ...]:
        return self.teacher.with_tokenizer

    @model_validator(mode="after")
    def validate_teachers(self) -> DistillConfig:
        require_owners(self.teacher, self.data.source_labels)
        if self.teacher.policy and self.teacher.own_tokenizer:
            raise ValueError("teacher.own_tokenizer does not go with teacher.policy: the policy reads its own tokens")
        if self.teacher.models and self.teacher.own_tokenizer:
            raise ValueError(
                "teacher.own_tokenizer is for teacher.model: set own_tokenizer in entries of teacher.models"
            )
        require_mixable(self.teacher, self.data.source_labels)
        by_source = self.teacher.field is None and any(entry.sources for entry in self.teacher.models)
        if self.validation.wanted and by_source:
            raise ValueError("validation does not go with teacher.models[].sources: held-out texts belong to no source")
        require_normalized(self.teacher.mix, self.distillation)
        return self

    @model_validator(mode="after")
    def validate_projected_distribution(self) -> DistillConfig:
        if self.teacher.with_tokenizer and self.distillation.outside == "tail":
            raise ValueError(
                "distillation.outside = tail does not go with own_tokenizer of a teacher: a projected distribution has "
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
        self.metrics = (OF_TOP[0], ALIGNED if config.teacher.with_tokenizer else OF_TOP[1], *Sft.metrics)

    @property
    def teacher_top(self) -> int:
        return self.config.distillation.top_k

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        options, divergence_R = self.config.distillation, divergence(batch, self.config.distillation)
        if options.balanced:
            divergence_R = _balance(divergence_R, batch) * divergence_R
        return options.weight * divergence_R - options.sft_weight * batch.logprobs_R

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        metrics = super().measure(batch)
        if not self.config.teacher.with_tokenizer:
            return {**of_top(batch, self.config.distillation), **metrics}
        return {"top_kl": divergence(batch, self.config.distillation), "aligned": aligned(batch), **metrics}


def _balance(divergence_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return the factor that scales each token's divergence so that its text's sum equals its likelihood's; 1 without
    divergence."""
    text_R = batch.rollout_R

    def summed(values_R: torch.Tensor) -> torch.Tensor:
        values_R = values_R.detach()
        return values_R.new_zeros(int(text_R.max()) + 1).index_add(0, text_R, values_R)[text_R]

    divergence_R = summed(divergence_R)
    return (summed(-batch.logprobs_R) / divergence_R).where(divergence_R > 0, 1.0)
