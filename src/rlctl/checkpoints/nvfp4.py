"""NVFP4's grid in a wider format. A value is E2M1 (sign and 0, 0.5, 1, 1.5, 2, 3, 4, 6) x a float8 (E4M3) scale per
block x a float32 scale per matrix, chosen so that the largest value is 6 times 448. Rounding is to nearest even."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_NUMBER, LARGEST_SCALE = 6.0, 448.0


@torch.no_grad()
def rounded(values: Tensor, largest: Tensor, block: int) -> Tensor:
    """Return `values` [..., I] on the grid, in their dtype. I is a multiple of `block`; `largest` is the matrix's
    largest magnitude."""
    blocks = values.float().unflatten(-1, (-1, block))
    of_matrix = largest.float() / (LARGEST_NUMBER * LARGEST_SCALE)
    scales = blocks.abs().amax(-1, keepdim=True) / LARGEST_NUMBER / of_matrix
    # A matrix of zeros has no scale; any scale gives zeros.
    scale = scales.nan_to_num(0.0).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn).float() * of_matrix
    sizes = (blocks.abs() / scale).nan_to_num(0.0, posinf=0.0)
    return (_nearest(sizes) * scale).copysign(blocks).flatten(-2).to(values.dtype)


def _nearest(sizes: Tensor) -> Tensor:
    """Round positive numbers to E2M1: its values are 0.5 apart up to 2, 1 up to 4, then 2."""
    step = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
    return ((sizes / step).round() * step).clamp(max=LARGEST_NUMBER)
