"""Attention over a packed row, against a softmax over all of its tokens with a mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlctl.backends.batching import row_attention
from rlctl.backends.batching.packed_rows import PackedRow, RowUnit
from rlctl.backends.batching.row_attention import RowAttention, _for_each_query_head, _with_sinks, attend

UNITS = (RowUnit(0, 5, (3, 4)), RowUnit(12, 2, (6,)), RowUnit(20, 4))


def row_of(units: tuple[RowUnit, ...]) -> PackedRow:
    """A row without chosen tokens: only where tokens stand and at which positions."""
    positions = [
        torch.cat([torch.arange(unit.prompt), *(unit.prompt + torch.arange(n) for n in unit.completions)])
        for unit in units
    ]
    positions_T, none = torch.cat(positions), torch.zeros(0, dtype=torch.int64)
    return PackedRow(torch.zeros_like(positions_T), positions_T[None], units, len(positions_T), none, none, none)


def visible(row: PackedRow, window: int | None) -> Tensor:
    """bool [T, T]: the tokens that each token attends to, by the definition of a unit."""
    seen = torch.zeros(len(row.tokens_T), len(row.tokens_T), dtype=torch.bool)
    for unit in row.units:
        prompt, start = list(range(unit.start, unit.start + unit.prompt)), unit.start + unit.prompt
        for part in [[], *(list(range(start + sum(unit.completions[:i]), start + sum(unit.completions[: i + 1])))
                           for i in range(len(unit.completions)))]:  # fmt: skip
            own = prompt + part
            for at, token in enumerate(own):
                seen[token, own[max(0, at + 1 - window) if window else 0 : at + 1]] = True
    return seen


@pytest.mark.parametrize(("tree_tokens", "squares"), [(512, True), (512, False), (1, True)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_row_attends_as_a_masked_softmax(
    tree_tokens: int, squares: bool, window: int | None, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_attention, "TREE_TOKENS", tree_tokens)
    monkeypatch.setattr(row_attention, "takes_squares", lambda device: squares)
    torch.manual_seed(0)
    row = row_of(UNITS)
    length = len(row.tokens_T)
    q, k, v = (
        torch.randn(length, heads, width, dtype=torch.float64, requires_grad=True)
        for heads, width in ((4, 8), (2, 8), (2, 6))
    )
    sinks = torch.randn(4, dtype=torch.float64) if with_sinks else None
    out = attend(q, k, v, RowAttention.of(row, 1, 0), window=window, sinks=sinks)
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * 8**-0.5
    scores = scores.masked_fill(~visible(row, window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, length, 1)], -1)
    weights = scores.softmax(-1)[..., :length]
    expected = torch.einsum("hqk,khd->qhd", weights, values).reshape(length, -1)
    torch.testing.assert_close(out, expected)
    gradients = (torch.autograd.grad(one.square().sum(), (q, k, v)) for one in (out, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("completions", [64, 2, 1])
def test_narrow_numbers_are_rounded_once_on_a_cpu(completions: int) -> None:
    """A prompt's keys and values get gradients from all completions, whose sum in bfloat16 would lose most digits."""
    torch.manual_seed(0)
    row = row_of((RowUnit(0, 5, (4,) * completions),))
    length = len(row.tokens_T)
    given = [torch.randn(length, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    grad = torch.rand(length, 32, dtype=torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in given)
    out = attend(q, k, v, RowAttention.of(row, 1, 0))
    found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    q, k, v = (x.detach().double().requires_grad_() for x in given)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 8**-0.5
    weights = scores.masked_fill(~visible(row, None), -torch.inf).softmax(-1)
    exact = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1)).reshape(length, -1)
    for value, other in zip(found, [exact, *torch.autograd.grad(exact, (q, k, v), grad.double())], strict=True):
        torch.testing.assert_close(value.double(), other.detach(), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("width", [8, 10, 64, 80])
def test_heads_with_a_sink_are_of_a_width_that_fused_kernels_take(width: int) -> None:
    query, key, value = torch.randn(1, 4, 5, width), torch.randn(1, 2, 5, width), torch.randn(1, 2, 5, width)
    q, k, v, _ = _with_sinks(query, key, value, None, torch.randn(4))
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0


def test_on_a_gpu_no_completion_longer_than_its_prompt_takes_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert row_attention.takes_squares(torch.device("cuda"))
    assert not row_attention.takes_squares(torch.device("cpu"))
    row = row_of((RowUnit(0, 200, (300, 200, 400)), RowUnit(1100, 300, (200, 300))))
    masked = [block for block in RowAttention.of(row, 1, 0).blocks if block.mask_B1QK is not None]
    assert sum(block.queries_BQ.shape[0] for block in masked) == 5
    monkeypatch.setattr(row_attention, "takes_squares", lambda device: True)
    masked = [block for block in RowAttention.of(row, 1, 0).blocks if block.mask_B1QK is not None]
    assert [tuple(block.mask_B1QK.shape) for block in masked] == [(1, 1, 200, 500)]


def test_a_window_that_holds_all_tokens_takes_no_mask() -> None:
    (block,) = RowAttention.of(row_of((RowUnit(0, 9),)), 1, 0).blocks
    assert block.mask(9) is None
    assert block.mask(8) is not None


def test_keys_repeated_for_each_query_head_attend_as_grouped_ones_do() -> None:
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool).tril()
    grouped = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    repeated = F.scaled_dot_product_attention(q, _for_each_query_head(k, 6), _for_each_query_head(v, 6), mask)
    torch.testing.assert_close(repeated, grouped)
    assert _for_each_query_head(q, 6) is q


def test_blocks_are_made_without_reading_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading waits for all that was launched before, in every micro-batch."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("read from the device")

    copied: list[bool] = []
    plain = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        copied.append(bool(options.get("non_blocking")))
        return plain(tensor, "cpu")

    row = row_of(UNITS)
    with monkeypatch.context() as patch:
        for name in ("cpu", "numpy", "item", "tolist"):
            patch.setattr(torch.Tensor, name, read)
        assert len(RowAttention.of(row, 1, 0).blocks) > 1
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "to", to)
    row_attention._on_device(np.zeros(4, np.int64), torch.device("cuda"))
    assert copied == [True]
