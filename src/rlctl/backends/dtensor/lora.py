"""Adapters on the linear layers of transformers' modules, under FSDP2 and tensor parallelism.

The layers whose weights Megatron fuses share one A. Adapters are parameters of the layer itself, so that they are
divided, sharded and swapped for the rank's parts as its weight is.

Shapes: r rank, I inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from rlctl.backends.dtensor.tensor_parallel import local_part
from rlctl.backends.lora import Adapted, first_a, merged, require_kind, takes_adapter
from rlctl.config.schema import LoraConfig
from rlctl.errors import ConfigError
from rlctl.weights.dtensor import DTensorWorld
from rlctl.weights.megatron_names import slot


class AdaptedLinear(Adapted, nn.Linear):
    """A linear layer with adapters."""

    shared: str
    """Megatron's name of the layer that this one is a part of, whose parts share A."""

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        if not self.adapting:
            return out
        return out + self.scale * F.linear(F.linear(input, self.lora_a), self.lora_b)


def adapt(inner: Any, world: DTensorWorld, lora: LoraConfig) -> None:
    """Freeze a model without memory and put adapters on the targets. Raises ConfigError where a target is a layer of
    another kind, and where there is none."""
    inner.requires_grad_(False)
    found = dict[str, nn.Parameter]()
    for name, shared in _targets(world, lora):
        module = inner.get_submodule(name)
        require_kind(name, module, (nn.Linear,))
        module.__class__ = AdaptedLinear
        a = nn.Parameter(module.weight.new_empty(lora.rank, module.in_features))
        module.lora_a = found.setdefault(shared, a)
        module.lora_b = nn.Parameter(module.weight.new_empty(module.out_features, lora.rank))
        module.scale, module.shared = lora.alpha / lora.rank, shared
    if not found:
        raise ConfigError(
            f"training.lora: the model has none of the layers of training.lora.targets ({', '.join(lora.targets)}).",
            "Name others, or train all weights.",
        )


def _targets(world: DTensorWorld, lora: LoraConfig) -> Iterator[tuple[str, str]]:
    """(module, Megatron's name of the layer that has its weight)."""
    facts = world.facts
    for name, role in world.roles.items():
        if not name.endswith(".weight") or ".layers." not in name or world.is_expert(name):
            continue
        layer = int(name.partition(".layers.")[2].partition(".")[0])
        own = slot(role, "local", "sequential", mla=facts.mla is not None, moe_layer=facts.is_moe_layer(layer)).name
        shared = own.removesuffix(".weight")
        if takes_adapter(shared.rpartition(".")[2], lora):
            yield name.removesuffix(".weight"), f"decoder.layers.{layer}.{shared}"


def adapted_layers(inner: nn.Module) -> dict[str, AdaptedLinear]:
    """Adapted layers by the names of the modules."""
    return {name: module for name, module in inner.named_modules() if isinstance(module, AdaptedLinear)}


@torch.no_grad()
def begin(inner: nn.Module, world: DTensorWorld, rank: int, seed: int) -> None:
    """Give adapters their first values, A uniform and B 0."""
    shared = dict[str, nn.Parameter]()
    for name, layer in adapted_layers(inner).items():
        layer.lora_a = shared.setdefault(layer.shared, layer.lora_a)  # `to_empty` may have made several of one
        whole_rI = first_a(layer.lora_a.shape[0], layer.in_features, seed, layer.shared)
        set_part(world, rank, f"{name}.lora_a", layer.lora_a, whole_rI)
        local_part(layer.lora_b).zero_()


@torch.no_grad()
def set_part(world: DTensorWorld, rank: int, name: str, own: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of a whole adapter, or of one of its moments, into it."""
    box = world.adapter_box(name, tuple(whole.shape), rank)
    part = whole[tuple(slice(span.start, span.start + span.count) for span in box)]
    local_part(own).copy_(part.to(own.dtype))


def adapter_parameters(inner: nn.Module) -> dict[str, Tensor]:
    """A and B of each adapted layer; A that several layers share is there for each of them, so that a checkpoint can be
    read a layer at a time."""
    return {
        f"{name}.{which}": getattr(layer, which)
        for name, layer in adapted_layers(inner).items()
        for which in ("lora_a", "lora_b")
    }


def merges(inner: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """For the weight of each adapted layer what makes this rank's part of W'. Collective: gathers A, of which FSDP2 has
    given each rank some rows."""
    gathered, found = dict[str, Tensor](), {}
    for name, layer in adapted_layers(inner).items():
        if layer.shared not in gathered:
            gathered[layer.shared] = _all_rows(layer.lora_a.detach())
        parts = local_part(layer.weight), gathered[layer.shared], local_part(layer.lora_b)
        found[f"{name}.weight"] = partial(merged, *parts, layer.scale)
    return found


def _all_rows(a: Tensor) -> Tensor:
    """A with the rows of all shards, and this rank's part of the columns."""
    if not isinstance(a, DTensor):
        return a
    mesh = a.device_mesh
    assert mesh.mesh_dim_names is not None
    places = [own if axis == "tp" else Replicate() for axis, own in zip(mesh.mesh_dim_names, a.placements, strict=True)]
    return a.redistribute(placements=places).to_local()
