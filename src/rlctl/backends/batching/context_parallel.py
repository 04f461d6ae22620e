"""Context parallelism: a rank's tokens of a packed row, and collectives that join the parts. Suffixes: T tokens of the
row, R response tokens, U positions that predict them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlctl.backends.batching.packed_rows import PackedRow


def zigzag(length: int, cp_size: int, cp_rank: int) -> np.ndarray:
    """Tokens of a row that a context-parallel rank holds: chunks r and 2n - 1 - r, so that causal work is even."""
    chunks = np.arange(length).reshape(2 * cp_size, -1)
    return np.concatenate([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def gathered(x: Tensor, group: Any) -> Tensor:
    """The parts of all ranks, concatenated along dim 0."""
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    torch.distributed.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def summed(x: Tensor, group: Any) -> Tensor:
    """This rank's part along dim 0 of the sum over the ranks."""
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    torch.distributed.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class Gather(torch.autograd.Function):
    """`gathered`; backward sums and scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return summed(grads[0], ctx.group), None


class ShareOut(torch.autograd.Function):
    """`summed`; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gathered(grads[0], ctx.group), None


class GatherValues(torch.autograd.Function):
    """Return `gathered`; each rank computes the same and keeps its part's gradient."""

    @staticmethod
    def forward(ctx: Any, values_T: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(values_T, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.group.size())[ctx.group.rank()], None


class JoinContext(torch.autograd.Function):
    """Gather log-probs or values of the whole row on every context-parallel rank. Each rank computes the same loss and
    keeps its tokens' gradient."""

    @staticmethod
    def forward(ctx: Any, part_nR: Tensor, index_R: Tensor, total: int, group: Any) -> Tensor:
        ctx.save_for_backward(index_R)
        whole = part_nR.new_zeros(part_nR.shape[0], total)
        whole[:, index_R] = part_nR
        torch.distributed.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (index_R,) = ctx.saved_tensors
        return grads[0][:, index_R], None, None, None


def context_part(row: PackedRow, cp_size: int, cp_rank: int) -> PackedRow:
    """Return `row` with one context-parallel rank's tokens, and predicting positions as indices into them. Media stay
    whole."""
    if cp_size == 1:
        return row
    device = row.tokens_T.device
    padded_groups = torch.full((row.tokens_T.shape[0],), -1, device=device)
    mine = torch.from_numpy(zigzag(row.tokens_T.shape[0], cp_size, cp_rank)).to(device)
    padded_groups[mine] = torch.arange(len(mine), device=device)
    local_U = padded_groups[row.sources_U]
    kept_U = torch.where(local_U >= 0, torch.cumsum(local_U >= 0, 0) - 1, -1)
    kept_R = kept_U[row.inverse_R]
    index_R = torch.nonzero(kept_R >= 0)[:, 0]
    return PackedRow(
        tokens_T=row.tokens_T[mine],
        positions_kT=row.positions_kT[:, mine],
        units=row.units,
        tokens=row.tokens,
        sources_U=local_U[local_U >= 0],
        inverse_R=kept_R[index_R],
        targets_R=row.targets_R[index_R],
        columns_R={"index": index_R, "rollout": row.columns_R["rollout"][index_R]},
        routing_TLK=None if row.routing_TLK is None else row.routing_TLK[mine],
        filler_T=None if row.filler_T is None else row.filler_T[mine],
        media=row.media,
        media_T=None if row.media_T is None else row.media_T[mine],
        further_RK=None if row.further_RK is None else row.further_RK[index_R],
        spans=row.spans,
    )
