"""Log-probs and entropy of chosen tokens from vocabulary-parallel logits, a chunk of positions at a time.

Suffixes: R response tokens, U positions that predict them (a shared prompt's last position predicts several), V this
rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class VocabPart:
    """The tensor parallel group, and the first token of this rank's part of the vocabulary."""

    group: Any
    start: int = 0


def chunked_logprobs(
    hidden_U: Tensor,
    inverse_R: Tensor,
    targets_R: Tensor,
    output_layer: Callable[[Tensor], Tensor],
    vocab: VocabPart,
    temperature: float,
    chunk: int,
) -> Tensor:
    """float32 [2, R]: log-prob (with gradient) and entropy (without) of each chosen token.

    With more than `chunk` positions their logits are computed again in the backward pass rather than kept.

    Args:
        hidden_U: hidden states [U, H].
        output_layer: [n, H] -> logits [n, V] of this rank's part of the vocabulary.
    """
    positions = hidden_U.shape[0]
    if positions <= chunk:
        return token_logprobs(output_layer(hidden_U), inverse_R, targets_R, vocab, temperature)
    order_R = torch.argsort(inverse_R, stable=True)
    bounds = torch.arange(0, positions, chunk, device=inverse_R.device)
    splits = [*torch.searchsorted(inverse_R[order_R], bounds).tolist(), len(order_R)]

    def part(hidden: Tensor, inverse: Tensor, targets: Tensor) -> Tensor:
        return token_logprobs(output_layer(hidden), inverse, targets, vocab, temperature)

    parts = []
    for number, start in enumerate(range(0, positions, chunk)):
        own_R = order_R[splits[number] : splits[number + 1]]
        hidden = hidden_U[start : start + chunk]
        parts.append(checkpoint(part, hidden, inverse_R[own_R] - start, targets_R[own_R], use_reentrant=False))
    return torch.cat(parts, 1)[:, torch.argsort(order_R)]


def token_logprobs(
    logits_UV: Tensor, inverse_R: Tensor, targets_R: Tensor, vocab: VocabPart, temperature: float
) -> Tensor:
    """float32 [2, R] as in `chunked_logprobs`. Overwrites the logits where they are float32."""
    return TokenLogprobs.apply(logits_UV, inverse_R, targets_R, vocab, temperature)


class TokenLogprobs(torch.autograd.Function):
    """Log-softmax of logits / temperature at the chosen tokens, over a vocabulary split across `group`.

    d logprob / d logits = (onehot - softmax) / temperature. The entropy, log Z - sum p x, gets no gradient.
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
        local_R, outside_R = _local_targets(targets_R, vocab.start, x.shape[1])
        chosen_R = x[inverse_R, local_R].masked_fill_(outside_R, 0.0)
        # exp in place would lose x, which the entropy needs: sum p x is taken row by row without a second [U, V].
        weighted_U, total_U = _exponentiate(x)
        if vocab.group.size() > 1:
            packed = torch.cat([total_U, weighted_U, chosen_R])
            torch.distributed.all_reduce(packed, group=vocab.group)
            total_U, weighted_U, chosen_R = packed.split([len(total_U), len(weighted_U), len(chosen_R)])
        ctx.save_for_backward(x, total_U, inverse_R, local_R, outside_R)
        ctx.temperature, ctx.dtype = temperature, logits_UV.dtype
        log_total_U = total_U.log()
        entropy_U = log_total_U - weighted_U / total_U
        return torch.stack([chosen_R - log_total_U[inverse_R], entropy_U[inverse_R]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        exp_UV, total_U, inverse_R, local_R, outside_R = ctx.saved_tensors
        grad_R = grads[0][0] / ctx.temperature
        sum_U = torch.zeros_like(total_U).index_add_(0, inverse_R, grad_R)
        grad_UV = exp_UV.mul_((-sum_U / total_U)[:, None])
        grad_UV.index_put_((inverse_R, local_R), grad_R.masked_fill(outside_R, 0.0), accumulate=True)
        return grad_UV.to(ctx.dtype), None, None, None, None


def _local_targets(targets_R: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    local_R = targets_R - start
    outside_R = (local_R < 0) | (local_R >= width)
    return local_R.masked_fill(outside_R, 0), outside_R


def _exponentiate(x_UV: Tensor, rows: int = 64) -> tuple[Tensor, Tensor]:
    """Replaces x by exp(x); returns sum exp(x) x and sum exp(x) of each row. A few rows at a time stay in the cache."""
    weighted_U, total_U = x_UV.new_empty(x_UV.shape[0]), x_UV.new_empty(x_UV.shape[0])
    step = rows if x_UV.device.type == "cpu" else 4096
    for start in range(0, x_UV.shape[0], step):
        part = x_UV[start : start + step]
        exp = part.exp()
        torch.sum(exp * part, -1, out=weighted_U[start : start + step])
        torch.sum(exp, -1, out=total_U[start : start + step])
        part.copy_(exp)
    return weighted_U, total_U
