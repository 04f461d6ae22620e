"""LoRA (arXiv 2106.09685), independent of the backend: initial values, products and gradients.

A policy computes as its engines do. They have either W' = W + scale * B A, rebuilt after each step, or W, and add
scale * B A x to W x (`training.lora.refit = adapters`, and packed bases); in bfloat16 the two round differently. Each
published matrix has its own A and B, as in PEFT, also where a backend fuses several (Megatron's q, k and v).

Shapes: T tokens, r rank, O outputs, I inputs of a layer.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlctl.errors import ConfigError
from rlctl.settings.training import Rounding
from rlctl.weights.adapter_sites import Site
from rlctl.weights.plan_execution import with_adapter
from rlctl.weights.rounding import narrow_into

if TYPE_CHECKING:
    from rlctl.backends.base import PolicySpec

Rows = slice | Tensor
"""Rows of a layer's weight: all of them, a range, or a list."""
EVERY = slice(None)


@dataclass(frozen=True)
class Part:
    """The adapter of one site in a layer of this rank: the rows of the weight and of B, and A [r, I]."""

    site: Site
    rows: Rows
    a: Tensor


class Adapted:
    """The common part of adapted layers."""

    weight: nn.Parameter
    lora_a: nn.Parameter  # [r of each site, I], or this rank's part
    lora_b: nn.Parameter  # [O, r], or this rank's part
    sites: tuple[tuple[Site, Rows], ...]
    """Adapters of the layer in the order of A, and their rows of B. Other rows of B are 0."""
    adds: bool = False
    """Whether adapters are added to the product of `weight`, which is the base; else it is the merged weight."""
    bare: bool = False
    """Whether adapters that are added are left out."""
    dropped: Dropped | None = None
    """The dropout of the adapters' inputs; None: without."""

    @property
    def idle(self) -> bool:
        """Whether the product of `weight` is all of the output, and nobody asks for gradients."""
        return self.bare if self.adds else not torch.is_grad_enabled()

    def inner_product(self, input: Tensor) -> Tensor:
        """Return A x [T, r of each site]. A merged weight gives x its whole gradient."""
        if self.dropped is not None:
            input = self.dropped(input)
        return F.linear(input if self.adds else input.detach(), self.lora_a)

    def with_adapters(self, out: Tensor, inner_Tr: Tensor) -> Tensor:
        """Return `out` of the weight with the adapters, and gradients for B and A x (`inner_Tr`)."""
        rows, scales = zip(*((rows, site.scale) for site, rows in self.sites), strict=True)
        if self.adds and out._is_view():  # a collective of one rank returns its input, which takes no sum in place
            out = out.clone()
        return _WithAdapters.apply(out, inner_Tr, self.lora_b, rows, scales, self.adds)

    def parts(self, a: Tensor) -> tuple[Part, ...]:
        """Return the adapters with their parts of `a`."""
        rank = self.lora_b.shape[1]
        return tuple(Part(site, rows, a[i * rank : (i + 1) * rank]) for i, (site, rows) in enumerate(self.sites))


class Dropout:
    """Dropout of adapters' inputs in the training passes of a rank (`training.lora.dropout`). Masks follow from the
    seed, the number of optimizer steps, the micro-batch and the layer, so that recomputation and a resume repeat
    them."""

    def __init__(self, rate: float, seed: int, rank: int, tp: int) -> None:
        self.rate, self._seed, self._rank, self._tp = rate, seed, rank, tp
        self._step: int | None = None
        self.row = 0
        """Number of the micro-batch that is computed."""

    @contextlib.contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Drop inputs in the block, which computes optimizer step `step`."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def of_layer(self, name: str, divided: bool) -> Dropped:
        """Return the dropout of one layer. `divided`: each tensor-parallel rank has other inputs."""
        return Dropped(self, f"{name} {self._rank if divided else self._rank // self._tp}")

    @property
    def key(self) -> str:
        """The name of the micro-batch's masks; empty: nothing is dropped."""
        return "" if self._step is None else f"{self._seed} {self._step} {self.row}"


@dataclass(frozen=True)
class Dropped:
    """The dropout of one layer's inputs."""

    dropout: Dropout
    name: str

    def __call__(self, x: Tensor) -> Tensor:
        """Return x with elements set to 0 at the rate of the dropout, and the others divided by the rest."""
        if not (key := self.dropout.key):
            return x
        generator = torch.Generator(device=x.device).manual_seed(zlib.crc32(f"{key} {self.name}".encode()))
        kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.dropout.rate
        return x * (kept / (1 - self.dropout.rate)).to(x.dtype)


def dropout_of(spec: PolicySpec, rank: int) -> Dropout | None:
    """Return the dropout of a policy's adapters on one rank; None: without."""
    rate = spec.lora.dropout if spec.lora.rank else 0.0
    return Dropout(rate, spec.seed, rank, spec.parallel.tp) if rate else None


