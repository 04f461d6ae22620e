"""Log-probs and entropy of chosen tokens from vocabulary-parallel logits, a chunk of positions at a time, and values.

Suffixes: R response tokens, U positions that predict them (a shared prompt's last position predicts several), V this
rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from rlctl.backends.base import Teaching
    from rlctl.backends.rows import PackedRow, VocabProjection


@dataclass(frozen=True)
class VocabPart:
    """The tensor parallel group, and the first token of this rank's part of the vocabulary."""

    group: Any
    start: int = 0


class ValueHead(nn.Module):
    """A critic's value of each hidden state, in float32: 0 everywhere before training. Every tensor-parallel rank has
    it whole and computes the same."""

    def __init__(self, hidden: int, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden, **options))

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] -> [T]."""
        return F.linear(hidden_TH.float(), self.weight.float())[:, 0]


def row_logprobs(
    hidden_U: Tensor,
    part: PackedRow,
    output_layer: Callable[[Tensor], Tensor],
    vocab: VocabPart,
    temperature: float,
    chunk: int,
    teaches: Teaching | None,
    context: Any,
) -> Tensor:
    """Return `chunked_logprobs` of a context-parallel rank's part of a row."""
    further_RK, whole = part.further_RK, False
    top = teaches if teaches is not None and teaches.top else None
    if top is not None and top.by_text:
        further_RK, whole = text_tokens(hidden_U, part, output_layer, vocab, chunk, top, context), True
    out = chunked_logprobs(
        hidden_U, part.inverse_R, part.targets_R, output_layer, vocab, temperature, chunk, further_RK,
        None if whole else top, part.projection,
    )  # fmt: skip
    return torch.cat([out, further_RK.T.float()]) if whole and further_RK is not None else out


def chunked_logprobs(
    hidden_U: Tensor,
    inverse_R: Tensor,
    targets_R: Tensor,
    output_layer: Callable[[Tensor], Tensor],
    vocab: VocabPart,
    temperature: float,
    chunk: int,
    further_RK: Tensor | None = None,
    top: Teaching | None = None,
    projection: VocabProjection | None = None,
) -> Tensor:
    """float32 [2, R]: log-prob of each chosen token and entropy of its distribution, both with gradient.

    With more than `chunk` positions their logits are computed again in the backward pass rather than kept.

    Args:
        hidden_U: hidden states [U, H].
        output_layer: [n, H] -> logits [n, V] of this rank's part of the vocabulary.
        further_RK: further tokens, whose log-probs follow as [K, R], with gradient.
        top: the most likely tokens instead; their log-probs follow as [K, R], and then they themselves, as numbers
            that float32 has exactly.
        projection: `further_RK` are tokens of another vocabulary, and instead of their log-probs the probabilities
            that this makes of the distribution follow.
    """
    if top is None and further_RK is None:
        further_RK = targets_R[:, None][:, :0]

    def part(hidden: Tensor, inverse: Tensor, targets: Tensor, further: Tensor | None) -> Tensor:
        logits_UV = output_layer(hidden)
        if further is None:
            assert top is not None
            further = top_tokens(logits_UV, vocab, top)[inverse]
        if projection is not None:
            wanted, places_RK = further.unique(return_inverse=True)
            matrix = projection.part(wanted, vocab.start, logits_UV.shape[1])
            projected_RK = ProjectedProbs.apply(logits_UV, inverse, places_RK, matrix, vocab, temperature)
            return torch.cat([TokenLogprobs.apply(logits_UV, inverse, targets, vocab, temperature), projected_RK.T])
        response, count = further.shape
        everything = torch.cat([targets, further.flatten()])
        places = torch.cat([inverse, inverse.repeat_interleave(count)])
        out = TokenLogprobs.apply(logits_UV, places, everything, vocab, temperature)
        rows = [out[:, :response], out[0, response:].view(response, count).T]
        return torch.cat(rows if top is None else [*rows, further.T.float()])

    positions = hidden_U.shape[0]
    if positions <= chunk:
        return part(hidden_U, inverse_R, targets_R, further_RK)
    order_R = torch.argsort(inverse_R, stable=True)
    bounds = torch.arange(0, positions, chunk, device=inverse_R.device)
    splits = [*torch.searchsorted(inverse_R[order_R], bounds).tolist(), len(order_R)]

    parts = []
    for number, start in enumerate(range(0, positions, chunk)):
        own_R = order_R[splits[number] : splits[number + 1]]
        hidden = hidden_U[start : start + chunk]
        further = None if further_RK is None else further_RK[own_R]
        own = (hidden, inverse_R[own_R] - start, targets_R[own_R], further)
        parts.append(checkpoint(part, *own, use_reentrant=False))
    return torch.cat(parts, 1)[:, torch.argsort(order_R)]


