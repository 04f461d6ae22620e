"""Executing a transfer plan on tensors of this process: strided views, transforms, fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from rlctl.settings.training import Rounding
from rlctl.weights.layout import Fill, ParamSpec, Span, View, view_of
from rlctl.weights.rounding import narrow_into, narrowed
from rlctl.weights.transfer_plan import Copy
from rlctl.weights.transforms import Add, Cast, Dequantize, MergeLora, Transform

Read = Callable[[str], torch.Tensor]
"""Reads a whole param of the source by name, for transforms that need more than their data."""

MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def strided(memory: torch.Tensor, view: View) -> torch.Tensor:
    return torch.as_strided(memory, view.shape, view.strides, memory.storage_offset() + view.offset)


def transformed(
    values: torch.Tensor, copy: Copy, read: Read | None = None, rounding: Rounding = "unbiased"
) -> torch.Tensor:
    """Apply a copy's transforms to `values`; lossless casts happen on copying, others by `rounding`. `read` returns
    further params (FP8 scales, adapters)."""
    for transform in copy.transforms:
        if not isinstance(transform, Cast):
            values = _apply(transform, values, copy, read)
        elif not transform.exact:
            values = narrowed(values, dtype_of(transform.target), rounding)
    return values


def execute(
    copy: Copy,
    source: torch.Tensor,
    destination: torch.Tensor,
    read: Read | None = None,
    rounding: Rounding = "nearest",
) -> None:
    values = transformed(strided(source, copy.source_view), copy, read, rounding)
    narrow_into(strided(destination, copy.destination_view), values, rounding)


def fill(fills: Iterable[Fill], params: Mapping[str, torch.Tensor], shapes: Mapping[str, ParamSpec]) -> None:
    """Write the padding that no tensor determines."""
    for item in fills:
        strided(params[item.param], view_of(shapes[item.param], item.box)).fill_(item.value)


def _apply(transform: Transform, values: torch.Tensor, copy: Copy, read: Read | None) -> torch.Tensor:
    if isinstance(transform, Add):
        return values + transform.value
    assert read is not None, transform
    if isinstance(transform, Dequantize):
        rows, columns = (
            _indices(span) // size for span, size in zip(copy.tensor_box, transform.block_size, strict=True)
        )
        out = values.to(torch.float32)
        wide = read(transform.scale).float()[:, columns]
        for first in range(0, len(rows), 1024):  # the scales of all rows at once would double the memory
            out[first : first + 1024] *= wide[rows[first : first + 1024]]
        return out
    assert isinstance(transform, MergeLora), transform
    *stack, rows, columns = (_indices(span) for span in copy.tensor_box)
    base = narrowed(values, dtype_of(transform.dtype), transform.rounding)
    a, b = read(transform.a), read(transform.b)
    if not stack:
        return with_adapter(base, a[:, columns], b[rows], transform.scale)
    merged = torch.empty_like(base, dtype=torch.float32)
    for number, expert in enumerate(stack[0]):
        right, left = (b[expert].T, a[expert].T) if transform.transposed else (a[expert], b[expert])
        merged[number] = with_adapter(base[number], right[:, columns], left[rows], transform.scale)
    return merged


def with_adapter(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """weight + scale * (b @ a), in float32 (into `out`, if given)."""
    if out is None:
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)
    return out.copy_(weight).addmm_(b.float(), a.float(), alpha=scale)


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., G, B] pairs of e2m1 and [..., G] biased exponents -> [..., G * B * 2] (OCP Microscaling Formats 1.0)."""
    table = torch.tensor(MXFP4_VALUES, dtype=torch.float32)
    pairs = torch.stack([table[(blocks & 0x0F).long()], table[(blocks >> 4).long()]], dim=-1)
    scaled = torch.ldexp(pairs, (scales.to(torch.int32) - 127)[..., None, None])
    return scaled.flatten(-3).to(dtype)


def _indices(span: Span) -> torch.Tensor:
    return torch.arange(span.start, span.last + 1, span.step)
