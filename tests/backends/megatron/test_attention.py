"""Parts of attention that can be looked at without a model."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def test_keys_repeated_for_each_query_head_attend_as_grouped_ones_do() -> None:
    from rlctl.backends.megatron.attention import _for_each_query_head

    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool).tril()
    grouped = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    repeated = F.scaled_dot_product_attention(q, _for_each_query_head(k, 6), _for_each_query_head(v, 6), mask)
    torch.testing.assert_close(repeated, grouped)
    assert _for_each_query_head(q, 6) is q
