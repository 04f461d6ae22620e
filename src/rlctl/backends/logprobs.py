"""Log-probs, entropy and values from vocabulary-parallel logits, a chunk of positions at a time.

Suffixes: R response tokens, U predicting positions (a shared prompt's last position predicts several), V this rank's
vocabulary, K tokens per position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from rlctl.backends.base import Teaching
    from rlctl.backends.batching.batch import TeacherSpan
    from rlctl.backends.batching.packed_rows import PackedRow
    from rlctl.backends.messages import Truncation


@dataclass(frozen=True)
class VocabPart:
    """The tensor parallel group, and the first token of this rank's part of the vocabulary."""

    group: Any
    start: int = 0


class ValueHead(nn.Module):
    """A critic's float32 value of each hidden state, 0 before training. Every tensor-parallel rank holds and computes
    all of it."""

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
    truncation: Truncation | None,
    chunk: int,
    teaches: Teaching | None,
    context: Any,
) -> Tensor:
    """Return `chunked_logprobs` of a context-parallel rank's part of a row."""
    further_RK, whole = part.further_RK, False
    top = teaches if teaches is not None and teaches.top and further_RK is None else None
    if top is not None and top.chunk is not None:
        further_RK, whole = text_tokens(hidden_U, part, output_layer, vocab, chunk, top, context), True
    out = chunked_logprobs(
        hidden_U, part.inverse_R, part.targets_R, output_layer, vocab, temperature, chunk, further_RK,
        None if whole else top, part.spans, truncation,
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
    spans: Sequence[TeacherSpan] = (),
    truncation: Truncation | None = None,
) -> Tensor:
    """float32 [2, R]: log-prob of each chosen token and entropy of its distribution, both with gradient.

    With more than `chunk` positions the backward pass recomputes their logits, which saves memory. On CPUs, where they
    are overwritten, it is 2 or 4 times as many in the memory that the plan counts: 10 bytes per narrow logit of
    `chunk` positions, 8 per float32 logit.

    Args:
        hidden_U: hidden states [U, H].
        output_layer: [n, H] -> logits [n, V] of this rank's part of the vocabulary.
        further_RK: further tokens; their log-probs follow as [K, R], with gradient.
        top: replaces `further_RK` by the most likely tokens. Their log-probs follow as [K, R], then their ids, which
            float32 represents exactly.
        spans: parts of `further_RK`. With a projection, they are tokens of another vocabulary, and their projected
            probabilities follow in place of log-probs.
        truncation: renormalize the log-probs of the chosen tokens over the tokens that sampling keeps. The last row
            then has the log-probs over the whole vocabulary. Entropy and further tokens use the whole vocabulary.
    """
    if top is None and further_RK is None:
        further_RK = targets_R[:, None][:, :0]
    if hidden_U.device.type == "cpu" and truncation is None and not spans:
        chunk *= 4 if _is_lean(hidden_U) else 2

    def part(hidden: Tensor, inverse: Tensor, targets: Tensor, further: Tensor | None) -> Tensor:
        logits_UV = output_layer(hidden)
        if further is None:
            assert top is not None
            further = top_tokens(logits_UV, vocab, top)[inverse]
        if spans:
            return _by_spans(logits_UV, inverse, targets, further, spans, vocab, temperature, truncation)
        response, count = further.shape
        everything = torch.cat([targets, further.flatten()])
        places = torch.cat([inverse, inverse.repeat_interleave(count)])
        out = _token_logprobs(logits_UV, places, everything, vocab, temperature, truncation)
        full = 0 if truncation is None else 2
        rows = [out[:2, :response], out[full, response:].view(response, count).T, out[2:, :response]]
        return torch.cat(rows if top is None else [*rows, further.T.float()])

    if hidden_U.shape[0] <= chunk:
        return part(hidden_U, inverse_R, targets_R, further_RK)
    return _in_chunks(part, hidden_U, inverse_R, targets_R, further_RK, chunk)


