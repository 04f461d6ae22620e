"""NVFP4's grid, of numbers that are held in a wider format.

A number is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (E2M1), times the scale of its block of consecutive numbers,
times the scale of the matrix. Block scales are float8 (E4M3), and the scale of the matrix is float32, so that the
largest number of the matrix is 6 times 448, the largest numbers of both formats. Numbers and scales are rounded to the
nearest, and to the even one of two that are equally near.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_NUMBER, LARGEST_SCALE = 6.0, 448.0


@torch.no_grad()
def rounded(values: Tensor, largest: Tensor, block: int) -> Tensor:
    """Return `values` [..., I] on the grid, in their own dtype. I divides by `block`; `largest` is the largest size
    of a number of the matrix that they are a part of."""
    blocks = values.float().unflatten(-1, (-1, block))
    of_matrix = largest.float() / (LARGEST_NUMBER * LARGEST_SCALE)
    wanted = blocks.abs().amax(-1, keepdim=True) / LARGEST_NUMBER / of_matrix
    # A matrix of zeros has no scale, and its numbers are zero whatever it is.
    scale = wanted.nan_to_num(0.0).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn).float() * of_matrix
    sizes = (blocks.abs() / scale).nan_to_num(0.0, posinf=0.0)
    return (_nearest(sizes) * scale).copysign(blocks).flatten(-2).to(values.dtype)


def _nearest(sizes: Tensor) -> Tensor:
    """Numbers of E2M1 from positive ones: they are 0.5 apart up to 2, 1 up to 4, and then 2."""
    step = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
    return ((sizes / step).round() * step).clamp(max=LARGEST_NUMBER)
