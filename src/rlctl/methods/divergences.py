"""The divergence of a policy from its teachers over their most likely tokens.

Suffixes: R response tokens, K a teacher's most likely tokens, C chunks of the texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlctl.backends.batching.batch import TokenBatch
from rlctl.config.section import PositiveNumber, Section
from rlctl.settings.other_models import Mix
from rlctl.telemetry.metrics import Metric

if TYPE_CHECKING:
    import torch

OF_TOP = (
    Metric("top_kl", "mean", curve="divergence from the teacher over its most likely tokens", form=".3f"),
    Metric("top_mass", "mean", curve="the teacher's probability of its most likely tokens", form=".3f"),
)
LEAST = 1e-10
"""Added to projected probabilities: no token of the policy may lead to a token of the teacher."""


class TopTokens(Section):
    """The divergence from a teacher over its most likely tokens."""

    weight: PositiveNumber = 1.0
    """Weight of the teacher's term."""
    top_k: Annotated[int, Field(gt=0, le=2**20)] = 64
    """Number of the teacher's most likely tokens that are compared at each position; all tokens of a smaller
    vocabulary."""
    forward_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Part of KL(teacher || policy) in the divergence; the rest is KL(policy || teacher)."""
    outside: Literal["renormalize", "tail"] = "renormalize"
    """Treatment of all other tokens: leave them out and let the `top_k` add up to 1, or count them as one further
    event."""


def require_normalized(mix: Mix, options: TopTokens) -> None:
    """Raise ValueError where the tail of a mean of log-probs is compared, which does not add up to 1 with the rest."""
    if mix == "log-probs" and options.outside == "tail":
        raise ValueError(
            "distillation.outside = tail does not go with teacher.mix = log-probs: means of log-probs are normalized "
            "over the compared tokens; choose teacher.mix = probabilities or distillation.outside = renormalize"
        )


def divergence(batch: TokenBatch, o: TopTokens) -> torch.Tensor:
    """Return the divergence [R] from the teacher, the mixture of several, or the weighted mean of the divergences from
    each, with gradient."""
    import torch

    assert batch.teacher_top_RK is not None  # `teacher_top` asks for both
    assert batch.top_logprobs_RK is not None
    if not batch.spans:
        return top_kl(batch.teacher_top_RK, batch.top_logprobs_RK, o)
    counts, total_R = [span.tokens for span in batch.spans], torch.zeros_like(batch.logprobs_R)
    columns = zip(batch.teacher_top_RK.split(counts, 1), batch.top_logprobs_RK.split(counts, 1), strict=True)
    for span, (theirs_RK, ours_RK) in zip(batch.spans, columns, strict=True):
        if span.chunk_R is None:
            each_R = top_kl(theirs_RK, ours_RK, o)
        else:
            each_R = chunk_kl(theirs_RK, ours_RK, span.chunk_R, batch.rollout_R, o)
        total_R = total_R + (span.weight_R * each_R).where(span.weight_R > 0, 0.0)
    return total_R


def top_kl(teacher_RK: torch.Tensor, policy_RK: torch.Tensor, o: TopTokens) -> torch.Tensor:
    """Return the divergence [R] between log-probs of a teacher's most likely tokens, with gradient."""
    import torch

    def completed(logprobs_RK: torch.Tensor) -> torch.Tensor:
        if o.outside != "tail":
            return torch.log_softmax(logprobs_RK, -1)
        # If rounding leaves nothing for the other tokens, they get the smallest share that the precision resolves.
        rest_R = (1 - logprobs_RK.exp().sum(-1)).clamp(min=torch.finfo(logprobs_RK.dtype).eps)
        return torch.cat([logprobs_RK, rest_R.log()[:, None]], -1)

    return _both(completed(teacher_RK), completed(policy_RK), o)


def _both(log_t_NK: torch.Tensor, log_p_NK: torch.Tensor, o: TopTokens) -> torch.Tensor:
    import torch

    found_N = torch.zeros_like(log_t_NK[:, 0])
    if o.forward_share:
        found_N = found_N + o.forward_share * (log_t_NK.exp() * (log_t_NK - log_p_NK)).sum(-1)
    if o.forward_share < 1:
        found_N = found_N + (1 - o.forward_share) * (log_p_NK.exp() * (log_p_NK - log_t_NK)).sum(-1)
    return found_N


def chunk_kl(
    teacher_RK: torch.Tensor, projected_RK: torch.Tensor, chunk_R: torch.Tensor, rollout_R: torch.Tensor, o: TopTokens
) -> torch.Tensor:
    """Return the divergence [R] from a teacher with another tokenizer, with gradient: each token has its share of its
    chunk's divergence, and 0 if the teacher has no probability for the chunk. `teacher_RK`: the log-probs of its chunk;
    `projected_RK`: the policy's probabilities in the teacher's vocabulary."""

    chunk_R = chunk_R.long()
    place_R = rollout_R * (chunk_R.max() + 2) + chunk_R + 1
    _, chunk_of_R, count_C = place_R.unique(return_inverse=True, return_counts=True)
    count_C = count_C.to(projected_RK.dtype)
    shape = (len(count_C), teacher_RK.shape[1])
    log_t_CK = teacher_RK.new_zeros(shape).index_copy(0, chunk_of_R, teacher_RK)
    p_CK = projected_RK.new_zeros(shape).index_add(0, chunk_of_R, projected_RK) / count_C[:, None]
    log_p_CK = (p_CK / (p_CK.sum(-1, keepdim=True) + LEAST) + LEAST).log()
    return (_both(log_t_CK, log_p_CK, o) / count_C)[chunk_of_R].where(chunk_R >= 0, 0.0)


def of_top(batch: TokenBatch, options: TopTokens) -> dict[str, torch.Tensor]:
    """Return the values [R] of the metrics `OF_TOP`."""
    assert batch.teacher_top_RK is not None  # its loss was computed before
    masses_RK = batch.teacher_top_RK.exp()
    if batch.spans:
        parts = masses_RK.split([span.tokens for span in batch.spans], 1)
        mass_R = sum(span.weight_R * part.sum(-1) for span, part in zip(batch.spans, parts, strict=True))
    else:
        mass_R = masses_RK.sum(-1)
    return {"top_kl": divergence(batch, options), "top_mass": mass_R}  # pyright: ignore[reportReturnType] - a tensor


def aligned(batch: TokenBatch) -> torch.Tensor:
    """Return the share [R] of a token's teachers, by weight, that have read its part of the text."""
    import torch

    read_R = torch.zeros_like(batch.logprobs_R)
    for span in batch.spans:
        read_R = read_R + (span.weight_R if span.chunk_R is None else span.weight_R * (span.chunk_R >= 0))
    return read_R