def _by_spans(
    logits_UV: Tensor, inverse_R: Tensor, targets_R: Tensor, further_RK: Tensor, spans: Sequence[TeacherSpan],
    vocab: VocabPart, temperature: float, truncation: Truncation | None,
) -> Tensor:  # fmt: skip
    """Return `chunked_logprobs` of one chunk for further tokens of several teachers."""
    parts: list[Tensor | None] = []
    plain = [further_RK[:, :0]]
    for span, ids_RK in zip(spans, further_RK.split([span.tokens for span in spans], 1), strict=True):
        if span.projection is None:
            plain.append(ids_RK)
            parts.append(None)
            continue
        token_ids, places_RK = ids_RK.unique(return_inverse=True)
        matrix = span.projection.part(token_ids, vocab.start, logits_UV.shape[1])
        # Before TokenLogprobs, which overwrites the logits.
        parts.append(ProjectedProbs.apply(logits_UV, inverse_R, places_RK, matrix, vocab, temperature).T)
    plain_RK = torch.cat(plain, 1)
    response, count = plain_RK.shape
    places = torch.cat([inverse_R, inverse_R.repeat_interleave(count)])
    everything = torch.cat([targets_R, plain_RK.flatten()])
    out = _token_logprobs(logits_UV, places, everything, vocab, temperature, truncation)
    others = out[0 if truncation is None else 2, response:].view(response, count).T
    logprobs = iter(others.split([ids_RK.shape[1] for ids_RK in plain[1:]]))
    rows = [part if part is not None else next(logprobs) for part in parts]
    return torch.cat([out[:2, :response], *rows, out[2:, :response]])


def _token_logprobs(
    logits_UV: Tensor, inverse_R: Tensor, targets_R: Tensor, vocab: VocabPart, temperature: float,
    truncation: Truncation | None,
) -> Tensor:  # fmt: skip
    if truncation is None and _is_lean(logits_UV):
        return LeanLogprobs.apply(logits_UV, inverse_R, targets_R, vocab, temperature)
    return TokenLogprobs.apply(logits_UV, inverse_R, targets_R, vocab, temperature, truncation)


