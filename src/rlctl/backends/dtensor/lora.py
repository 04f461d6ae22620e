"""Adapters on modules of transformers under FSDP2 and tensor parallelism. Adapters are parameters of the module, so
they are sharded with its weight.

Shapes: E experts, r rank, O outputs, I inputs of a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from rlctl.backends.dtensor.packed_linear import PackedLinear
from rlctl.backends.dtensor.tensor_parallel import local_part
from rlctl.backends.lora_adapter import EVERY, Adapted, Adapter, Dropout, Part, WeightGradients, first_a, require_kind
from rlctl.errors import ConfigError
from rlctl.models.matrices import Role
from rlctl.settings.training import LoraConfig
from rlctl.weights.adapter_sites import Site, saved_whole, sites
from rlctl.weights.dtensor import ROW_ROLES, DTensorWorld


class AdaptedModule(Adapted, nn.Module):
    """A module with adapters."""

    called: bool = False
    """Whether the model has computed through it."""


class AdaptedLinear(AdaptedModule, nn.Linear):
    """A linear layer with adapters."""

    def forward(self, input: Tensor) -> Tensor:
        self.called = True
        out = super().forward(input)
        return out if self.idle else self.with_adapters(out, self.inner_product(input))


class AdaptedPackedLinear(AdaptedLinear, PackedLinear):
    """A packed layer with adapters. Merged weights would need other codes."""

    adds = True


class AdaptedRouter(AdaptedModule):
    """A router with adapters, which multiplies by its weight in its own way: gradients go through the weight's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        [(site, _)], weight = self.sites, self._parameters["weight"]
        self._parameters["weight"] = WeightGradients.apply(weight, self.lora_a, self.lora_b, site.scale)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters["weight"] = weight