def text_tokens(
    hidden_U: Tensor, part: PackedRow, output_layer: Callable[[Tensor], Tensor], vocab: VocabPart, chunk: int,
    top: Teaching, context: Any,
) -> Tensor:  # fmt: skip
    """int64 [R, K]: the most likely tokens of the text of each chosen token: those with the highest logit at any of its
    positions, of all context-parallel ranks (`context`)."""
    text_R = part.columns_R["rollout"]
    text_U = torch.zeros(len(hidden_U), dtype=torch.int64, device=hidden_U.device).scatter(0, part.inverse_R, text_R)
    highest_NV: Tensor | None = None
    for start in range(0, max(1, len(hidden_U)), chunk):
        logits_UV = output_layer(hidden_U[start : start + chunk]).detach().float()
        if highest_NV is None:
            highest_NV = torch.full((len(part.units), logits_UV.shape[1]), -torch.inf, device=logits_UV.device)
        highest_NV.index_reduce_(0, text_U[start : start + chunk], logits_UV, "amax")
    assert highest_NV is not None
    if context.size() > 1:
        torch.distributed.all_reduce(highest_NV, torch.distributed.ReduceOp.MAX, group=context)
    return top_tokens(highest_NV, vocab, top)[text_R]


def top_tokens(logits_UV: Tensor, vocab: VocabPart, top: Teaching) -> Tensor:
    """int64 [U, K]: the most likely tokens of each position, the first of them first."""
    width = max(0, min(logits_UV.shape[1], top.vocab - vocab.start))
    own_UV = logits_UV.detach()[:, :width]
    values_UK, ids_UK = own_UV.topk(min(top.top, width))
    ids_UK = ids_UK + vocab.start
    if (ranks := vocab.group.size()) > 1:
        # The last ranks may hold fewer tokens than are asked for, or none below the limit.
        missing = top.top - values_UK.shape[1]
        values_UK = F.pad(values_UK.float(), (0, missing), value=-torch.inf)
        ids_UK = F.pad(ids_UK, (0, missing))
        values, ids = ([torch.empty_like(own) for _ in range(ranks)] for own in (values_UK, ids_UK))
        torch.distributed.all_gather(values, values_UK.contiguous(), group=vocab.group)
        torch.distributed.all_gather(ids, ids_UK.contiguous(), group=vocab.group)
        best_UK = torch.cat(values, 1).topk(top.top).indices
        ids_UK = torch.cat(ids, 1).gather(1, best_UK)
    return ids_UK