def _is_lean(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype.itemsize < 4


def _in_chunks(
    part: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    hidden_U: Tensor,
    inverse_R: Tensor,
    targets_R: Tensor,
    further_RK: Tensor | None,
    chunk: int,
) -> Tensor:
    """[N, R]: what `part` returns, `chunk` positions at a time, each computed again in the backward pass."""
    positions = hidden_U.shape[0]
    order_R = torch.argsort(inverse_R, stable=True)
    bounds = torch.arange(0, positions, chunk, device=inverse_R.device)
    splits = [*torch.searchsorted(inverse_R[order_R], bounds).tolist(), len(order_R)]

    parts = []
    for number, start in enumerate(range(0, positions, chunk)):
        own_R = order_R[splits[number] : splits[number + 1]]
        hidden = hidden_U[start : start + chunk]
        further = None if further_RK is None else further_RK[own_R]
        chunk_columns = (hidden, inverse_R[own_R] - start, targets_R[own_R], further)
        parts.append(checkpoint(part, *chunk_columns, use_reentrant=False))
    return torch.cat(parts, 1)[:, torch.argsort(order_R)]


def text_tokens(
    hidden_U: Tensor, part: PackedRow, output_layer: Callable[[Tensor], Tensor], vocab: VocabPart, chunk: int,
    top: Teaching, context: Any,
) -> Tensor:  # fmt: skip
    """int64 [R, K]: the most likely tokens of each chosen token's text, by their highest logit at any position, over
    context-parallel ranks (`context`)."""
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
    """int64 [U, K]: the most likely tokens of each position, best first."""
    width = max(0, min(logits_UV.shape[1], top.vocab - vocab.start))
    own_UV = logits_UV.detach()[:, :width]
    values_UK, ids_UK = own_UV.topk(min(top.top, width))
    ids_UK = ids_UK + vocab.start
    if (ranks := vocab.group.size()) > 1:
        # The last ranks may hold fewer tokens than the top, or none below the limit.
        missing = top.top - values_UK.shape[1]
        values_UK = F.pad(values_UK.float(), (0, missing), value=-torch.inf)
        ids_UK = F.pad(ids_UK, (0, missing))
        values, ids = ([torch.empty_like(values_U) for _ in range(ranks)] for values_U in (values_UK, ids_UK))
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

    With `truncation` float32 [3, R]: first the log-softmax over the tokens that are sampled from (`kept_tokens`), last
    the one over all. The chosen token always belongs to the former: rounding in the engine, or weights that have
    changed since, may put it outside of what these logits keep. The choice of the kept tokens has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_UV: Tensor,
        inverse_R: Tensor,
        targets_R: Tensor,
        vocab: VocabPart,
        temperature: float,
        truncation: Truncation | None = None,
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
        exp_R = x[inverse_R, local_R].masked_fill_(outside_R, 0.0)
        if vocab.group.size() > 1:
            packed = torch.cat([total_U, weighted_U, chosen_R, exp_R])
            torch.distributed.all_reduce(packed, group=vocab.group)
            total_U, weighted_U, chosen_R, exp_R = packed.split([len(total_U)] * 2 + [len(chosen_R)] * 2)
        log_total_U = total_U.log()
        entropy_U = log_total_U - weighted_U / total_U
        rows, kept = [chosen_R - log_total_U[inverse_R], entropy_U[inverse_R]], ()
        if truncation is not None:
            lowest_U, share_U, kept_U = kept_tokens(x, truncation, vocab.group)
            added_R = torch.where(exp_R < lowest_U[inverse_R], exp_R, 0.0)
            kept_R = kept_U[inverse_R] + added_R
            rows, kept = [chosen_R - kept_R.log(), rows[1], rows[0]], (lowest_U, share_U, kept_R, added_R)
        ctx.save_for_backward(x, total_U, entropy_U, inverse_R, local_R, outside_R, *kept)
        ctx.temperature, ctx.dtype = temperature, logits_UV.dtype
        return torch.stack(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exp_UV, total_U, entropy_U, inverse_R, local_R, outside_R, *kept = ctx.saved_tensors
        given_R, entropy_grad_R, *full = grads[0] / ctx.temperature
        grad_R, kept_gradient = (full[0], _KeptGradient.of(given_R, inverse_R, *kept)) if full else (given_R, None)
        factor_U, entropy_sum_U = _factors(grad_R, entropy_grad_R, inverse_R, total_U)
        grad_UV = _scale(exp_UV, factor_U, entropy_sum_U, entropy_U - total_U.log(), kept_gradient)
        if kept_gradient is not None:
            grad_R = grad_R + kept_gradient.chosen_R
        grad_UV.index_put_((inverse_R, local_R), grad_R.masked_fill(outside_R, 0.0), accumulate=True)
        return grad_UV.to(ctx.dtype), None, None, None, None, None


class LeanLogprobs(torch.autograd.Function):
    """`TokenLogprobs` without truncation, with equal bits, for narrow logits on a CPU. Both directions compute few rows
    at a time in float32. The gradient replaces the logits, so that 2 bytes per logit are kept and not 10."""

    @staticmethod
    def forward(
        ctx: Any, logits_UV: Tensor, inverse_R: Tensor, targets_R: Tensor, vocab: VocabPart, temperature: float
    ) -> Tensor:
        top_U = logits_UV.amax(-1).float() / temperature
        if vocab.group.size() > 1:
            torch.distributed.all_reduce(top_U, torch.distributed.ReduceOp.MAX, group=vocab.group)
        local_R = targets_R - vocab.start
        outside_R = (local_R < 0) | (local_R >= logits_UV.shape[1])
        local_R = local_R.masked_fill(outside_R, 0)
        chosen_R = logits_UV[inverse_R, local_R].float().div_(temperature).sub_(top_U[inverse_R])
        chosen_R = chosen_R.masked_fill_(outside_R, 0.0)
        sums_2U = top_U.new_empty(2, len(top_U))
        for rows in _blocks(logits_UV):
            sums_2U[0, rows], sums_2U[1, rows] = _exponentiate(_shifted(logits_UV, top_U, temperature, rows))
        if vocab.group.size() > 1:
            torch.distributed.all_reduce(sums_2U, group=vocab.group)
            torch.distributed.all_reduce(chosen_R, group=vocab.group)
        weighted_U, total_U = sums_2U
        log_total_U = total_U.log()
        entropy_U = log_total_U - weighted_U / total_U
        ctx.save_for_backward(logits_UV, top_U, total_U, entropy_U, inverse_R, local_R, outside_R)
        ctx.temperature = temperature
        return torch.stack([chosen_R - log_total_U[inverse_R], entropy_U[inverse_R]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_UV, top_U, total_U, entropy_U, inverse_R, local_R, outside_R = ctx.saved_tensors
        grad_R, entropy_grad_R = grads[0] / ctx.temperature
        factor_U, entropy_sum_U = _factors(grad_R, entropy_grad_R, inverse_R, total_U)
        shift_U, own_R = entropy_U - total_U.log(), grad_R.masked_fill(outside_R, 0.0)
        order_R = torch.argsort(inverse_R, stable=True)
        sorted_R = inverse_R[order_R]
        for rows in _blocks(logits_UV):
            exp_UV = _shifted(logits_UV, top_U, ctx.temperature, rows).exp_()
            entropy = None if entropy_sum_U is None else entropy_sum_U[rows]
            grad_UV = _scale(exp_UV, factor_U[rows], entropy, shift_U[rows], None)
            first, end = torch.searchsorted(sorted_R, torch.tensor([rows.start, rows.stop])).tolist()
            chosen = order_R[first:end]
            grad_UV.index_put_((inverse_R[chosen] - rows.start, local_R[chosen]), own_R[chosen], accumulate=True)
            logits_UV[rows] = grad_UV
        return logits_UV, None, None, None, None


def _shifted(logits_UV: Tensor, top_U: Tensor, temperature: float, rows: slice) -> Tensor:
    """float32: logits / temperature minus their highest."""
    x = logits_UV[rows].float()
    if temperature != 1.0:
        x.div_(temperature)
    return x.sub_(top_U[rows, None])


def _factors(
    grad_R: Tensor, entropy_grad_R: Tensor, inverse_R: Tensor, total_U: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the factors of exp in the gradient of log-probs, and of entropies unless these have none."""
    factor_U = -torch.zeros_like(total_U).index_add_(0, inverse_R, grad_R) / total_U
    if not entropy_grad_R.any():
        return factor_U, None
    return factor_U, torch.zeros_like(total_U).index_add_(0, inverse_R, entropy_grad_R) / total_U


@dataclass(frozen=True)
class _KeptGradient:
    """The part of truncated log-probs in the gradient."""

    lowest_U: Tensor
    share_U: Tensor
    factor_U: Tensor
    chosen_R: Tensor

    @classmethod
    def of(
        cls, grad_R: Tensor, inverse_R: Tensor, lowest_U: Tensor, share_U: Tensor, kept_R: Tensor, added_R: Tensor
    ) -> _KeptGradient:
        factor_U = torch.zeros_like(lowest_U).index_add_(0, inverse_R, -grad_R / kept_R)
        return cls(lowest_U, share_U, factor_U, grad_R * (1 - added_R / kept_R))

    def of_rows(self, exp_UV: Tensor, rows: slice) -> Tensor:
        lowest_U1, share_U1, factor_U1 = (
            values_U[rows, None] for values_U in (self.lowest_U, self.share_U, self.factor_U)
        )
        at_lowest_UV = torch.where(exp_UV < lowest_U1, 0.0, factor_U1 * share_U1)
        return torch.where(exp_UV > lowest_U1, factor_U1, at_lowest_UV).mul_(exp_UV)


CANDIDATES = 1024
"""Number of the most likely tokens among which top-p first looks for the last one to keep."""
SORTED_POSITIONS = 16
"""Positions at a time with all tokens sorted, if the candidates have too little probability."""


def kept_tokens(exp_UV: Tensor, truncation: Truncation, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens that sampling can draw, from a vocabulary split across `group`, chosen like vLLM: tokens with
    exp(logit / temperature - its maximum) = `exp_UV` above `lowest_U`, and the share `share_U` of tokens equal to it;
    and the sum of `exp_UV` over them. Of tokens as likely as the last of top-p, vLLM keeps only as many as are needed;
    of tokens as likely as the last of top-k, all or as many (`Truncation.exact_top_k`)."""
    candidates = truncation.top_k + 1 if truncation.top_k > 0 else CANDIDATES
    kept, settled_U = _kept_among(exp_UV, truncation, group, candidates)
    unsettled = (~settled_U).nonzero()[:, 0]
    if len(unsettled):
        width = torch.tensor(exp_UV.shape[1], device=exp_UV.device)
        if group.size() > 1:
            torch.distributed.all_reduce(width, torch.distributed.ReduceOp.MAX, group=group)
        everything = int(width) * group.size() + 1
        for rows in unsettled.split(SORTED_POSITIONS):
            for whole, part in zip(kept, _kept_among(exp_UV[rows], truncation, group, everything)[0], strict=True):
                whole[rows] = part
    return kept


def _kept_among(
    exp_UV: Tensor, truncation: Truncation, group: Any, candidates: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return the result of `kept_tokens`, and the positions with enough candidates, bool [U]."""
    lowest_U = exp_UV.new_full((len(exp_UV),), truncation.min_p)  # the most likely token has 1
    share_U, best_UK = torch.ones_like(lowest_U), None
    if truncation.top_k > 0 or truncation.top_p < 1:
        best_UK = _largest(exp_UV, candidates, group)
        if truncation.top_k > 0:
            lowest_U = torch.maximum(lowest_U, best_UK[:, truncation.top_k - 1])
            if truncation.exact_top_k:
                kept = _kept_of_few(exp_UV, best_UK[:, : truncation.top_k], lowest_U, truncation.top_p, group)
                return kept, torch.ones_like(lowest_U, dtype=torch.bool)
    total_U = _sum_from(exp_UV, lowest_U, group)
    if best_UK is None or truncation.top_p == 1:
        return (lowest_U, share_U, total_U), torch.ones_like(lowest_U, dtype=torch.bool)
    sums_UK = torch.where(best_UK >= lowest_U[:, None], best_UK, 0.0).double().cumsum(1)
    reached_UK = sums_UK >= truncation.top_p * total_U.double()[:, None]
    place_U1 = reached_UK.int().argmax(1, keepdim=True)
    last_U1 = best_UK.gather(1, place_U1)
    needed_U = place_U1[:, 0] + 1 - (best_UK > last_U1).sum(1)
    enough_U = reached_UK[:, -1]
    kept = (
        torch.where(enough_U, last_U1[:, 0], lowest_U),
        torch.where(enough_U, needed_U / (best_UK == last_U1).sum(1), share_U),
        torch.where(enough_U, sums_UK.gather(1, place_U1)[:, 0].float(), total_U),
    )
    # The last candidate is -1 if the vocabulary has no more. If it is as likely as the last token, further tokens may
    # be, too.
    return kept, (enough_U & (best_UK[:, -1] < last_U1[:, 0])) | (best_UK[:, -1] < 0)


def _kept_of_few(
    exp_UV: Tensor, best_UK: Tensor, lowest_U: Tensor, top_p: float, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `kept_tokens` for the tokens `best_UK` alone; `exp_UV` may have more equally likely ones."""
    sums_UK = torch.where(best_UK >= lowest_U[:, None], best_UK, 0.0).double().cumsum(1)
    place_U1 = (sums_UK >= top_p * sums_UK[:, -1:]).int().argmax(1, keepdim=True)
    last_U1 = best_UK.gather(1, place_U1)
    needed_U = place_U1[:, 0] + 1 - (best_UK > last_U1).sum(1)
    equal_U, step = torch.empty_like(lowest_U), _rows_at_a_time(exp_UV)
    for start in range(0, len(exp_UV), step):
        equal_U[start : start + step] = (exp_UV[start : start + step] == last_U1[start : start + step]).sum(1)
    if group.size() > 1:
        torch.distributed.all_reduce(equal_U, group=group)
    return last_U1[:, 0], needed_U / equal_U, sums_UK.gather(1, place_U1)[:, 0].float()


def _largest(exp_UV: Tensor, count: int, group: Any) -> Tensor:
    """Return the largest values per position over all ranks, [U, count], falling; -1 pads."""
    found_UK = exp_UV.topk(min(count, exp_UV.shape[1])).values
    found_UK = F.pad(found_UK, (0, count - found_UK.shape[1]), value=-1.0)
    if group.size() > 1:
        parts = [torch.empty_like(found_UK) for _ in range(group.size())]
        torch.distributed.all_gather(parts, found_UK.contiguous(), group=group)
        found_UK = torch.cat(parts, 1).topk(count).values
    return found_UK


def _sum_from(exp_UV: Tensor, lowest_U: Tensor, group: Any) -> Tensor:
    """The sum of the values that are at least `lowest_U`, over all ranks [U]."""
    total_U, step = torch.empty_like(lowest_U), _rows_at_a_time(exp_UV)
    for start in range(0, exp_UV.shape[0], step):
        part = exp_UV[start : start + step]
        kept = torch.where(part >= lowest_U[start : start + step, None], part, 0.0)
        torch.sum(kept, -1, out=total_U[start : start + step])
    if group.size() > 1:
        torch.distributed.all_reduce(total_U, group=group)
    return total_U


class ProjectedProbs(torch.autograd.Function):
    """float32 [R, K]: softmax probabilities mapped by a sparse matrix M to other tokens, at rows `places_RK`. d L / d
    logits = p (M^T g - <p, M^T g>) / temperature, where g is the gradient of M p."""

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


def _scale(
    exp_UV: Tensor, factor_U: Tensor, entropy_U: Tensor | None, shift_U: Tensor, kept_gradient: _KeptGradient | None
) -> Tensor:
    """Replace exp by exp * (factor - entropy * (log exp + shift)) and truncated gradients, in row blocks; 0 where exp
    is 0."""
    if entropy_U is None and kept_gradient is None:
        return exp_UV.mul_(factor_U[:, None])
    step = _rows_at_a_time(exp_UV)
    for start in range(0, exp_UV.shape[0], step):
        rows = slice(start, start + step)
        part, further = exp_UV[rows], []
        if kept_gradient is not None:
            further.append(kept_gradient.of_rows(part, rows))
        factor_U1 = factor_U[rows, None]
        if entropy_U is not None:
            further.append(torch.special.xlogy(part, part).mul_(-entropy_U[rows, None]))
            factor_U1 = factor_U1 - (entropy_U[rows] * shift_U[rows])[:, None]
        part.mul_(factor_U1)
        for scaling in further:
            part.add_(scaling)
    return exp_UV


def _blocks(x_UV: Tensor) -> Iterator[slice]:
    step = _rows_at_a_time(x_UV)
    return (slice(start, min(start + step, len(x_UV))) for start in range(0, len(x_UV), step))


def _rows_at_a_time(x_UV: Tensor) -> int:
    return 64 if x_UV.device.type == "cpu" else 4096


def _exponentiate(x_UV: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces x by exp(x); returns sum exp(x) x and sum exp(x) of each row. A few rows at a time stay in the cache."""
    weighted_U, total_U = x_UV.new_empty(x_UV.shape[0]), x_UV.new_empty(x_UV.shape[0])
    step = _rows_at_a_time(x_UV)
    for start in range(0, x_UV.shape[0], step):
        part = x_UV[start : start + step]
        exp = part.exp()
        torch.sum(exp, -1, out=total_U[start : start + step])
        torch.sum(part.mul_(exp), -1, out=weighted_U[start : start + step])
        part.copy_(exp)
    return weighted_U, total_U
