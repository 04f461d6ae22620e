"""LoRA (arXiv 2106.09685), independent of the backend: targets, initial values, and gradients of merged weights.

W' = W + alpha / rank * B A. The model and the engines compute with W', rebuilt after each step; adding B A x to W x
would round twice, which in bfloat16 doubles the log-prob difference from an engine. Parts that Megatron fuses (q, k, v;
gate, up) share one A in every backend, so a run can change its backend.

Shapes: T tokens, r rank, O outputs, I inputs of a layer.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from rlctl.errors import ConfigError
from rlctl.settings.training import LoraConfig

LAYERS = {
    "attention": ("linear_qkv", "linear_q_up_proj", "linear_kv_up_proj", "linear_q_proj", "linear_proj"),
    "mlp": ("linear_fc1", "linear_fc2"),
}
"""Layers of each `training.lora.targets` entry, by Megatron's names. MLA down-projections and routed experts are
excluded."""


class Adapted:
    """The common part of adapted layers, whose weight is the merged one."""

    weight: nn.Parameter
    lora_a: nn.Parameter  # [r, I], or this rank's part
    lora_b: nn.Parameter  # [O, r], or this rank's part
    scale: float

    def with_gradients(self, out: Tensor, inner_Tr: Tensor) -> Tensor:
        """Return `out` of the merged weight, with gradients for B and A x (`inner_Tr`)."""
        return _WithGradients.apply(out, inner_Tr, self.lora_b, self.scale)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, inner_Tr: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(inner_Tr, b)
        ctx.scale = scale
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inner_Tr, b = ctx.saved_tensors
        scaled = ctx.scale * grad
        return grad, scaled @ b, scaled.flatten(0, -2).T @ inner_Tr.flatten(0, -2), None


@dataclass(frozen=True)
class Adapter:
    """This rank's part of an adapted layer: its weight, live, and the adapter in the dtype that is computed in."""

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float


def takes_adapter(layer: str, lora: LoraConfig) -> bool:
    """Whether a layer has adapters, by the last word of Megatron's name."""
    return any(layer in LAYERS[target] for target in lora.targets)


def is_excluded(module: str, lora: LoraConfig) -> bool:
    """Whether a module of the targets has no adapters all the same, by its name in the backend's model."""
    return any(fnmatchcase(module, pattern) for pattern in lora.exclude)


def require_kind(name: str, module: nn.Module, kinds: Iterable[type]) -> None:
    """Raise ConfigError where a layer is of a class that adapters do not cover."""
    if type(module) not in kinds:
        raise ConfigError(
            f"training.lora: {name} is a {type(module).__name__}, which adapters do not cover.",
            "Leave its group out of training.lora.targets, or train all weights.",
        )


def first_a(rank: int, inputs: int, seed: int, name: str) -> Tensor:
    """Return the initial A [r, I], uniform, equal on all ranks and layouts. `name`: Megatron's, with layers counted
    over the model."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    bound = 1 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in ("lora_a", "lora_b")
