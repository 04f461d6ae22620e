"""The order in which the CPU platform keeps the elements of experts for its grouped product, and back.

vLLM's `prepack_moe_weight` moves the elements of each expert's matrix, by an order that depends on the instruction set
and changes none of them. Which order that is, it tells itself: it is given matrices that hold their own indices.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from rlctl.errors import VerificationError

# Indices travel as digits that every floating-point type of weights holds exactly.
DIGIT_BITS = 8


def unpacked(kept: torch.Tensor, isa: str) -> torch.Tensor:
    """The expert's matrix [rows, columns] in its published order, from the one that the kernel keeps."""
    order = _order(tuple(kept.shape), kept.dtype, isa)
    plain = torch.empty_like(kept).view(-1)
    plain[order] = kept.reshape(-1)
    return plain.view(kept.shape)


def pack(plain: torch.Tensor, kept: torch.Tensor, isa: str) -> None:
    """Write the matrix `plain` into `kept` in the kernel's order."""
    torch.ops._C.prepack_moe_weight(plain.unsqueeze(0), kept.unsqueeze(0), isa)


@lru_cache(maxsize=16)
def _order(shape: tuple[int, ...], dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Published index of each element in the kernel's order. Raises VerificationError where it is no permutation."""
    count = shape[0] * shape[1]
    index, order = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    for shift in range(0, max(1, (count - 1).bit_length()), DIGIT_BITS):
        digits = ((index >> shift) & ((1 << DIGIT_BITS) - 1)).to(dtype).view(shape)
        moved = torch.empty_like(digits)
        pack(digits, moved, isa)
        order |= moved.view(-1).to(torch.int64) << shift
    if not torch.equal(order.sort().values, index):
        raise VerificationError(f"vLLM's order of experts ({isa}, {shape}) is no permutation: no reading back.")
    return order
