"""Operations of `checks.exact`: each row has the same bits whatever stands beside it, and is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlctl.backends import exact

NUMBERS = torch.Generator().manual_seed(0)
ROWS = (1, 2, 3, 5, 8, 13, 16, 17, 40)
WEIGHT, NORM = torch.randn(100, 64, generator=NUMBERS), torch.randn(64, generator=NUMBERS)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=NUMBERS)


def by_formula(name: str, x: Tensor) -> Tensor:
    wide = x.double()
    if name == "product":
        return wide @ WEIGHT.to(x.dtype).double().t()
    if name == "rms_norm":
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * NORM.to(x.dtype).double()
    if name == "silu":
        return wide * wide.sigmoid()
    return wide.log_softmax(-1)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: exact.product(x, WEIGHT.to(x.dtype)),
    "rms_norm": lambda x: exact.rms_norm(x, NORM.to(x.dtype), 1e-6),
    "silu": exact.silu,
    "log_softmax": exact.log_softmax,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_computes_a_row_alike_whatever_stands_beside_it(name: str, dtype: torch.dtype) -> None:
    x = drawn(50, 64).to(dtype)
    whole = OPERATIONS[name](x)
    for rows in ROWS:
        for start in (0, 7):
            part = OPERATIONS[name](x[start : start + rows])
            assert torch.equal(part, whole[start : start + rows]), (rows, start)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(whole.double(), by_formula(name, x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 20])
def test_attention_of_one_query_has_the_bits_of_the_whole_text(window: int | None) -> None:
    """As an engine computes it: one query of several texts of different lengths, next to others."""
    length, heads, width = 150, 2, 16
    q, k, v = (drawn(1, heads, length, width) for _ in range(3))
    places = torch.arange(length)
    visible = places <= places[:, None]
    if window is not None:
        visible &= places[:, None] - places < window
    whole = exact.attended(q, k, v, visible[None, None], width**-0.5)
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), visible)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5)
    ends = [1, 17, 64, 65, 149]
    queries = torch.cat([q[:, :, end - 1 : end] for end in ends])
    keys, values = (x[:, :, : max(ends)].expand(len(ends), -1, -1, -1) for x in (k, v))
    seen = torch.stack([visible[end - 1, : max(ends)] for end in ends])[:, None, None]
    single = exact.attended(queries, keys, values, seen, width**-0.5)
    assert all(torch.equal(single[n, :, 0], whole[0, :, end - 1]) for n, end in enumerate(ends))


def test_the_gradient_of_attention_is_that_of_the_formula() -> None:
    q, k, v = (drawn(1, 2, 30, 16).requires_grad_() for _ in range(3))
    visible = torch.ones(30, 30, dtype=torch.bool).tril()[None, None]
    weights = drawn(1, 2, 30, 16)
    (exact.Attended.apply(q, k, v, visible, 0.3) * weights).sum().backward()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = (wide[0] @ wide[1].transpose(-1, -2) * 0.3).masked_fill(~visible, -torch.inf)
    (scores.softmax(-1) @ wide[2] * weights.double()).sum().backward()
    for given, expected in zip((q, k, v), wide, strict=True):
        assert given.grad is not None
        torch.testing.assert_close(given.grad.double(), expected.grad, rtol=1e-4, atol=1e-4)