@contextlib.contextmanager
def without_adapters(models: Iterable[nn.Module]) -> Iterator[None]:
    """Leave out the adapters that layers add, in the block."""
    layers = [module for model in models for module in model.modules() if isinstance(module, Adapted)]
    for layer in layers:
        layer.bare = True
    try:
        yield
    finally:
        for layer in layers:
            layer.bare = False


class _WithAdapters(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, inner_Tr: Tensor, b: Tensor, rows: tuple[Rows, ...], scales: tuple, adds: bool
    ) -> Tensor:
        ctx.save_for_backward(inner_Tr, b)
        ctx.rows, ctx.scales = rows, scales
        if not adds:
            return out.view_as(out)
        _add(out.view(-1, out.shape[-1]), inner_Tr.flatten(0, -2), b, rows, scales)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inner_Tr, b = ctx.saved_tensors
        rank = b.shape[1]
        if _is_whole(ctx.rows[0]):
            scaled = ctx.scales[0] * inner_Tr.flatten(0, -2)
            return grad, ctx.scales[0] * (grad @ b), grad.flatten(0, -2).T @ scaled, None, None, None
        of_inner, of_b = list[Tensor](), torch.zeros_like(b)
        for i, (rows, scale) in enumerate(zip(ctx.rows, ctx.scales, strict=True)):
            of_rows, inner = grad[..., rows], scale * inner_Tr[..., i * rank : (i + 1) * rank]
            of_inner.append(scale * (of_rows @ b[rows]))
            of_b[rows] = of_rows.flatten(0, -2).T @ inner.flatten(0, -2)
        return grad, torch.cat(of_inner, -1), of_b, None, None, None


def _add(out_TO: Tensor, inner_Tr: Tensor, b: Tensor, rows: tuple[Rows, ...], scales: tuple[float, ...]) -> None:
    """Add scale B (A x), rounded as engines round it (`AddedProduct`): A x once, and the sum once."""
    rank = b.shape[1]
    for i, (some, scale) in enumerate(zip(rows, scales, strict=True)):
        inner = inner_Tr[:, i * rank : (i + 1) * rank]
        if isinstance(some, slice):
            out_TO[:, some].addmm_(inner, b[some].T, alpha=scale)
        else:
            out_TO[:, some] = torch.addmm(out_TO[:, some], inner, b[some].T, alpha=scale)


def _is_whole(rows: Rows) -> bool:
    return isinstance(rows, slice) and rows == EVERY


class WeightGradients(torch.autograd.Function):
    """A merged weight, or a stack of them, as it is, with gradients for its A and B."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b = ctx.saved_tensors
        scaled = ctx.scale * grad
        return None, b.mT @ scaled, scaled @ a.mT, None


@dataclass(frozen=True)
class Adapter:
    """This rank's part of an adapted layer: its weight, live, and the adapters in the dtype that is computed in."""

    weight: Tensor
    b: Tensor
    parts: tuple[Part, ...]

    def merge(self, base: Tensor, rounding: Rounding) -> None:
        """Write the merged weight of a `base` [O, I], or [E, ..., I] of experts, in the compute dtype into the
        layer."""
        if self.weight.dim() > 2:
            [part], (a, b) = self.parts, (self.parts[0].a, self.b)
            for expert, weight in enumerate(self.weight):
                left, right = b[expert].flatten(0, -2), a[expert]
                left, right = (right.T, left.T) if part.site.place.transposed else (left, right)
                merged = with_adapter(base[expert].flatten(0, -2), right, left, part.site.scale)
                narrow_into(weight.flatten(0, -2), merged, rounding)
            return
        if _is_whole(self.parts[0].rows):
            part = self.parts[0]
            narrow_into(self.weight, with_adapter(base, part.a, self.b, part.site.scale), rounding)
            return
        merged = base.float()
        merged = merged.clone() if merged is base else merged
        for part in self.parts:
            merged[part.rows] = with_adapter(base[part.rows], part.a, self.b[part.rows], part.site.scale)
        narrow_into(self.weight, merged, rounding)


def require_kind(name: str, module: nn.Module, kinds: Iterable[type]) -> None:
    """Raise ConfigError where a layer is of a class that adapters do not cover."""
    if type(module) not in kinds:
        raise ConfigError(
            f"training.lora: {name} is a {type(module).__name__}, which adapters do not cover.",
            "Name it in training.lora.exclude, or train all weights.",
        )


def first_a(rank: int, inputs: int, seed: int, name: str) -> Tensor:
    """Return the initial A [r, I], uniform, equal on all ranks, layouts and backends. `name`: transformers'."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    bound = 1 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)


def is_adapter(name: str) -> bool:
    return name.endswith(("lora_a", "lora_b"))
