"""Operations on a CPU whose result for a row depends on that row alone, and not on the rows beside it: with them the
engine, one token at a time, and the policy, whole texts at a time, compute log-probs with equal bits.

What libraries do otherwise (measured with torch 2.13 and MKL 2024.2 on an AMD processor with AVX-512): float32 products
of fewer than about six rows a thread take another kernel; `silu` takes another exponential at the end of a loop than
inside; attention adds up keys in an order that depends on the number of queries and keys.

Suffixes: N rows, B batch, h heads, Q queries, K keys, d head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlctl.backends import logprobs
from rlctl.backends.batching import row_attention
from rlctl.backends.batching.row_attention import AttentionBlock

KEYS = 64
"""Keys that are attended to at once, in the order of their positions."""
QUERIES = 16
"""Divisor of the number of queries in a product."""
ROWS_A_THREAD = 8


def least_rows() -> int:
    """Number of rows from which on a product computes each row alike."""
    return max(16, ROWS_A_THREAD * torch.get_num_threads())


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply `function` [N, ...] -> [N, ...] to at least `least_rows()` rows: rows of zeros are added, and left out
    of the result."""
    rows = x.shape[0]
    missing = least_rows() - rows
    if missing <= 0:
        return function(x)
    return function(torch.cat([x, x.new_zeros(missing, *x.shape[1:])]))[:rows]


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., in] times [out, in], and then the bias: [..., out]."""
    out = by_rows(lambda rows: F.linear(rows, weight), x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H]: as transformers computes it, in float32 with one rounding before the weight."""
    flat = x.reshape(-1, x.shape[-1])
    return by_rows(lambda rows: _normed(rows, eps), flat).view(x.shape) * weight


def _normed(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """By torch's exponential, which is the same at every place of a tensor."""
    wide = x.float().contiguous()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def swiglu(gate: Tensor, linear: Tensor) -> Tensor:
    """[..., f]"""
    return silu(gate) * linear


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [..., d] by cosines and sines [..., d / 2]; the halves of the channels are pairs."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def row_sums(x_NV: Tensor) -> Tensor:
    """[N]. The sum of a single row is divided over threads."""
    return x_NV.sum(-1) if x_NV.shape[0] > 1 else x_NV.repeat(2, 1).sum(-1)[:1]


def log_softmax(logits_NV: Tensor) -> Tensor:
    """float32 [N, V]."""
    wide = logits_NV.float()
    shifted = wide - wide.amax(-1, keepdim=True)
    return shifted - row_sums(shifted.exp()).log()[:, None]


class Attended(torch.autograd.Function):
    """Attention [B, h, Q, d] of queries [B, h, Q, d] to keys and values [B, h, K, d] where `visible` [B, 1, Q, K] is
    true. Keys are added up in blocks of `KEYS`; a block that a query does not see changes none of its bits."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, visible)
        ctx.scale = scale
        return attended(q, k, v, visible, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        *given, visible = ctx.saved_tensors
        q, k, v = (x.detach().requires_grad_() for x in given)
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, visible, scale=ctx.scale)
        return *torch.autograd.grad(out, (q, k, v), grads[0]), None, None


def attended(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """As in `Attended`, in float32 but for the result."""
    queries, keys = q.shape[2], k.shape[2]
    few, more = -queries % QUERIES, -keys % KEYS
    wide_q = F.pad(q.float(), (0, 0, 0, few))
    wide_k, wide_v = (F.pad(x.float(), (0, 0, 0, more)) for x in (k, v))
    hidden = ~F.pad(visible, (0, more, 0, few))
    out = wide_q.new_zeros(*wide_q.shape[:3], v.shape[-1])
    total, top = (wide_q.new_full((*wide_q.shape[:3], 1), start) for start in (0.0, -torch.inf))
    for start in range(0, keys, KEYS):
        block = slice(start, start + KEYS)
        scores = wide_q @ wide_k[:, :, block].transpose(-1, -2) * scale
        scores.masked_fill_(hidden[..., block], -torch.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        shift = higher.masked_fill(higher == -torch.inf, 0.0)  # of a query that sees no key so far
        weights, kept = torch.exp(scores - shift), torch.exp(top - shift)
        total = total * kept + weights.sum(-1, keepdim=True)
        out = out * kept + weights @ wide_v[:, :, block]
        top = higher
    return (out / total)[:, :, :queries].to(q.dtype)


def install() -> None:
    """Have the policy of this process attend and sum up probabilities so."""
    row_attention._attend = _attend_block
    logprobs._exponentiate = _exponentiate


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock, scale: float | None, window: int | None,
    sinks: Tensor | None, cap: float | None,
) -> Tensor:  # fmt: skip
    """As `row_attention._attend`."""
    assert sinks is None
    assert cap is None
    q, k, v = (row_attention._gather(x, index) for x, index in ((query, block.queries_BQ), (key, block.keys_BK),
                                                               (value, block.keys_BK)))  # fmt: skip
    k, v = (row_attention._for_each_query_head(x, q.shape[1]) for x in (k, v))
    visible = block.mask(window)
    if visible is None:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()[None, None]
    out = Attended.apply(q, k, v, visible, scale or query.shape[-1] ** -0.5)
    return out.transpose(1, 2).reshape(block.queries_BQ.numel(), -1)


def _exponentiate(x_UV: Tensor) -> tuple[Tensor, Tensor]:
    """As `logprobs._exponentiate`."""
    exponential = x_UV.exp()
    weighted_U, total_U = (exponential * x_UV).sum(-1), row_sums(exponential)
    x_UV.copy_(exponential)
    return weighted_U, total_U
