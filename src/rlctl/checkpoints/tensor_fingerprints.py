"""Order-sensitive fingerprints of tensors that add up over boxes of any sharding.

The sum modulo 2^64 over elements of bits(element) * U(column) * V(row), where `bits` are in the receiving dtype,
`column` is the last index, `row` the other indices flattened, and U and V are odd pseudo-random 64-bit numbers: a
two-level multilinear hash (Carter and Wegman 1979). It depends on places in the whole tensor, not on processes. Both
zeros count as one, because prepacked weights cannot distinguish them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch

from rlctl.weights.readings import MASK as _MASK

# Elements at a time. On a CPU they stay in its cache between two passes; on other devices their int64 copy (2 MiB)
# lives in a buffer that is used again.
CPU_CHUNK, CHUNK = 1 << 21, 1 << 18
_U_SEED, _V_SEED = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(
    box: torch.Tensor, shape: Sequence[int], start: Sequence[int] | None = None, step: Sequence[int] | None = None
) -> int:
    """Return the fingerprint (0 .. 2^64 - 1) of `box`, part of a tensor of `shape`, at index `start` (default zero)
    with `step` (default one) per dimension. Any strided view works."""
    if box.dim() == 0:
        box, shape, start, step = box.reshape(1), (1,), (0,), (1,)
    start = tuple(start) if start is not None else (0,) * box.dim()
    step = tuple(step) if step is not None else (1,) * box.dim()
    if box.numel() == 0:
        return 0
    columns = _weights(_U_SEED, box.shape[-1], start[-1], step[-1]).to(box.device)
    rows = _rows(tuple(box.shape[:-1]), tuple(shape[:-1]), start[:-1], step[:-1]).to(box.device)
    sums = torch.empty(len(rows), dtype=torch.int64, device=box.device)
    if box.device.type == "cpu":
        _sum_rows(box.detach(), columns.numpy(), sums.numpy())
    else:
        bits = _Bits(box)
        for flat, first in _row_chunks(box, CHUNK):
            torch.sum(bits.of(flat).mul_(columns), -1, out=sums[first : first + len(flat)])
    return int((sums * rows).sum()) & _MASK


def _sum_rows(box: torch.Tensor, columns: np.ndarray, sums: np.ndarray) -> None:
    """Sum bits * columns along each row. NumPy widens the bits in small buffers while it sums, 2.5 times as fast as
    torch, which stores each intermediate."""
    if box.is_contiguous():
        box = box.view(-1, box.shape[-1])
    for flat, first in _row_chunks(box, CPU_CHUNK):
        bits = flat.view(_INTEGERS[flat.element_size()]).numpy()
        if flat.is_floating_point():
            bits = _without_negative_zero(bits)
        np.einsum("rc,c->r", bits, columns, dtype=np.int64, casting="safe", out=sums[first : first + len(flat)])


def _without_negative_zero(bits: np.ndarray) -> np.ndarray:
    """Replace negative zeros by zeros. As a signed integer, negative zero is the smallest one."""
    signed = bits.view(f"i{bits.itemsize}")
    least = np.iinfo(signed.dtype).min
    return bits if signed.min() != least else np.where(signed == least, bits.dtype.type(0), bits)


def _row_chunks(box: torch.Tensor, chunk: int) -> Iterator[tuple[torch.Tensor, int]]:
    if box.dim() == 1:
        yield box.unsqueeze(0), 0
        return
    if box.dim() > 2:
        leading = box.shape[0]
        inner = box[0].numel() // box.shape[-1]
        for index in range(leading):
            for rows, first in _row_chunks(box[index], chunk):
                yield rows, index * inner + first
        return
    step = max(1, chunk // box.shape[1])
    for first in range(0, box.shape[0], step):
        yield box[first : first + step], first


class _Bits:
    """The bits of elements as int64, negative zero made positive, in buffers that all chunks share."""

    def __init__(self, box: torch.Tensor) -> None:
        columns = box.shape[-1]
        rows = min(max(1, CHUNK // columns), max(1, box.numel() // columns))
        self.values = torch.empty(rows, columns, dtype=box.dtype, device=box.device)
        self.bits = torch.empty(rows, columns, dtype=torch.int64, device=box.device)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        values, bits = self.values[: len(flat)], self.bits[: len(flat)]
        if flat.is_floating_point():
            torch.add(flat, 0.0, out=values)
        else:
            values.copy_(flat)
        return bits.copy_(values.view(_INTEGERS[values.element_size()]))


def _rows(box: tuple[int, ...], shape: tuple[int, ...], start: tuple[int, ...], step: tuple[int, ...]) -> torch.Tensor:
    if len(box) <= 1:
        return _weights(_V_SEED, box[0], start[0], step[0]) if box else _weights(_V_SEED, 1, 0, 1)
    index = torch.zeros(1, dtype=torch.int64)
    for length, full, first, every in zip(box, shape, start, step, strict=True):
        index = (index[:, None] * full + torch.arange(first, first + length * every, every)[None, :]).reshape(-1)
    return _mix(index, _V_SEED)


@lru_cache(maxsize=256)
def _weights(seed: int, length: int, first: int, step: int) -> torch.Tensor:
    return _mix(torch.arange(first, first + length * step, step, dtype=torch.int64), seed)


def _mix(index: torch.Tensor, seed: int) -> torch.Tensor:
    """Odd pseudo-random int64 of each index (the finaliser of SplitMix64; Steele, Lea and Flood 2014)."""
    x = (index + 1) * _signed(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shift_right(x, shift)) * _signed(factor)
    return (x ^ _shift_right(x, 31)) | 1


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's `>>` keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
