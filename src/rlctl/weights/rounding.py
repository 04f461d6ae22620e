"""Unbiased rounding of float32 weights to bfloat16 and float16, shared by training, refits and exports.

A weight lies in a *cell* between two neighbors and takes the outer one (larger magnitude) above the cell's threshold.
Thresholds of successive cells are multiples of the golden ratio modulo 1, evenly spread over any run of cells (Knuth,
The Art of Computer Programming, volume 3, section 6.4), so the mean is preserved. The result depends only on the
weight: no state, no randomness, and one change per crossed threshold. Rounding to nearest has thresholds of one half,
which loses small steps from weights on the grid.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_char
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlctl.settings.training import Rounding

NARROW = (torch.bfloat16, torch.float16)
GOLDEN = 40502
"""0.618 of 2^16. Even, so that signs share thresholds and the largest patterns have none: NaN stays NaN."""
EVEN_FLOAT16, LARGEST_FLOAT16, INFINITE_FLOAT16 = 0x38800000, 0x477FE000, 0x477FF000
"""float32 patterns of 2^-14 (float16 is evenly spaced below), of 65504, its largest number, and 65520, where nearest
gives infinity."""
THREADED = 1 << 22
"""Minimum elements for work on several threads."""


def narrowed(values: Tensor, dtype: torch.dtype, rounding: Rounding = "unbiased") -> Tensor:
    """Return `values` in `dtype`: by the rule where that is bfloat16 or float16 and another dtype is rounded to it."""
    if values.dtype == dtype or dtype not in NARROW or rounding == "nearest":
        return values.to(dtype)
    output = torch.empty(values.shape, dtype=dtype, device=values.device)
    narrow_into(output, values, rounding)
    return output


@torch.no_grad()
def narrow_into(target: Tensor, source: Tensor, rounding: Rounding = "unbiased") -> None:
    """Copy `source` into `target` of the same shape, rounded like `narrowed`."""
    if target.dtype == source.dtype or target.dtype not in NARROW or rounding == "nearest":
        target.copy_(source)
        return
    bits = source.detach().to(torch.float32).contiguous().view(torch.int32)
    if source.device.type != "cpu":
        target.copy_(_compiled(target.dtype)(bits).view(target.dtype))
        return
    # The loop reads and writes host memory: what goes to a device is narrowed on the CPU first.
    in_place = target.device.type == "cpu" and target.is_contiguous()
    whole = target if in_place else torch.empty(target.shape, dtype=target.dtype)
    _on_processor(bits.view(-1), whole.detach().view(-1).view(torch.int16), target.dtype)
    if whole is not target:
        target.copy_(whole)


def bfloat16_bits(bits: Tensor) -> Tensor:
    """int16 patterns of bfloat16 from int32 patterns of float32."""
    threshold = (((bits >> 16) + 1) * GOLDEN) & 0xFFFF
    return ((bits + threshold) >> 16).to(torch.int16)


def float16_bits(bits: Tensor) -> Tensor:
    """Return int16 float16 patterns of int32 float32 patterns. From 2^-14 on, a cell is 2^13 patterns; below, sizes
    count in 2^-37, so a cell is 2^13 of these."""
    size = bits & 0x7FFFFFFF
    even = (bits.view(torch.float32).abs().clamp(max=2.0**-13) * 2.0**37).to(torch.int32)
    fine = torch.where(size >= EVEN_FLOAT16, size - (112 << 23), even)
    threshold = ((((fine >> 13) + 1) * GOLDEN) & 0xFFFF) >> 3
    half = (fine + threshold) >> 13
    half = torch.where(size >= LARGEST_FLOAT16, 0x7BFF, half)
    half = torch.where(size >= INFINITE_FLOAT16, 0x7C00, half)
    half = torch.where(size > 0x7F800000, 0x7E00, half)
    return (half | ((bits >> 31) << 15)).to(torch.int16)


@cache
def _compiled(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return torch.compile(bfloat16_bits if dtype == torch.bfloat16 else float16_bits, dynamic=True)


def _on_processor(bits: Tensor, output: Tensor, dtype: torch.dtype) -> None:
    """As `bfloat16_bits` and `float16_bits`, of vectors, in one pass over memory; on as many threads as torch uses."""
    kernel, threads = _kernel(dtype), torch.get_num_threads()
    source, target = _memory(bits, np.uint32), _memory(output, np.uint16)
    if threads == 1 or len(source) < THREADED:
        kernel(source, target)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(kernel, np.array_split(source, threads), np.array_split(target, threads)))


def _memory(values: Tensor, dtype: Any) -> np.ndarray[Any, Any]:
    """Return a contiguous tensor's memory, which must outlive it. After `numpy()`, storages could not be emptied."""
    if not len(values):
        return np.empty(0, dtype)
    memory: Any = (c_char * values.nbytes).from_address(values.data_ptr())
    return np.frombuffer(memory, dtype)


@cache
def _kernel(dtype: torch.dtype) -> Any:
    """Return the loop, compiled by numba on its first call; separate torch operations take four times as long as a
    copy."""
    import numba

    uint16: Any = numba.uint16
    uint32: Any = numba.uint32
    int32: Any = numba.int32
    golden = np.uint32(GOLDEN)
    smallest, largest, infinite = np.uint32(EVEN_FLOAT16), np.uint32(LARGEST_FLOAT16), np.uint32(INFINITE_FLOAT16)
    most, scale = np.float32(2.0**-13), np.float32(2.0**37)

    def to_bfloat16(source: Any, target: Any) -> None:
        for index in range(source.size):
            bits = source[index]
            threshold = (((bits >> uint32(16)) + uint32(1)) * golden) & uint32(0xFFFF)
            target[index] = uint16((bits + threshold) >> uint32(16))

    def to_float16(source: Any, target: Any) -> None:
        # Without branches and shifts by a variable, which would not become vector instructions.
        values = source.view(np.float32)
        for index in range(source.size):
            bits = source[index]
            size = bits & uint32(0x7FFFFFFF)
            even = uint32(int32(min(abs(values[index]), most) * scale))
            fine = uint32(size - uint32(112 << 23)) if size >= smallest else even
            threshold = ((((fine >> uint32(13)) + uint32(1)) * golden) & uint32(0xFFFF)) >> uint32(3)
            half = uint32(fine + threshold) >> uint32(13)
            half = uint32(0x7BFF) if size >= largest else half
            half = uint32(0x7C00) if size >= infinite else half
            half = uint32(0x7E00) if size > uint32(0x7F800000) else half
            target[index] = uint16(half | ((bits >> uint32(16)) & uint32(0x8000)))

    return numba.njit(nogil=True)(to_bfloat16 if dtype == torch.bfloat16 else to_float16)
