"""Packed matrices of quantized bases, as AWQ, GPTQ and compressed-tensors publish them, in one form.

Shapes: O outputs, I inputs, G groups of a row that share a scale, b bits of a code. An int32 holds 32 / b codes, the
first in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlctl.errors import InputError
from rlctl.models.facts import QuantizedBase
from rlctl.models.quantized_base import PARTS

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the codes of eight outputs lie in an int32 of AWQ, from the lowest bits on."""


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [O, I]: weight = (code - zero) * scale."""

    bits: int
    codes: Tensor
    """int32 [O, I b / 32]"""
    zeros: Tensor
    """uint8 [O, G]"""
    scales: Tensor
    """[O, G] in the dtype that is computed in: engines round scales to it."""

    def scaled_in(self, dtype: torch.dtype) -> PackedMatrix:
        return replace(self, scales=self.scales.to(dtype))

    def dequantized(self) -> Tensor:
        """Return [O, I] in the scales' dtype, rounded once, as vLLM's kernels do (the difference of two codes is
        exact). Takes 3 bytes of memory per weight in bfloat16."""
        outputs, groups = self.scales.shape
        stored = self.codes.view(torch.uint8)  # of a little-endian machine: the lowest bits first
        values = stored if self.bits == 8 else torch.stack([stored & 15, stored >> 4], -1)
        weight = values.view(outputs, groups, -1).to(self.scales.dtype)
        return weight.sub_(self.zeros[..., None]).mul_(self.scales[..., None]).flatten(1)


def read_packed(
    read: Callable[[str], Tensor], stem: str, base: QuantizedBase, shape: tuple[int, int], parts: Collection[str]
) -> PackedMatrix:
    """Return a layer's matrix in its published scales. `parts`: its stored tensors. Raises InputError for shapes that
    do not go with `shape` [O, I], and for an order of the inputs."""
    codes_name, zeros_name, scales_name = (f"{stem}.{part}" for part in PARTS[base.method][:3])
    per, (outputs, inputs) = 32 // base.bits, shape
    groups = inputs // base.group if base.group else 1
    codes, scales = read(codes_name), read(scales_name)
    zeros = read(zeros_name) if zeros_name in parts and not base.symmetric else None
    rows_first = base.method == "pack-quantized"
    expected = {
        "awq": ((inputs, outputs // per), (groups, outputs // per)),
        "gptq": ((inputs // per, outputs), (groups, outputs // per)),
        "pack-quantized": ((outputs, inputs // per), (outputs // per, groups)),
    }[base.method]
    sizes = ((codes_name, codes, expected[0]), (zeros_name, zeros, expected[1]),
             (scales_name, scales, (outputs, groups) if rows_first else (groups, outputs)))  # fmt: skip
    for name, tensor, size in sizes:
        if tensor is not None and tuple(tensor.shape) != size:
            raise InputError(f"Tensor {name} has shape {list(tensor.shape)}, but config.json implies {list(size)}.")
    if zeros is None and not base.symmetric:
        raise InputError(f"Tensor {zeros_name} is missing: config.json says that zero points are stored.")
    if (order := f"{stem}.g_idx") in parts and not _in_order(read(order), base.group or inputs):
        raise InputError(f"Tensor {order} orders the inputs (desc_act), which the trainer does not follow.")
    if base.method == "awq":
        codes, zeros = _awq_codes(codes).T, _awq_codes(zeros).T if zeros is not None else None
        codes = pack(codes, base.bits)
    elif base.method == "gptq":
        codes = codes.T.contiguous()  # the codes of an int32 are inputs already
    elif zeros is not None:
        zeros = unpack(zeros.T.contiguous(), base.bits).T
    middle = torch.full((outputs, groups), 1 << (base.bits - 1), dtype=torch.uint8)
    zeros = middle if zeros is None else zeros.to(torch.uint8)
    return PackedMatrix(base.bits, codes, zeros.contiguous(), (scales if rows_first else scales.T).contiguous())


def unpack(packed: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> codes, int32 [..., 32 n / b]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] -> int32 [..., n b / 32]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int64)
    words = (codes.unflatten(-1, (-1, 32 // bits)).to(torch.int64) << shifts).sum(-1)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)


def _awq_codes(packed: Tensor) -> Tensor:
    return unpack(packed, 4).unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2)


def _in_order(groups: Tensor, size: int) -> bool:
    return torch.equal(groups.long(), torch.arange(len(groups)) // size)