class TokenLogprobs(torch.autograd.Function):
    """float32 [2, R] as in `chunked_logprobs`: log-softmax of logits / temperature at the chosen tokens, over a
    vocabulary split across `group`. Overwrites the logits where they are float32.

    With p = softmax: d logprob / d logits = (onehot - p) / temperature, and of the entropy H = log Z - sum p x,
    d H / d logits = -p (log p + H) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_UV: Tensor, inverse_R: Tensor, targets_R: Tensor, vocab: VocabPart, temperature: float
    ) -> Tensor:
        x = logits_UV.float()
        if temperature != 1.0:
            x.div_(temperature)
        top_U = x.amax(-1)
        if vocab.group.size() > 1:
            torch.distributed.all_reduce(top_U, torch.distributed.ReduceOp.MAX, group=vocab.group)
        x.sub_(top_U[:, None])
        local_R = targets_R - vocab.start
        outside_R = (local_R < 0) | (local_R >= x.shape[1])
        local_R = local_R.masked_fill(outside_R, 0)
        chosen_R = x[inverse_R, local_R].masked_fill_(outside_R, 0.0)
        # exp in place would lose x, which the entropy needs: sum p x is taken row by row without a second [U, V].
        weighted_U, total_U = _exponentiate(x)
        if vocab.group.size() > 1:
            packed = torch.cat([total_U, weighted_U, chosen_R])
            torch.distributed.all_reduce(packed, group=vocab.group)
            total_U, weighted_U, chosen_R = packed.split([len(total_U), len(weighted_U), len(chosen_R)])
        log_total_U = total_U.log()
        entropy_U = log_total_U - weighted_U / total_U
        ctx.save_for_backward(x, total_U, entropy_U, inverse_R, local_R, outside_R)
        ctx.temperature, ctx.dtype = temperature, logits_UV.dtype
        return torch.stack([chosen_R - log_total_U[inverse_R], entropy_U[inverse_R]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        exp_UV, total_U, entropy_U, inverse_R, local_R, outside_R = ctx.saved_tensors
        grad_R, entropy_grad_R = grads[0] / ctx.temperature
        sum_U = torch.zeros_like(total_U).index_add_(0, inverse_R, grad_R)
        factor_U = -sum_U / total_U
        if entropy_grad_R.any():
            entropy_sum_U = torch.zeros_like(total_U).index_add_(0, inverse_R, entropy_grad_R) / total_U
            grad_UV = _scale_with_entropy(exp_UV, factor_U, entropy_sum_U, entropy_U - total_U.log())
        else:
            grad_UV = exp_UV.mul_(factor_U[:, None])
        grad_UV.index_put_((inverse_R, local_R), grad_R.masked_fill(outside_R, 0.0), accumulate=True)
        return grad_UV.to(ctx.dtype), None, None, None, None


class ProjectedProbs(torch.autograd.Function):
    """float32 [R, K]: the probabilities p = softmax(logits / temperature), over a vocabulary split across `group`, as a
    sparse matrix M turns them into others, at `places_RK` of its rows. d L / d logits = p (M^T g - <p, M^T g>) /
    temperature, where g is the gradient of M p."""

    @staticmethod
    def forward(
        ctx: Any, logits_UV: Tensor, inverse_R: Tensor, places_RK: Tensor, matrix: Tensor, vocab: VocabPart,
        temperature: float,
    ) -> Tensor:  # fmt: skip
        probs_UV = logits_UV.float() / temperature
        top_U = probs_UV.amax(-1)
        if vocab.group.size() > 1:
            torch.distributed.all_reduce(top_U, torch.distributed.ReduceOp.MAX, group=vocab.group)
        probs_UV = probs_UV.sub_(top_U[:, None]).exp_()
        total_U = probs_UV.sum(-1)
        if vocab.group.size() > 1:
            torch.distributed.all_reduce(total_U, group=vocab.group)
        probs_UV = probs_UV.div_(total_U[:, None])
        matrix = matrix.float()  # FSDP2 casts what goes into a module
        projected_RK = torch.sparse.mm(matrix, probs_UV.T)[places_RK, inverse_R[:, None]]
        if vocab.group.size() > 1:
            torch.distributed.all_reduce(projected_RK, group=vocab.group)
        ctx.save_for_backward(probs_UV, inverse_R, places_RK)
        ctx.matrix, ctx.group, ctx.temperature, ctx.dtype = matrix, vocab.group, temperature, logits_UV.dtype
        return projected_RK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probs_UV, inverse_R, places_RK = ctx.saved_tensors
        grad_KU = probs_UV.new_zeros(ctx.matrix.shape[0], probs_UV.shape[0])
        grad_KU.index_put_((places_RK, inverse_R[:, None].expand_as(places_RK)), grads[0], accumulate=True)
        grad_UV = torch.sparse.mm(ctx.matrix.t(), grad_KU).T
        inner_U = (probs_UV * grad_UV).sum(-1)
        if ctx.group.size() > 1:
            torch.distributed.all_reduce(inner_U, group=ctx.group)
        grad_UV = probs_UV * (grad_UV - inner_U[:, None]) / ctx.temperature
        return grad_UV.to(ctx.dtype), None, None, None, None, None


def _scale_with_entropy(exp_UV: Tensor, factor_U: Tensor, entropy_U: Tensor, shift_U: Tensor) -> Tensor:
    """Replace exp by exp * (factor - entropy * (log exp + shift)), a few rows at a time; 0 where exp is 0."""
    step = _rows_at_a_time(exp_UV)
    for start in range(0, exp_UV.shape[0], step):
        rows = slice(start, start + step)
        part = exp_UV[rows]
        logs = torch.special.xlogy(part, part)
        part.mul_((factor_U[rows] - entropy_U[rows] * shift_U[rows])[:, None])
        part.sub_(logs.mul_(entropy_U[rows][:, None]))
    return exp_UV


def _rows_at_a_time(x_UV: Tensor) -> int:
    """Rows whose copies stay in a processor's cache, or are few enough for a GPU's memory."""
    return 64 if x_UV.device.type == "cpu" else 4096


def _exponentiate(x_UV: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces x by exp(x); returns sum exp(x) x and sum exp(x) of each row. A few rows at a time stay in the cache."""
    weighted_U, total_U = x_UV.new_empty(x_UV.shape[0]), x_UV.new_empty(x_UV.shape[0])
    step = _rows_at_a_time(x_UV)
    for start in range(0, x_UV.shape[0], step):
        part = x_UV[start : start + step]
        exp = part.exp()
        torch.sum(exp * part, -1, out=weighted_U[start : start + step])
        torch.sum(exp, -1, out=total_U[start : start + step])
        part.copy_(exp)
    return weighted_U, total_U