class AdaptedStacks(nn.Module):
    """Routed experts with adapters on stacks of their matrices: gradients go through the stacks'."""

    stacks: dict[str, Site]
    """The adapted parameters; A [E, r, I] and B [E, ..., O, r] of `<name>` are `<name>_lora_a` and `<name>_lora_b`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        held: dict[str, Any] = {name: self._parameters[name] for name in self.stacks}
        for name, site in self.stacks.items():
            a, b = (self._parameters[f"{name}_lora_{which}"] for which in "ab")
            weight = held[name].mT if site.place.transposed else held[name]
            weight = WeightGradients.apply(weight, a, b, site.scale)
            self._parameters[name] = weight.mT if site.place.transposed else weight
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(held)


ADAPTED: dict[type, type] = {nn.Linear: AdaptedLinear, PackedLinear: AdaptedPackedLinear}


class Held(NamedTuple):
    """A site with its adapter in a model."""

    site: Site
    module: nn.Module
    a: Tensor
    b: Tensor


def adapt(inner: Any, world: DTensorWorld, lora: LoraConfig) -> None:
    """Freeze a model without memory and add adapters at the sites that settings name. Raises ConfigError for modules
    that adapters do not cover, and for weights that could not be exported."""
    inner.requires_grad_(False)
    together = _published_together(world) if world.facts.listed else set[str]()
    for site in sites(world.facts, lora).all:
        if site.place.is_expert:
            _adapt_stack(inner, site)
            continue
        _require_exportable(site, together)
        module = inner.get_submodule(site.module)
        module.__class__ = _adapted_class(site, module)
        a, b = (nn.Parameter(torch.empty(shape, device="meta")) for shape in site.place.adapter_shapes(site.rank))
        module.lora_a, module.lora_b = a, b
        module.sites = ((site, EVERY),)
        module.adds = module.adds or lora.adds
    for param in saved_whole(world.facts, lora):
        inner.get_parameter(param).requires_grad_(True)


def _adapt_stack(inner: Any, site: Site) -> None:
    path, _, name = site.module.rpartition(".")
    module = inner.get_submodule(path)
    if getattr(module, "is_transposed", False) != site.place.transposed:
        raise ConfigError(
            f"training.lora: {site.module} has inputs before outputs, unlike its published tensor.",
            "Name it in training.lora.exclude, or train all weights.",
        )
    if not isinstance(module, AdaptedStacks):
        module.__class__ = type(f"Adapted{type(module).__name__}", (AdaptedStacks, type(module)), {})
        module.stacks = {}
    module.stacks[name] = site
    for which, shape in zip("ab", site.place.adapter_shapes(site.rank), strict=True):
        module.register_parameter(f"{name}_lora_{which}", nn.Parameter(torch.empty(shape, device="meta")))


def _adapted_class(site: Site, module: nn.Module) -> type:
    if site.place.role is Role.ROUTER and type(module) not in ADAPTED:
        return type(f"Adapted{type(module).__name__}", (AdaptedRouter, type(module)), {})
    require_kind(site.module, module, ADAPTED)
    return ADAPTED[type(module)]


def _require_exportable(site: Site, together: set[str]) -> None:
    if site.place.param in together:
        raise ConfigError(
            f"training.lora: {site.place.param} is published in one tensor with other weights, so that adapters on it "
            "could not be exported.",
            "Name it in training.lora.exclude, or train all weights.",
        )


def _published_together(world: DTensorWorld) -> set[str]:
    layout, counts = world.modules, Counter(piece.param for piece in world.modules.pieces)
    return {p.param for p in layout.pieces if counts[p.param] > 1 or len(layout.by_tensor[p.tensor]) > 1}


def drop_inputs(inner: nn.Module, dropout: Dropout) -> None:
    """Set the dropout of every adapter. Row-split matrices have different inputs, and so different masks, on each
    rank."""
    for site, module, *_ in held_adapters(inner):
        module.dropped = dropout.of_layer(site.module, site.place.role in ROW_ROLES)  # type: ignore[assignment]


def require_called(inner: nn.Module) -> None:
    """Raise ConfigError for an adapter that a forward pass did not use, because a fused kernel bypasses its layer."""
    layers = ((name, module) for name, module in inner.named_modules() if isinstance(module, AdaptedModule))
    if missed := [name for name, layer in layers if not layer.called]:
        raise ConfigError(
            f"training.lora: transformers computes {missed[0]} without its linear layer, so that adapters on it would "
            "have no effect.",
            "Name it in training.lora.exclude, or train all weights.",
        )


def held_adapters(inner: nn.Module) -> Iterator[Held]:
    for module in inner.modules():
        if isinstance(module, AdaptedModule):
            [(site, _)] = module.sites
            yield Held(site, module, module.lora_a, module.lora_b)
        elif isinstance(module, AdaptedStacks):
            for name, site in module.stacks.items():
                yield Held(site, module, module._parameters[f"{name}_lora_a"], module._parameters[f"{name}_lora_b"])  # type: ignore[arg-type]


@torch.no_grad()
def begin(inner: nn.Module, world: DTensorWorld, rank: int, seed: int) -> None:
    """Give adapters their first values, A uniform and B 0."""
    for site, _, a, b in held_adapters(inner):
        shape, _ = site.place.adapter_shapes(site.rank)
        whole = first_a(prod(shape[:-1]), site.place.inputs, seed, site.module).view(shape)
        set_part(world, rank, f"{site.module}.lora_a", a, whole)
        local_part(b).zero_()


@torch.no_grad()
def set_part(world: DTensorWorld, rank: int, name: str, shard: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of a whole adapter, or of one of its moments, into it."""
    box = world.adapter_box(name, tuple(whole.shape), rank)
    part = whole[tuple(slice(span.start, span.start + span.count) for span in box)]
    local_part(shard).copy_(part.to(shard.dtype))


def adapter_parameters(inner: nn.Module) -> dict[str, Tensor]:
    """Return A and B of each adapted matrix or stack, as checkpoints call them."""
    return {
        f"{held.site.module}.{which}": value
        for held in held_adapters(inner)
        for which, value in (("lora_a", held.a), ("lora_b", held.b))
    }


def adapters(inner: nn.Module, narrow: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Adapter]]:
    """Return adapted weights by name, merged as the model computes them (`narrow`); packed layers merge nothing.
    Collective: gathers A over FSDP2's shards; A of experts is sharded as they are."""
    for site, module, a, b in held_adapters(inner):
        name = site.place.param.rpartition(".")[2]
        if name not in module._parameters:
            continue
        weight = local_part(module.get_parameter(name).detach())
        a = local_part(a.detach()) if site.place.is_expert else _all_rows(a.detach())
        part = Part(site, EVERY, narrow(a))
        yield site.place.param, Adapter(weight, narrow(local_part(b.detach())), (part,))


def _all_rows(a: Tensor) -> Tensor:
    if not isinstance(a, DTensor):
        return a
    mesh = a.device_mesh
    assert mesh.mesh_dim_names is not None
    places = [
        placement if axis == "tp" else Replicate()
        for axis, placement in zip(mesh.mesh_dim_names, a.placements, strict=True)
    ]
    return a.redistribute(placements=places).to_local()
