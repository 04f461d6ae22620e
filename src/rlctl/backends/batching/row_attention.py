"""Attention over packed rows by torch's scaled_dot_product_attention; units of a row never see each other.

Units are batched by length, so many short rollouts cost few calls. Under context parallelism the caller gathers keys
and values. Shapes: T tokens, B batch of units, Q and K query and key positions, h heads, d head width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlctl.backends.batching.context_parallel import zigzag
from rlctl.backends.batching.packed_rows import PackedRow, RowUnit

TREE_TOKENS = 512
"""Longest shared-prompt unit that GPUs compute as one masked square; in longer units, and on CPUs, each completion is
computed separately."""
BATCH_WASTE = 1.5
"""Units are batched while the padded squares exceed their own by at most this factor."""
WIDE_KEYS = 384
"""On CPUs, narrow numbers are widened to float32 for attention to at most this many keys. Torch's backward pass in
bfloat16 takes 2.6 times as long as in float32 at 70 keys, the same at 384, and 0.7 times at 1,900 (torch 2.13,
AVX-512)."""
KERNEL_WIDTH = 8
"""Head width divisor of torch's fused masked bfloat16 kernels on GPUs; other widths use a math kernel
(`check_head_dim_size_mem_efficient` in ATen's sdp_utils.cpp)."""


@dataclass(frozen=True)
class AttentionBlock:
    """A batch of attention problems over tokens of the row."""

    queries_BQ: Tensor  # int64 index into T
    keys_BK: Tensor  # int64 index into T
    mask_B1QK: Tensor | None  # bool, True attends; None: causal, queries and keys alike
    positions_BQ: Tensor  # int64: of the queries
    positions_BK: Tensor  # int64: of the keys
    _windows: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def mask(self, window: int | None) -> Tensor | None:
        """bool [B, 1, Q, K] for a `window` (including the token); None: causal, which has faster GPU kernels than a
        mask."""
        if window is None or window >= self.keys_BK.shape[1]:
            return self.mask_B1QK
        if window not in self._windows:
            near_BQK = self.positions_BQ[:, :, None] - self.positions_BK[:, None] < window
            visible = torch.ones_like(near_BQK[:1]).tril()[:, None] if self.mask_B1QK is None else self.mask_B1QK
            self._windows[window] = visible & near_BQK[:, None]
        return self._windows[window]


@dataclass(frozen=True)
class RowAttention:
    """How the tokens of a row that one context-parallel rank holds attend."""

    blocks: tuple[AttentionBlock, ...]
    outputs_T: Tensor | None
    """int64: where each token's output is in the concatenated blocks; None: they are in order."""

    @classmethod
    def of(cls, row: PackedRow, cp_size: int, cp_rank: int, mutual_T: np.ndarray | None = None) -> RowAttention:
        """`mutual_T` (without context parallelism): tokens with the same number, which is not negative, attend to each
        other in both directions."""
        if cp_size > 1:
            return cls((_context_parallel_block(row, cp_size, cp_rank),), None)
        return cls(*_unit_blocks(row.units, row.positions_kT[0], mutual_T))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: RowAttention,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return [T, h * d], the attention of a rank's queries to the keys of the whole row.

    `query` [T, h, d]; key and value may have fewer heads, and values narrower ones. `scale` None: 1 / sqrt(d).
    `window`: attended positions including the token; None: all. `sinks` [h]: a learned logit per head that attends to
    nothing. `cap`: scores s become cap * tanh(s / cap).
    """
    given = wide = (query, key, value)
    if _is_narrow(query) and any(_is_short(block) for block in attention.blocks):
        wide = (query.float(), key.float(), value.float())  # gradients of a prompt's keys and values are sums, too
    parts = [
        _attend(*(wide if _is_short(block) else given), block, scale, window, sinks, cap).to(query.dtype)
        for block in attention.blocks
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out if attention.outputs_T is None else out.index_select(0, attention.outputs_T)


def _is_narrow(query: Tensor) -> bool:
    return query.device.type == "cpu" and query.dtype.itemsize < 4


def _is_short(block: AttentionBlock) -> bool:
    return block.keys_BK.shape[1] <= WIDE_KEYS


@dataclass(frozen=True)
class _Problem:
    queries: np.ndarray
    keys: np.ndarray
    mask_QK: np.ndarray | None
    unread: int = 0
    """Queries at the beginning whose output nobody reads."""

    @property
    def area(self) -> int:
        return len(self.queries) * len(self.keys)


def _unit_blocks(
    units: Iterable[RowUnit], positions_T: Tensor, mutual_T: np.ndarray | None
) -> tuple[tuple[AttentionBlock, ...], Tensor | None]:
    squares = takes_squares(positions_T.device)
    problems = sorted(
        (_both_ways(p, mutual_T) for unit in units for p in _problems(unit, squares)),
        key=lambda p: (p.mask_QK is None, -p.area),
    )
    batches = _batches(problems)
    blocks = [_block(batch, positions_T) for batch in batches]
    order = np.concatenate([_padded([unit.queries for unit in batch]).ravel() for batch in batches])
    used = np.concatenate([_used(batch) for batch in batches])
    outputs = np.empty(int(used.sum()), np.int64)
    outputs[order[used]] = np.flatnonzero(used)
    in_order = len(outputs) == len(order) and np.array_equal(outputs, np.arange(len(order)))
    return tuple(blocks), None if in_order else _on_device(outputs, positions_T.device)


def takes_squares(device: torch.device) -> bool:
    """Return whether larger squares in fewer calls are cheaper than masked rectangles, as on GPUs."""
    return device.type == "cuda"


def _problems(unit: RowUnit, squares: bool) -> list[_Problem]:
    """Split a unit's attention: the prompt's, and one rectangle per completion. `squares`: one square of a short unit,
    and a square with the prompt for long completions."""
    tokens = unit.start + np.arange(unit.tokens)
    if len(unit.completions) <= 1:
        return [_Problem(tokens, tokens, None)]
    if squares and unit.tokens <= TREE_TOKENS:
        part = np.repeat(np.arange(len(unit.completions) + 1), [unit.prompt, *unit.completions])
        in_own_text = (part[None] == 0) | (part[None] == part[:, None])  # only the token's own completion
        return [_Problem(tokens, tokens, np.tri(unit.tokens, dtype=bool) & in_own_text)]
    prompt = tokens[: unit.prompt]
    problems = [_Problem(prompt, prompt, None)]
    start = unit.prompt
    for length in unit.completions:
        in_own_text = tokens[start : start + length]
        both = np.concatenate([prompt, in_own_text])
        if squares and length >= unit.prompt:
            problems.append(_Problem(both, both, None, unit.prompt))
        elif length:
            mask = np.arange(unit.prompt + length)[None] <= unit.prompt + np.arange(length)[:, None]
            problems.append(_Problem(in_own_text, both, mask))
        start += length
    return problems


def _both_ways(problem: _Problem, mutual_T: np.ndarray | None) -> _Problem:
    """The problem with bidirectional attention among tokens of an image."""
    if mutual_T is None or (mutual_T[problem.queries] < 0).all():
        return problem
    image_Q1, image_K = mutual_T[problem.queries][:, None], mutual_T[problem.keys]
    causal_QK = np.tri(len(problem.queries), dtype=bool) if problem.mask_QK is None else problem.mask_QK
    return replace(problem, mask_QK=causal_QK | ((image_Q1 == image_K) & (image_Q1 >= 0)))


def _batches(problems: list[_Problem]) -> list[list[_Problem]]:
    batches: list[list[_Problem]] = []
    for problem in problems:
        last = batches[-1] if batches else []
        if last and (last[0].mask_QK is None) == (problem.mask_QK is None):
            grown = [*last, problem]
            queries, keys = max(len(p.queries) for p in grown), max(len(p.keys) for p in grown)
            if queries * keys * len(grown) <= BATCH_WASTE * sum(p.area for p in grown):
                last.append(problem)
                continue
        batches.append([problem])
    return batches


def _block(batch: list[_Problem], positions_T: Tensor) -> AttentionBlock:
    """Pad a batch with token 0: masks hide padding keys, and nobody reads padding queries."""
    queries, keys = max(len(p.queries) for p in batch), max(len(p.keys) for p in batch)
    mask = None if batch[0].mask_QK is None else np.zeros((len(batch), 1, queries, keys), bool)
    for b, problem in enumerate(batch):
        if mask is not None and problem.mask_QK is not None:
            mask[b, 0, : len(problem.queries), : len(problem.keys)] = problem.mask_QK
            mask[b, 0, len(problem.queries) :, 0] = True  # a softmax over no values is NaN
    device = positions_T.device
    queries_BQ = _on_device(_padded([problem.queries for problem in batch]), device)
    keys_BK = _on_device(_padded([problem.keys for problem in batch]), device)
    return AttentionBlock(
        queries_BQ,
        keys_BK,
        None if mask is None else _on_device(mask, device),
        positions_T[queries_BQ],
        positions_T[keys_BK],
    )


def _padded(places: list[np.ndarray]) -> np.ndarray:
    """int64 [B, longest], filled with 0."""
    padded = np.zeros((len(places), max(map(len, places))), np.int64)
    for row, row_places in zip(padded, places, strict=True):
        row[: len(row_places)] = row_places
    return padded


def _on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy without waiting for earlier work on the device; only copies from pinned memory do not wait."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _used(batch: list[_Problem]) -> np.ndarray:
    """bool [batch * queries]: the entries of a block that are read; padding is not."""
    places = np.arange(max(len(p.queries) for p in batch))
    return np.concatenate([(p.unread <= places) & (places < len(p.queries)) for p in batch])


def _context_parallel_block(row: PackedRow, cp_size: int, cp_rank: int) -> AttentionBlock:
    """This rank's queries against the keys of all ranks, in gathering order."""
    length, device = row.tokens_T.shape[0], row.tokens_T.device
    unit, part = np.empty(length, np.int64), np.empty(length, np.int64)
    for number, u in enumerate(row.units):
        span = slice(u.start, u.start + u.tokens)
        unit[span] = number
        part[span] = np.repeat(np.arange(len(u.completions) + 1), [u.prompt, *u.completions])
    q = zigzag(length, cp_size, cp_rank)
    k = np.concatenate([zigzag(length, cp_size, rank) for rank in range(cp_size)])
    visible = (unit[q][:, None] == unit[k]) & ((part[k] == 0) | (part[q][:, None] == part[k])) & (k <= q[:, None])
    return AttentionBlock(
        torch.arange(len(q), device=device)[None],
        torch.arange(length, device=device)[None],
        _on_device(visible[None, None], device),
        row.positions_kT[0][_on_device(q, device)][None],
        row.positions_kT[0][_on_device(k, device)][None],
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block: AttentionBlock,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
    cap: float | None,
) -> Tensor:
    """[B * Q, h * d]: outputs of one block."""
    q = _gather(query, block.queries_BQ)
    k, v = _gather(key, block.keys_BK), _gather(value, block.keys_BK)
    mask, factor = block.mask(window), scale or query.shape[-1] ** -0.5
    causal = mask is None
    if cap is not None:
        return _capped(q, k, v, mask, factor, cap).transpose(1, 2).reshape(block.queries_BQ.numel(), -1)
    if mask is not None and q.is_cuda:
        k, v = _for_each_query_head(k, q.shape[1]), _for_each_query_head(v, q.shape[1])
    width = v.shape[-1]
    if sinks is not None:
        q, k, v, mask = _with_sinks(q, k, v, mask, sinks / factor)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=factor, enable_gqa=q.shape[1] != k.shape[1]
    )
    if sinks is not None:
        out = out[:, :, 1:, :width]
    return out.transpose(1, 2).reshape(block.queries_BQ.numel(), -1)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float) -> Tensor:
    """[B, h, Q, d] with capped scores, which torch's kernels do not know: whole squares of scores are in memory."""
    k, v = _for_each_query_head(k, q.shape[1]), _for_each_query_head(v, q.shape[1])
    scores = (q @ k.transpose(-1, -2)).float() * (scale / cap)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril() if mask is None else mask
    return (scores.tanh() * cap).masked_fill(~visible, -torch.inf).softmax(-1).to(v.dtype) @ v


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores_h: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Prepend a token with the sink's score and value zero. It uses a further query and key dimension, so any kernel
    works; zeros fill the width that kernels need."""
    further = KERNEL_WIDTH - q.shape[-1] % KERNEL_WIDTH
    scores = scores_h.to(q.dtype)[None, :, None, None].expand(*q.shape[:3], 1)
    q = F.pad(torch.cat([q, scores], -1), (0, further - 1, 1, 0))
    sink = F.pad(k.new_ones(1), (k.shape[-1], further - 1)).expand(*k.shape[:2], 1, -1)
    k = torch.cat([sink, F.pad(k, (0, further))], 2)
    return q, k, F.pad(v, (0, further, 1, 0)), None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)


def _for_each_query_head(x_BhKd: Tensor, heads: int) -> Tensor:
    """Repeat keys or values: torch's kernels for grouped queries on GPUs take no mask but a whole [B, h, Q, K]."""
    return x_BhKd if x_BhKd.shape[1] == heads else x_BhKd.repeat_interleave(heads // x_BhKd.shape[1], 1)


def _gather(x_Thd: Tensor, index_BL: Tensor) -> Tensor:
    """[B, h, L, d]"""
    batch, length = index_BL.shape
    if batch == 1 and length == x_Thd.shape[0]:  # the whole row, in order
        return x_Thd.transpose(0, 1)[None]
    return x_Thd.index_select(0, index_BL.flatten()).view(batch, length, *x_Thd.shape[1:]).transpose(1, 2)
