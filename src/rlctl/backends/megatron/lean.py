"""Parts of Megatron's layers in fewer passes over memory, for CPUs, where no compiler fuses operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Rotated(torch.autograd.Function):
    """Rotary embedding of [..., d] by cosines and sines [..., d / 2] of the angles: the first half of the channels
    pairs with the second. It rounds as the usual formula with whole rows does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    (left, right), (of_left, of_right) = x.chunk(2, -1), rotated.chunk(2, -1)
    torch.mul(left, cos, out=of_left).sub_(right * sin)
    torch.mul(right, cos, out=of_right).add_(left * sin)
    return rotated


class LookedUp(torch.autograd.Function):
    """Rows of an embedding whose gradient goes straight into the weight's buffer of gradients, `main_grad`: the usual
    one is a second tensor of the embedding's size, mostly zeros."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        # Detached: else `cpu_sums` returns a view, which Megatron's vocabulary parallel layer must not change.
        return F.embedding(ids, weight.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor | None]:
        (ids,), weight, grad = ctx.saved_tensors, ctx.weight, grads[0]
        weight.main_grad.index_add_(0, ids.flatten(), grad.reshape(-1, grad.shape[-1]).to(weight.main_grad.dtype))
        weight.grad_added_to_main_grad = True
        # Megatron's hooks want to see a gradient, if only from the output layer that shares the weight
        return None, None if hasattr(weight, "zero_out_wgrad") else torch.empty_like(weight)


def look_up(ids: Tensor, weight: Tensor) -> Tensor:
    """`F.embedding`, as `LookedUp` where the weight has a buffer of gradients."""
    if not (torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "main_grad")):
        return F.embedding(ids, weight)
    if getattr(weight, "zero_out_wgrad", False):  # the hook has no gradient left to add
        weight.zero_out_wgrad = False  # type: ignore[attr-defined]
    return LookedUp.apply(ids, weight)


def add_product(inputs: Tensor, grad: Tensor, total: Tensor) -> None:
    """Add the gradient of a weight, `grad` [T, out] times `inputs` [T, in], to its buffer."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), inputs)
    else:
        total.add_(grad.t() @ inputs)


def swiglu(y: Tensor) -> Tensor:
    """[..., 2 f] -> [..., f]."""
    gate, linear = y.chunk(2, -1)
    return F.silu(gate) * linear if torch.is_grad_enabled() else F.silu(gate).mul_(linear)


def swiglu_back(grad: Tensor, y: Tensor) -> Tensor:
    """The gradient [..., 2 f] of `swiglu` in four passes. Megatron writes it for a compiler: a dozen passes over the
    widest tensors."""
    gradient = torch.empty_like(y)
    (gate, linear), (of_gate, of_linear) = y.chunk(2, -1), gradient.chunk(2, -1)
    silu = F.silu(gate)
    torch.mul(grad, silu, out=of_linear)
    torch.mul(grad, linear, out=silu)
    torch.ops.aten.silu_backward.grad_input(silu, gate, grad_input=of_gate)
    return gradient
